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
NEGLIGIBLE = 2.0
"""Evidence that is dropped, not carried, when z < -1 speaks against it: dropping only lowers the statistic."""
_B0, _B1, _B2, _B3, _B4 = BETS
_C0, _C1, _C2, _C3, _C4 = (math.exp(-0.5 * VARIANCE * bet * bet) for bet in BETS)


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
        elif z < -1.0 and self.statistic < NEGLIGIBLE:
            if self.statistic:
                self.reset()
            return 0.0
        # Unrolled: this is called four times per observation. a0..a4 are lambda z.
        m0, m1, m2, m3, m4 = self.masses
        a0, a1, a2, a3, a4 = _B0 * z, _B1 * z, _B2 * z, _B3 * z, _B4 * z
        if z >= 0.0:
            m0 = (m0 + 1.0) * _C0 * (1.0 + a0 + 0.5 * a0 * a0)
            m1 = (m1 + 1.0) * _C1 * (1.0 + a1 + 0.5 * a1 * a1)
            m2 = (m2 + 1.0) * _C2 * (1.0 + a2 + 0.5 * a2 * a2)
            m3 = (m3 + 1.0) * _C3 * (1.0 + a3 + 0.5 * a3 * a3)
            m4 = (m4 + 1.0) * _C4 * (1.0 + a4 + 0.5 * a4 * a4)
        else:
            m0 = (m0 + 1.0) * _C0 / (1.0 - a0 + 0.5 * a0 * a0)
            m1 = (m1 + 1.0) * _C1 / (1.0 - a1 + 0.5 * a1 * a1)
            m2 = (m2 + 1.0) * _C2 / (1.0 - a2 + 0.5 * a2 * a2)
            m3 = (m3 + 1.0) * _C3 / (1.0 - a3 + 0.5 * a3 * a3)
            m4 = (m4 + 1.0) * _C4 / (1.0 - a4 + 0.5 * a4 * a4)
        self.masses = [m0, m1, m2, m3, m4]
        self.statistic = (m0 + m1 + m2 + m3 + m4) / 5.0
        if self.statistic > ALARM:
            self.masses = [min(mass, CAP) for mass in self.masses]
            self.statistic = sum(self.masses) / 5.0
        return self.statistic
