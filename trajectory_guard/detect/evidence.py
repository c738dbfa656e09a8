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
"""Evidence per value settled that is dropped, not carried, when their sum lies a standard error below zero: what chance
alone has gathered is no more than one per value, and dropping only lowers the statistic."""
_COSTS = tuple(math.exp(-0.5 * VARIANCE * bet * bet) for bet in BETS)
# cost x G(bet z) as a polynomial in z for z >= 0, and one over it for z < 0: constant, linear and square coefficients.
(_C0, _C1, _C2, _C3, _C4) = _COSTS
(_L0, _L1, _L2, _L3, _L4) = (cost * bet for bet, cost in zip(BETS, _COSTS, strict=True))
(_S0, _S1, _S2, _S3, _S4) = (cost * bet * bet / 2.0 for bet, cost in zip(BETS, _COSTS, strict=True))
(_D0, _D1, _D2, _D3, _D4) = (1.0 / cost for cost in _COSTS)
(_M0, _M1, _M2, _M3, _M4) = (bet / cost for bet, cost in zip(BETS, _COSTS, strict=True))
(_T0, _T1, _T2, _T3, _T4) = (bet * bet / 2.0 / cost for bet, cost in zip(BETS, _COSTS, strict=True))


class Evidence(PlainState):
    r"""One-sided evidence that E[z] > 0, for z whose conditional variance is at most 3.

    For every bet lambda, M <- (M + 1) exp(-lambda^2 v / 2) G(lambda min(z, 4)) with G(a) = 1 + a + a^2/2 for a >= 0 and
    1 / (1 - a + a^2/2) below; the statistic is the mean of the five M.

    Why the bound holds, when E[z | past] <= 0 and Var[z | past] <= v: ln G is Catoni's influence function [1], which
    rises, so z may be replaced by w = z - E[z | past], and G(a) <= 1 + a + a^2/2, so E[G(lambda w) | past]
    <= 1 + lambda^2 v / 2 <= exp(lambda^2 v / 2). Every M_n - n is then a supermartingale, and by optional stopping the
    mean time until the mean of the M reaches A is at least A [2]. Clipping z from above and the cap, far above A, only
    lower M. So does looking only now and then: values may wait in `pending` until `settle`.

    References:
        [1] O. Catoni, "Challenging the empirical mean and empirical variance", Ann. IHP 48 (2012),
            doi:10.1214/11-AIHP454.
        [2] J. Shin, A. Ramdas, A. Rinaldo, "E-detectors", arXiv:2203.03532, section 2.

    Example:
        >>> evidence = Evidence()
        >>> [evidence.update(3.0) >= ALARM for _ in range(20)].index(True)
        15
    """

    __slots__ = ("masses", "pending", "statistic")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start without evidence."""
        self.masses = [0.0] * len(BETS)
        self.pending: list[float] = []
        self.statistic = 0.0

    def update(self, z: float) -> float:
        """Take one value and return the statistic."""
        self.pending.append(z)
        return self.settle()

    def settle(self) -> float:
        """Take the values that wait in `pending`, in their order, and return the statistic."""
        pending, self.pending = self.pending, []
        if self.statistic < NEGLIGIBLE * len(pending) and sum(pending) < -math.sqrt(len(pending)):
            if self.statistic:
                self.reset()
            return 0.0
        # Unrolled: most of what a long settlement costs is here.
        m0, m1, m2, m3, m4 = self.masses
        for value in pending:
            z = value if value < UPPER_CLIP else UPPER_CLIP
            zz = z * z
            if z >= 0.0:
                m0 = (m0 + 1.0) * (_C0 + _L0 * z + _S0 * zz)
                m1 = (m1 + 1.0) * (_C1 + _L1 * z + _S1 * zz)
                m2 = (m2 + 1.0) * (_C2 + _L2 * z + _S2 * zz)
                m3 = (m3 + 1.0) * (_C3 + _L3 * z + _S3 * zz)
                m4 = (m4 + 1.0) * (_C4 + _L4 * z + _S4 * zz)
            else:
                m0 = (m0 + 1.0) / (_D0 - _M0 * z + _T0 * zz)
                m1 = (m1 + 1.0) / (_D1 - _M1 * z + _T1 * zz)
                m2 = (m2 + 1.0) / (_D2 - _M2 * z + _T2 * zz)
                m3 = (m3 + 1.0) / (_D3 - _M3 * z + _T3 * zz)
                m4 = (m4 + 1.0) / (_D4 - _M4 * z + _T4 * zz)
        self.masses = [m0, m1, m2, m3, m4]
        self.statistic = (m0 + m1 + m2 + m3 + m4) / 5.0
        if self.statistic > ALARM:
            self.masses = [min(mass, CAP) for mass in self.masses]
            self.statistic = sum(self.masses) / 5.0
        return self.statistic
