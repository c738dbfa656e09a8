"""Outliers and spikes: one bad step informs, three of five warn."""

from trajectory_guard.detect.state import PlainState

__all__ = ["Spikes"]

SIGMAS, SHARE = 5.0, 0.02
"""An outlier lies over 5 sigmas and over 2 % of the forecast above the level. Measured by
tests/benchmarks/detection.py: healthy logs pass 5 sigmas in 0.3-1 % of steps, one step wide."""
WINDOW, NEEDED = 5, 3


class Spikes(PlainState):
    """Outliers among the last five observations: the steps and the running numbers of their observations."""

    __slots__ = ("observations", "steps")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the outliers."""
        self.steps: list[int] = []
        self.observations: list[int] = []

    def add(self, step: int, observation: int) -> bool:
        """Take one outlier, the `observation`-th of all; return whether three of the last five are outliers."""
        # A count that began anew leaves larger numbers behind: they are not of the last five either.
        kept = [i for i, seen in enumerate(self.observations) if observation - WINDOW < seen < observation]
        self.steps = [*(self.steps[i] for i in kept), step]
        self.observations = [*(self.observations[i] for i in kept), observation]
        return len(self.steps) >= NEEDED
