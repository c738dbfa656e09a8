"""Evidence that certifies: a Shiryaev-Roberts sum of Catoni-type bets with a proved mean time to a false alarm."""

import math

from trajectory_guard.detect.state import PlainState

__all__ = ["ALARM", "Evidence"]

BETS = (0.1, 0.2, 0.4, 0.7, 1.0)
"""Sizes of the bets: small ones see small changes, large ones see large changes soon."""
VARIANCE = 3.0
"""Conditional variance, in sigma^2, up to which the bound holds; 1.2-1.5 was measured on healthy logs."""
UPPER_CLIP = 4.0
"""Evidence for a change is clipped from above only: clipping what speaks against it would break the bound."""
CAP = 1e12
ALARM = 1e6
"""Alarm level = the proved lower bound of the mean number of observations to a false alarm."""
_COST = tuple(math.exp(-0.5 * VARIANCE * bet * bet) for bet in BETS)
_BETS_AND_COSTS = tuple(zip(range(len(BETS)), BETS, _COST, strict=True))


class Evidence(PlainState):
    r"""One-sided evidence that E[z] > 0, for z whose conditional variance is at most 3.

    For every bet lambda, M <- (M + 1) exp(-lambda^2 v / 2) G(lambda min(z, 4)) with G(a) = 1 + a + a^2/2 for a >= 0 and
    1 / (1 - a + a^2/2) below; the statistic is the mean of the five M.

    Why the bound holds, when E[z | past] <= 0 and Var[z | past] <= v: ln G is Catoni's influence function [1], which
    rises, so z may be replaced by w = z - E[z | past], and G(a) <= 1 + a + a^2/2, so E[G(lambda w) | past]
    <= 1 + lambda^2 v / 2 <= exp(lambda^2 v / 2). Every M_n - n is then a supermartingale, and by optional stopping the
    mean time until the mean of the M reaches A is at least A [2]. Clipping z from above and the cap, far above A, only
    lower M.

    References:
        [1] O. Catoni, "Challenging the empirical mean and empirical variance", Ann. IHP 48 (2012),
            doi:10.1214/11-AIHP454.
        [2] J. Shin, A. Ramdas, A. Rinaldo, "E-detectors", arXiv:2203.03532, section 2.

    Example:
        >>> evidence = Evidence()
        >>> [evidence.update(3.0) >= ALARM for _ in range(20)].index(True)
        15
    """

    __slots__ = ("masses", "statistic")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start without evidence."""
        self.masses = [0.0] * len(BETS)
        self.statistic = 0.0

    def update(self, z: float) -> float:
        """Take one value and return the statistic."""
        if z > UPPER_CLIP:
            z = UPPER_CLIP
        masses = self.masses
        total = 0.0
        if z >= 0.0:
            for i, bet, cost in _BETS_AND_COSTS:
                a = bet * z
                mass = (masses[i] + 1.0) * cost * (1.0 + a + 0.5 * a * a)
                masses[i] = mass = CAP if mass > CAP else mass
                total += mass
        else:
            for i, bet, cost in _BETS_AND_COSTS:
                a = bet * z
                mass = (masses[i] + 1.0) * cost / (1.0 - a + 0.5 * a * a)
                masses[i] = mass
                total += mass
        self.statistic = total / 5.0
        return self.statistic
