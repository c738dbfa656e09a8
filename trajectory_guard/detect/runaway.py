"""A run that is being lost: the excess eats what training has gained, or grows faster and faster."""

from itertools import pairwise

from trajectory_guard.detect.state import PlainState

__all__ = ["Runaway"]

LOST = 0.1
"""Share of the progress from the untrained loss that the excess must eat."""
BLOCK = 16
GROWTH = 1.2


class Runaway(PlainState):
    """Block means of the residual while an excess is open.

    Fires when the smoothed excess passes 10 % of (ln V - forecast), the loss gained since the start; or when four block
    means of 16 observations accelerate, each rise 1.2 times the one before, by 12 standard errors in all.
    """

    __slots__ = ("blocks", "count", "total")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the blocks."""
        self.blocks: list[float] = []
        self.total = 0.0
        self.count = 0

    def update(
        self, excess: float, smooth_excess: float, sigma: float, gained: float
    ) -> tuple[str, float, float] | None:
        """Take one observation of an open excess, all in nats; return (rule, statistic, threshold) when it fires.

        Args:
            excess: residual over the run's own level.
            smooth_excess: running mean of it.
            sigma: noise of one observation.
            gained: untrained loss - forecast; NaN when the untrained loss is not known.
        """
        if smooth_excess > LOST * gained > 0.0:
            return "share of the progress lost", smooth_excess / gained, LOST
        self.total += excess
        self.count += 1
        if self.count < BLOCK:
            return None
        blocks = self.blocks
        blocks.append(self.total / BLOCK)
        self.total = 0.0
        self.count = 0
        if len(blocks) > 4:
            del blocks[0]
        if len(blocks) < 4:
            return None
        rises = [b - a for a, b in pairwise(blocks)]
        errors = (blocks[3] - blocks[0]) / (sigma / BLOCK**0.5)
        if rises[0] > 0.0 and rises[1] > GROWTH * rises[0] and rises[2] > GROWTH * rises[1] and errors > 12.0:
            return "accelerating rise of block means, in standard errors", errors, 12.0
        return None
