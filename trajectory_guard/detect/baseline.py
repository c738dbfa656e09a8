"""The run's own level against its forecast: calibrated once, then followed with a delay."""

from trajectory_guard.detect.noise import CLIP
from trajectory_guard.detect.state import PlainState

__all__ = ["Baseline", "robust_level"]

BLOCK = 32
"""Observations averaged into one block."""
WAITING = 10
"""Blocks that wait before they are learnt: the baseline never sees the last 320 observations, so it cannot learn a
fault before the tests had time to see it. Measured by tests/benchmarks/detection.py."""
MEMORY = 500
"""Observations that the baseline remembers at most."""


def robust_level(residuals: list[float], sigma: float) -> float:
    """Return the level of `residuals`: their median, then five steps towards the mean of values clipped at 2 sigma."""
    level = sorted(residuals)[len(residuals) // 2]
    for _ in range(5):
        clipped = (min(CLIP, max(-CLIP, (r - level) / sigma)) for r in residuals)
        level += sigma * sum(clipped) / len(residuals)
    return level


class Baseline(PlainState):
    """Level with delayed forgetting: b += (m - b) 32 / N for every block mean m that leaves the queue, N <= 500."""

    __slots__ = ("blocks", "count", "level", "observations", "total")

    def __init__(self) -> None:
        self.level = 0.0
        self.observations = 0
        self.blocks: list[float] = []
        self.total = 0.0
        self.count = 0

    def calibrate(self, residuals: list[float], sigma: float) -> None:
        """Set the level from the calibration's residuals and start an empty queue."""
        self.level = robust_level(residuals, sigma)
        self.observations = len(residuals)
        self.drop_waiting()

    def add(self, total: float, count: int) -> None:
        """Take `count` clipped residuals, b + s clip(u), by their sum in nats; at most a block of them."""
        self.total += total
        self.count += count
        if self.count >= BLOCK:
            self.blocks.append(self.total / self.count)
            self.total = 0.0
            self.count = 0
            if len(self.blocks) > WAITING:
                self.observations = min(MEMORY, self.observations + BLOCK)
                self.level += (self.blocks.pop(0) - self.level) * BLOCK / self.observations

    def drop_waiting(self) -> None:
        """Forget what waits to be learnt: it may hold the beginning of a fault."""
        self.blocks = []
        self.total = 0.0
        self.count = 0
