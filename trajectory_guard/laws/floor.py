"""The floor E of a power law L = E + A C^-alpha through final losses: pinned, fitted, or weighed with its prior."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trajectory_guard.errors import TrajectoryGuardError

__all__ = ["fit_floor", "likely_floor", "straightest_floor"]

Array = NDArray[np.float64]

FLOOR_SHARE, FLOOR_SHARE_SD = 0.53, 0.10
"""Prior of the floor as a share of the lowest loss (measured by tests/benchmarks/accuracy.py over six families)."""

FINAL_SD = 0.003
"""Relative sd of a final loss about its law. Reruns of one configuration differ by .05-.07 %, but a tighter value
trusts a power law to bend less than ladders do (measured on the finals of OLMo, Delphi and the 67B run's anchors)."""


def fit_floor(compute: ArrayLike, loss: ArrayLike, *, floor: float | None = None) -> tuple[float, float, float, float]:
    """Fit L = E + A C^-alpha: the E whose ln(L - E) over ln C is straightest, and that line.

    Args:
        compute: (n,) FLOPs.
        loss: (n,) losses in nats.
        floor: E where it is pinned; None to fit it.

    Returns:
        E in nats, A, alpha, and the rms of ln(L - E) about its line.

    Raises:
        TrajectoryGuardError: fewer than three points (two with a pinned floor), or a floor above the lowest loss.

    Example:
        >>> c = 10.0 ** np.arange(18, 22)
        >>> [round(v, 6) for v in fit_floor(c, 1.5 + 100 * c**-0.1)[:3]]
        [1.5, 100.0, 0.1]
    """
    x, y = np.log(np.asarray(compute, np.float64)), np.asarray(loss, np.float64)
    if y.size < (3 if floor is None else 2) or np.unique(x).size < 2:
        raise TrajectoryGuardError(
            f"L*(C) needs at least {3 if floor is None else 2} compute budgets, got {y.size}; add rungs"
            + (" or pin the floor" if floor is None else "")
        )
    if floor is None:
        floor = float(straightest_floor(x, y[None])[0])
    if not 0 <= floor < y.min():
        raise TrajectoryGuardError(f"the floor must lie in [0, {y.min():g}), below every loss, got {floor:g}")
    z = np.log(y - floor)
    slope, level = np.polyfit(x, z, 1)
    rms = float(np.sqrt(np.mean((z - level - slope * x) ** 2)))
    return floor, float(np.exp(level)), float(-slope), rms


def likely_floor(compute: ArrayLike, loss: ArrayLike) -> float:
    """Return the mean of the floor under its prior, for ladders too short to fit it.

    Prior E ~ N(.53, .10^2) x lowest loss; likelihood of relative residuals of the line through ln(L - E), sd .3 %.

    Args:
        compute: (n,) FLOPs, n >= 2.
        loss: (n,) losses in nats.

    Example:
        >>> c = 10.0 ** np.arange(18, 24)
        >>> round(likely_floor(c, 1.5 + 100 * c**-0.1), 2)  # six budgets nearly tell the floor
        1.47
        >>> round(likely_floor([1e18, 1e19], [4.0, 3.0]), 2)  # two tell nothing: the prior's mean
        1.59
    """
    x, y = np.log(np.asarray(compute, np.float64)), np.asarray(loss, np.float64)
    shares = np.linspace(0.1, 0.98, 177)
    floors = shares * y.min()
    z = np.log(y - floors[:, None])
    u = x - x.mean()
    z = z - z.mean(axis=1, keepdims=True)
    residual = z - np.outer(z @ u / np.maximum(u @ u, 1e-12), u)
    misfit = np.sum((residual * (y - floors[:, None]) / y / FINAL_SD) ** 2, axis=1)
    weight = -0.5 * (misfit + ((shares - FLOOR_SHARE) / FLOOR_SHARE_SD) ** 2)
    weight = np.exp(weight - weight.max())
    return float(weight @ floors / weight.sum())


def straightest_floor(x: Array, y: Array) -> Array:
    """For each row of (k, n) points, the E in [0, min y) whose ln(y - E) over x is straightest: a grid, then cuts."""
    x = np.broadcast_to(x, y.shape)
    u = x - x.mean(axis=1, keepdims=True)
    top = y.min(axis=1)

    def spread(floor: Array) -> Array:
        z = np.log(y[:, None, :] - floor[:, :, None])
        z = z - z.mean(axis=2, keepdims=True)
        slope = np.einsum("kn,kfn->kf", u, z) / np.sum(u * u, axis=1)[:, None]
        return np.sum((z - slope[:, :, None] * u[:, None, :]) ** 2, axis=2)

    # Finer towards the lowest loss, where ln(y - E) bends fastest.
    share = 1.0 - np.geomspace(1.0, 1e-4, 64)
    at = np.argmin(spread(top[:, None] * share), axis=1)
    low, high = top * share[np.maximum(at - 1, 0)], top * share[np.minimum(at + 1, 63)]
    golden = (math.sqrt(5.0) - 1.0) / 2.0
    for _ in range(60):
        inner = np.stack([high - golden * (high - low), low + golden * (high - low)], axis=1)
        values = spread(inner)
        left = values[:, 0] <= values[:, 1]
        low, high = np.where(left, low, inner[:, 0]), np.where(left, inner[:, 1], high)
    return (low + high) / 2.0
