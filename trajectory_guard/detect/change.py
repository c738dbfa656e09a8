"""Cumulative sums: fast warnings of a sustained change, with the onset that a rollback needs. No guarantee."""

from trajectory_guard.detect.state import PlainState

__all__ = ["Cusum", "slow_threshold"]

SLOW_DRIFT, SLOW_THRESHOLD = 0.14, 34.5
"""Slow test: sees drifts and plateaus. In sigmas; measured by tests/benchmarks/detection.py."""
MID_DRIFT, MID_THRESHOLD = 0.36, 16.0
"""Mid test: sees level shifts of half a sigma and more. In sigmas; measured by tests/benchmarks/detection.py."""
SMOOTHING = 200.0
"""Observations of the running mean that the slow test's gate is compared with."""


def slow_threshold(observation: int) -> float:
    """Return H = 34.5 (1 + (400 / (i + 1))^2): higher while the baseline rests on few observations.

    Example:
        >>> slow_threshold(399), round(slow_threshold(100_000), 2)
        (69.0, 34.5)
    """
    share = 400.0 / (observation + 1)
    return SLOW_THRESHOLD * (1.0 + share * share)


class Cusum(PlainState):
    """One-sided cumulative sum S = max(0, S + y - k) [1], and what was seen since S last was zero.

    References:
        [1] E. S. Page, "Continuous inspection schemes", Biometrika 41 (1954), doi:10.1093/biomet/41.1-2.100.
    """

    __slots__ = ("clipped", "onset", "raw", "seen", "total")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start at zero."""
        self.total = 0.0
        self.onset = 0
        self.seen = 0
        self.clipped = 0.0
        self.raw = 0.0

    def update(self, step: int, clipped: float, raw: float, drift: float, cap: float) -> float:
        """Take one standardised residual (`clipped`, and `raw` for the size) and return S, at most `cap`."""
        total = self.total + clipped - drift
        if total <= 0.0:
            if self.seen:
                self.reset()
            return 0.0
        if self.seen == 0:
            self.onset = step
        self.seen += 1
        self.clipped += clipped
        self.raw += raw
        if total > cap:
            total = cap
        self.total = total
        return total

    @property
    def mean(self) -> float:
        """Mean of the clipped residuals since the last zero."""
        return self.clipped / self.seen if self.seen else 0.0

    @property
    def raw_mean(self) -> float:
        """Mean of the unclipped residuals since the last zero: the size of the change, in sigmas."""
        return self.raw / self.seen if self.seen else 0.0
