"""Least squares for laws that are linear in their amplitudes: variable projection to start, then a joint polish.

A law is f = sum_k x_k phi_k(theta) with amplitudes x >= 0 and a few exponents theta. At fixed theta the amplitudes are
a non-negative least-squares problem (`nonnegative`), so that a search runs over theta alone. The last step (`polish`)
moves all of them together, because robust losses and priors on the logarithm of an amplitude are not linear in it.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from trajectory_guard.errors import TrajectoryGuardError

__all__ = ["nonnegative", "polish"]

Array = NDArray[np.float64]
Residual = Callable[[Array], tuple[Array, Array]]


def nonnegative(basis: Array, target: Array) -> Array:
    """Return the x >= 0 that minimises |basis x - target|^2.

    The problem is reduced to the normal equations' triangular factor first, so that its cost does not grow with the
    number of points inside the active-set iteration.

    Args:
        basis: (n, k) columns of the law.
        target: (n,) values.

    Returns:
        (k,) amplitudes.

    Raises:
        TrajectoryGuardError: a value is not finite.

    Example:
        >>> nonnegative(np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), np.array([1.0, 3.0, 5.0])).round(12).tolist()
        [1.0, 2.0]

    References:
        Lawson and Hanson 1974, Solving Least Squares Problems, chapter 23.
    """
    joined = np.column_stack([basis, target])
    if not np.all(np.isfinite(joined)):
        raise TrajectoryGuardError(
            "a least-squares problem holds values that are not finite; check the ladder's losses"
        )
    scale = np.linalg.norm(basis, axis=0)
    scale[scale == 0.0] = 1.0
    joined[:, :-1] /= scale
    factor = np.asarray(np.linalg.qr(joined, mode="r"))
    solution, _ = nnls(factor[:, :-1], factor[:, -1])
    return solution / scale


def polish(
    residual: Residual,
    start: Array,
    low: Array,
    high: Array,
    *,
    scale: float = 1.0,
    loss: Literal["soft_l1", "huber"] = "soft_l1",
    robust: int | None = None,
    weights: Array | None = None,
    tolerance: float = 1e-12,
    max_evaluations: int = 200,
) -> tuple[Array, float]:
    """Minimise sum of rho((residual / scale)^2) over bounded parameters, with the analytic Jacobian.

    Args:
        residual: parameters -> (residuals (n,), Jacobian (n, p)).
        start: (p,) first parameters; clipped into the bounds.
        low: (p,) lower bounds.
        high: (p,) upper bounds.
        scale: residual where the loss turns from square to linear.
        loss: `"soft_l1"` or `"huber"`.
        robust: only the first so many residuals are robust, the others (priors) are squared; None means all.
        weights: (m,) factors of the objective's first m terms, m <= n; None means 1.
        tolerance: stop when a step lowers the objective by less than this share of it.
        max_evaluations: stop after so many evaluations.

    Returns:
        The parameters (p,) and the objective, in units of residual squared / 2.

    Example:
        >>> t = np.arange(5.0)
        >>> line = lambda p: (p[0] * t - np.array([0.0, 2.0, 4.0, 6.0, 80.0]), t[:, None])  # the last is an outlier
        >>> float(polish(line, np.ones(1), np.zeros(1), np.full(1, 99.0), scale=1e-3)[0][0].round(2))
        2.0
    """
    seen: dict[bytes, tuple[Array, Array]] = {}

    def both(p: Array) -> tuple[Array, Array]:
        key = p.tobytes()
        if key not in seen:
            seen.clear()
            seen[key] = residual(p)
        return seen[key]

    def rho(z: Array) -> Array:
        # scipy calls this with z = (residual / scale)^2 and wants rho, rho', rho''.
        out = np.stack([z, np.ones_like(z), np.zeros_like(z)])
        head = z[:robust]
        if loss == "huber":
            far = head > 1.0
            root = np.sqrt(np.where(far, head, 1.0))
            values = [np.where(far, 2.0 * root - 1.0, head), 1.0 / root, np.where(far, -0.5 / root**3, 0.0)]
        else:
            root = np.sqrt(1.0 + head)
            values = [2.0 * (root - 1.0), 1.0 / root, -0.5 / root**3]
        out[:, :robust] = values
        if weights is not None:
            out[:, : len(weights)] *= weights
        return out

    inside = np.clip(
        start, low + 1e-10 * (1 + np.abs(low)), high - 1e-10 * (1 + np.where(np.isinf(high), 0, np.abs(high)))
    )
    result = least_squares(
        lambda p: both(p)[0],
        inside,
        jac=lambda p: both(p)[1],  # pyright: ignore[reportArgumentType]
        bounds=(low, high),
        method="trf",
        x_scale="jac",
        f_scale=scale,
        loss=rho,  # pyright: ignore[reportArgumentType]
        max_nfev=max_evaluations,
        ftol=tolerance,
        xtol=1e-10,
        gtol=1e-12,
    )
    return result.x, float(result.cost)
