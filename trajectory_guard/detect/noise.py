"""The noise of one observation: its scale from differences, its correlation, its quantum, and changes of it."""

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import mul, sub

from trajectory_guard.detect.state import PlainState

__all__ = ["NoiseChange", "NoiseScale", "autocorrelation", "long_run_factor", "prior_sigma"]

WINDOW = 512
"""Differences that the scale is taken from. Measured by tests/benchmarks/detection.py."""
FEWEST = 16
"""Differences below which their median is no scale: its error would be over 30 %."""
DIFFERENCE_TO_SIGMA = 1.0484
"""sd / median |difference| of a white Gaussian series: 1 / (0.6745 sqrt 2)."""
FLOOR_NATS = 1e-4
"""Smallest scale: below it, losses logged with five digits have no noise left to measure."""
CLIP = 2.0
"""Standardised residuals are clipped at +- CLIP: outliers of healthy logs reach 30 and are one step wide."""
WHITE_BELOW = 0.1
"""Autocorrelation below which residuals count as white: raw losses on shuffled data show -0.05..0.00."""


def prior_sigma(loss_nats: float, tokens: float) -> float:
    """Return the noise in nats to expect of a loss averaged over `tokens`, before any was measured.

    0.9 % of the loss x sqrt(1e6 / tokens): typical of about 75 healthy public per-step logs, 124M to 1.5B parameters.

    Example:
        >>> round(prior_sigma(2.2, 4_194_304), 4)
        0.0097
    """
    return 0.009 * loss_nats * math.sqrt(1e6 / tokens)


def long_run_factor(rho: float) -> float:
    """Return what to multiply a difference-based scale with so that sums of AR(1) noise have the size of white ones.

    sqrt(1 + rho) / (1 - rho): differences of AR(1) noise are too small by sqrt(1 - rho), its sums too large by
    sqrt((1 + rho) / (1 - rho)). 1 below `WHITE_BELOW`.
    """
    if rho < WHITE_BELOW:
        return 1.0
    rho = min(rho, 0.99)
    return math.sqrt(1.0 + rho) / (1.0 - rho)


STRETCH = 50
"""Values between two slow bends of a forecast: an eighth of a calibration."""


def autocorrelation(values: list[float]) -> float:
    """Return the lag-1 autocorrelation of `values` around the mean of every 50 of them.

    A forecast bends slowly against its run, which is no correlation of noise; the stretch means take that out. What
    they take from the noise itself is given back by 1/50, the bias of an estimate from 50 values.

    Example:
        >>> round(autocorrelation([1.0, -1.0] * 200), 2)
        -0.96
    """
    centred = []
    for start in range(0, len(values), STRETCH):
        stretch = values[start : start + STRETCH]
        mean = math.fsum(stretch) / len(stretch)
        centred.append([v - mean for v in stretch])
    power = math.fsum(v * v for stretch in centred for v in stretch)
    if power == 0.0:
        return 0.0
    return math.fsum(a * b for stretch in centred for a, b in pairwise(stretch)) / power + 1.0 / STRETCH


class NoiseScale(PlainState):
    """Scale of the noise from the median absolute difference of neighbours: blind to any level error.

    sigma = max(1e-4, quantum / 2, lrv x 1.0484 x median |r_j - r_(j-1)| over the last 512), taken anew when an eighth
    of them is new.
    """

    __slots__ = ("differences", "fresh", "last", "last_loss", "lrv", "quantum", "sigma")

    def __init__(self) -> None:
        self.sigma = math.nan
        self.lrv = 1.0
        self.quantum = 0.0
        self.last = math.nan
        self.last_loss = math.nan
        self.differences: list[float] = []
        # Differences since sigma was last taken.
        self.fresh = 0

    def add(
        self, residuals: Sequence[float], losses: Sequence[float], root_weights: Sequence[float] | None = None
    ) -> list[float]:
        """Take finite residuals of neighbours, and sigma anew when it is time; return their |differences| at weight 1.

        Args:
            residuals: loss - forecast, nats.
            losses: the losses themselves; their smallest step is the quantum that they were logged with.
            root_weights: sqrt(tokens averaged / reference tokens) of each; all 1 by default.
        """
        # Without a neighbour before it, the first has no difference.
        first = 1 if self.last != self.last else 0
        fresh = list(map(abs, map(sub, residuals[first:], (self.last, *residuals)[first:])))
        if root_weights is not None:
            fresh = list(map(mul, fresh, root_weights[first:]))
        steps = map(abs, map(sub, losses[first:], (self.last_loss, *losses)[first:]))
        self.quantum = min(filter(None, (self.quantum, *steps)), default=0.0)
        self.last, self.last_loss = residuals[-1], losses[-1]
        self.differences += fresh
        del self.differences[:-WINDOW]
        self.fresh += len(fresh)
        if 8 * self.fresh >= len(self.differences):
            self.refresh()
        return fresh

    def refresh(self) -> None:
        """Take the scale anew from the window; nothing happens while it holds fewer than 16 differences."""
        self.fresh = 0
        if len(self.differences) >= FEWEST:
            median = sorted(self.differences)[len(self.differences) // 2]
            self.sigma = max(FLOOR_NATS, 0.5 * self.quantum, self.lrv * DIFFERENCE_TO_SIGMA * median)

    def forget(self) -> None:
        """Drop the window and keep sigma, where the noise is about to change."""
        self.differences = []
        self.quantum = 0.0
        self.skip()

    def skip(self) -> None:
        """Note a gap: the next observation has no neighbour."""
        self.last = self.last_loss = math.nan


class NoiseChange(PlainState):
    """Noise that grew or shrank: fast / slow mean of clipped |difference| outside [0.67, 1.5] for 200 observations.

    The means forget exponentially, over 100 and 2000 observations.
    """

    __slots__ = ("fast", "outside", "seen", "slow")

    LOW, HIGH, PATIENCE = 0.67, 1.5, 200
    """Measured by tests/benchmarks/detection.py: silent on healthy logs, sees a doubled batch (ratio 0.71) late."""

    def __init__(self) -> None:
        self.fast = 0.0
        self.slow = 0.0
        self.seen = 0
        self.outside = 0

    def update(self, differences: Sequence[float], sigma: float) -> float | None:
        """Take the absolute differences of some tens of observations; return the ratio when it has changed, or None."""
        count = len(differences)
        if not count:
            return None
        limit = 6.0 * sigma
        value = sum(limit if difference > limit else difference for difference in differences) / count
        self.seen += count
        share = count / self.seen
        self.fast += (value - self.fast) * max(share, 1.0 - 0.99**count)
        self.slow += (value - self.slow) * max(share, 1.0 - 0.9995**count)
        if self.seen < 400 or self.slow <= 0.0:
            return None
        ratio = self.fast / self.slow
        if self.LOW <= ratio <= self.HIGH:
            self.outside = 0
            return None
        self.outside += count
        if self.outside < self.PATIENCE:
            return None
        self.outside = 0
        self.slow = self.fast
        return ratio
