"""The final loss of a run as a surface over parameters and tokens: L = E + A N^-alpha + B D^-beta."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.laws.solve import nonnegative, polish

__all__ = ["Surface", "fit_surface"]

EXPONENTS = np.linspace(0.1, 0.9, 17)
"""Grid of alpha and beta where the search starts; published language-model surfaces lie between 0.2 and 0.6."""

HUBER = 1e-3
"""Residual of ln(loss) where the objective turns from square to linear (Hoffmann et al. 2022, appendix D.2)."""


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Fitted surface L(N, D) = floor + a N^-alpha + b D^-beta, N in parameters and D in tokens.

    Args:
        floor: irreducible loss E in nats.
        a: amplitude of the parameter term.
        b: amplitude of the token term.
        alpha: exponent of the parameter term.
        beta: exponent of the token term.

    Example:
        >>> surface = Surface(floor=1.82, a=482.0, b=2085.4, alpha=0.348, beta=0.366)
        >>> round(float(surface.loss(7e10, 1.4e12)), 3)
        1.976
        >>> best = surface.optimum(6 * 7e10 * 1.4e12)
        >>> f"{best[0]:.2e} parameters, {best[1]:.2e} tokens"
        '7.31e+10 parameters, 1.34e+12 tokens'
    """

    floor: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, params: ArrayLike, tokens: ArrayLike) -> NDArray[np.float64]:
        """Return the loss in nats of runs of `params` parameters and `tokens` tokens (shapes broadcast)."""
        n, d = np.asarray(params, np.float64), np.asarray(tokens, np.float64)
        return self.floor + self.a * n**-self.alpha + self.b * d**-self.beta

    def optimum(self, compute: float) -> tuple[float, float]:
        """Return the (parameters, tokens) of least loss with 6 x parameters x tokens = `compute` FLOPs."""
        ratio = (self.alpha * self.a) / (self.beta * self.b)
        params = (ratio * (compute / 6.0) ** self.beta) ** (1.0 / (self.alpha + self.beta))
        return params, compute / 6.0 / params


def fit_surface(params: ArrayLike, tokens: ArrayLike, loss: ArrayLike) -> Surface:
    """Fit the surface by minimising the sum of Huber(ln predicted - ln loss) over runs.

    Variable projection: on a grid over (alpha, beta) the three amplitudes follow from non-negative least squares; the
    best grid points are then polished in all five parameters. Unlike the two-step IsoFLOP route it is not biased by
    samples that lie wide of or off the optimum.

    Args:
        params: (n,) parameters of each run.
        tokens: (n,) training tokens of each run.
        loss: (n,) final losses in nats.

    Raises:
        TrajectoryGuardError: fewer than six runs, or all of one size or of one length.

    Example:
        >>> true = Surface(floor=1.8, a=500.0, b=2000.0, alpha=0.35, beta=0.37)
        >>> n, d = np.meshgrid([1e8, 3e8, 1e9], [2e9, 1e10, 5e10])
        >>> round(fit_surface(n.ravel(), d.ravel(), true.loss(n, d).ravel()).alpha, 6)
        0.35

    References:
        Hoffmann et al. 2022, arXiv:2203.15556, approach 3. Besiroglu et al. 2024, arXiv:2404.10102: the objective is
        the sum, not the mean, and a solver that stops early gives wrong constants. Golub and Pereyra 1973,
        doi:10.1137/0710036, variable projection.
    """
    n, d, y = (np.asarray(v, np.float64).ravel() for v in (params, tokens, loss))
    if not n.size == d.size == y.size or y.size < 6:
        raise TrajectoryGuardError(f"a surface needs at least 6 runs of equal count, got {n.size}, {d.size}, {y.size}")
    if np.unique(n).size < 2 or np.unique(d).size < 2:
        raise TrajectoryGuardError("a surface needs runs of at least two sizes and two token counts")
    # Centred units keep the three columns of like size at every exponent.
    n0, d0 = np.exp(np.mean(np.log(n))), np.exp(np.mean(np.log(d)))
    u, v = np.log(n / n0), np.log(d / d0)

    def columns(alpha: float, beta: float) -> NDArray[np.float64]:
        return np.stack([np.ones_like(u), np.exp(-alpha * u), np.exp(-beta * v)], axis=1)

    starts = []
    for alpha in EXPONENTS:
        for beta in EXPONENTS:
            basis = columns(alpha, beta)
            amplitudes = nonnegative(basis / y[:, None], np.ones_like(y))
            starts.append((float(np.sum((basis @ amplitudes / y - 1.0) ** 2)), (*amplitudes, alpha, beta)))
    starts.sort(key=lambda start: start[0])

    def residual(theta: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        basis = columns(theta[3], theta[4])
        fitted = basis @ theta[:3]
        slopes = [-theta[1] * u * basis[:, 1], -theta[2] * v * basis[:, 2]]
        return np.log(fitted / y), np.column_stack([basis, *slopes]) / fitted[:, None]

    low, high = np.array([0.0, 0.0, 0.0, 0.01, 0.01]), np.array([np.inf, np.inf, np.inf, 3.0, 3.0])
    best = min(
        (polish(residual, np.array(start), low, high, scale=HUBER, loss="huber") for _, start in starts[:3]),
        key=lambda result: result[1],
    )[0]
    floor, a, b, alpha, beta = best.tolist()
    return Surface(floor=floor, a=float(a * n0**alpha), b=float(b * d0**beta), alpha=alpha, beta=beta)
