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
    """Cumulative sums to both sides [1], each S = max(0, S + increment), and what was seen since each last was zero.

    Example:
        >>> cusum = Cusum()
        >>> for step, y in enumerate([-1.0, 2.0, 1.0, 3.0], start=1):
        ...     total = cusum.update(step, y - 0.5, -y - 0.5, y)
        >>> total, cusum.onset(1), cusum.mean(1), cusum.total(-1)
        (4.5, 2, 2.0, 0.0)

    References:
        [1] E. S. Page, "Continuous inspection schemes", Biometrika 41 (1954), doi:10.1093/biomet/41.1-2.100.
    """

    __slots__ = ("down", "down_onset", "down_raw", "down_start", "seen", "up", "up_onset", "up_raw", "up_start")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start at zero."""
        self.seen = 0
        self.up = self.down = 0.0
        self.up_onset = self.down_onset = 0
        self.up_start = self.down_start = 0
        self.up_raw = self.down_raw = 0.0

    def update(self, step: int, rise: float, fall: float, raw: float) -> float:
        """Take the increments of both sums, and the value whose mean is the size of a change; return the larger sum."""
        self.seen += 1
        up = self.up + rise
        if up > 0.0:
            if self.up == 0.0:
                self.up_onset, self.up_start, self.up_raw = step, self.seen, raw
            else:
                self.up_raw += raw
            self.up = up
        else:
            self.up = up = 0.0
        down = self.down + fall
        if down > 0.0:
            if self.down == 0.0:
                self.down_onset, self.down_start, self.down_raw = step, self.seen, raw
            else:
                self.down_raw += raw
            self.down = down
        else:
            self.down = down = 0.0
        return up if up > down else down

    def cap(self, limit: float) -> None:
        """Let neither sum be over `limit`, so that it falls again soon after a change has ended."""
        self.up, self.down = min(self.up, limit), min(self.down, limit)

    def total(self, sign: int) -> float:
        """Return the sum to one side: +1 above, -1 below."""
        return self.up if sign > 0 else self.down

    def onset(self, sign: int) -> int:
        """Return the step of the first observation since the sum last was zero."""
        return self.up_onset if sign > 0 else self.down_onset

    def count(self, sign: int) -> int:
        """Return how many observations the sum holds."""
        if sign > 0:
            return self.seen - self.up_start + 1 if self.up else 0
        return self.seen - self.down_start + 1 if self.down else 0

    def mean(self, sign: int) -> float:
        """Return the mean of the raw values that the sum holds: the size of the change, with its sign."""
        count = self.count(sign)
        return (self.up_raw if sign > 0 else self.down_raw) / count if count else 0.0
