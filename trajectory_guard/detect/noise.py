"""The noise of one observation: its scale from differences, its correlation, its quantum, and changes of it."""

import math
from itertools import pairwise

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

    sigma = max(1e-4, quantum / 2, lrv x 1.0484 x median |r_j - r_(j-1)| over the last 512).
    """

    __slots__ = ("differences", "last", "last_loss", "lrv", "position", "quantum", "sigma")

    def __init__(self) -> None:
        self.sigma = math.nan
        self.lrv = 1.0
        self.quantum = 0.0
        self.last = math.nan
        self.last_loss = math.nan
        self.differences: list[float] = []
        self.position = 0

    def add(self, residual: float, loss: float, root_weight: float) -> float:
        """Take one finite residual; return its absolute difference from the one before, at weight 1 (NaN at first).

        Args:
            residual: loss - forecast, nats.
            loss: the loss itself; its smallest step is the quantum that it was logged with.
            root_weight: sqrt(tokens averaged / reference tokens).
        """
        difference = abs(residual - self.last) * root_weight
        step = abs(loss - self.last_loss)
        self.last = residual
        self.last_loss = loss
        if difference != difference:
            return difference
        if step > 0.0 and (step < self.quantum or self.quantum == 0.0):
            self.quantum = step
        differences = self.differences
        if len(differences) < WINDOW:
            differences.append(difference)
        else:
            differences[self.position] = difference
            self.position = (self.position + 1) % WINDOW
        return difference

    def refresh(self) -> None:
        """Take the scale anew from the window; nothing happens while it holds fewer than 16 differences."""
        if len(self.differences) >= FEWEST:
            median = sorted(self.differences)[len(self.differences) // 2]
            self.sigma = max(FLOOR_NATS, 0.5 * self.quantum, self.lrv * DIFFERENCE_TO_SIGMA * median)

    def forget(self) -> None:
        """Drop the window and keep sigma, where the noise is about to change."""
        self.differences = []
        self.position = 0
        self.last = math.nan
        self.quantum = 0.0

    def skip(self) -> None:
        """Note a gap: the next observation has no neighbour."""
        self.last = math.nan


class NoiseChange(PlainState):
    """Noise that grew or shrank: fast / slow mean of clipped |difference| outside [0.67, 1.5] for 200 observations."""

    __slots__ = ("fast", "outside", "seen", "slow")

    LOW, HIGH, PATIENCE = 0.67, 1.5, 200
    """Measured by tests/benchmarks/detection.py: silent on healthy logs, sees a doubled batch (ratio 0.71) late."""

    def __init__(self) -> None:
        self.fast = 0.0
        self.slow = 0.0
        self.seen = 0
        self.outside = 0

    def update(self, difference: float, sigma: float) -> float | None:
        """Take one absolute difference; return the ratio when the noise has changed, else None."""
        if difference != difference:
            return None
        value = 6.0 * sigma if difference > 6.0 * sigma else difference
        self.seen = seen = self.seen + 1
        self.fast += (value - self.fast) / (seen if seen < 100 else 100)
        self.slow += (value - self.slow) / (seen if seen < 2000 else 2000)
        if seen < 400 or self.slow <= 0.0:
            return None
        ratio = self.fast / self.slow
        if self.LOW <= ratio <= self.HIGH:
            self.outside = 0
            return None
        self.outside += 1
        if self.outside < self.PATIENCE:
            return None
        self.outside = 0
        self.slow = self.fast
        return ratio
