"""Outliers and spikes: one bad step informs, three of five warn."""

from trajectory_guard.detect.state import PlainState

__all__ = ["Spikes"]

SIGMAS, SHARE = 5.0, 0.02
"""An outlier lies over 5 sigmas and over 2 % of the forecast above the level. Measured by
tests/benchmarks/detection.py: healthy logs pass 5 sigmas in 0.3-1 % of steps, one step wide."""
WINDOW, NEEDED = 5, 3


class Spikes(PlainState):
    """Steps of the outliers among the last five observations."""

    __slots__ = ("recent",)

    def __init__(self) -> None:
        self.recent: list[int] = []

    def update(self, step: int, outlier: bool) -> bool:
        """Take one observation; return whether three of the last five are outliers."""
        recent = self.recent
        recent.append(step if outlier else 0)
        if len(recent) > WINDOW:
            del recent[0]
        return outlier and sum(1 for s in recent if s) >= NEEDED

    @property
    def onset(self) -> int:
        """First outlier among the last five observations."""
        return next(s for s in self.recent if s)

    def reset(self) -> None:
        """Forget the last observations."""
        self.recent = []
