"""Rung curves: the losses of a rung's seeds over progress, smoothed where they are per-step training losses."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.curve import LossCurve
from trajectory_guard.ladder import Rung
from trajectory_guard.plan import RunPlan

__all__ = ["PROGRESS_GRID", "RungCurve", "kinks", "local_quadratic", "rung_curve"]

FIRST_PROGRESS = 0.01
"""Nothing is said before 1 % of training: the loss falls by a nat within a few steps there."""

PROGRESS_GRID = np.concatenate([np.geomspace(FIRST_PROGRESS, 0.2, 31), np.linspace(0.22, 1.0, 40)])
"""(71,) progress values: spaced by 0.1 in ln g up to g = 0.2 and by 0.02 in g after it."""

DENSE_POINTS = 400
"""A log with more points than this is taken as per-step loss and smoothed; sparser ones are evaluations, used as they
are. With 400 points the narrowest window (2 % of training each side) holds 16."""

WINDOW_SHARE, NARROWEST, WIDEST = 0.4, 0.02, 0.15
"""Half-width of the smoother: 0.4 g, within 2 % and 15 % of training. On an eight-run mixture-of-experts ladder this
left the least error of a target's forecast; raw window means left two to three times as much."""

LEAST_POINTS = 8
"""A local quadratic through fewer points is not drawn."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RungCurve:
    """Loss of one rung over progress, ready to be fitted.

    Args:
        name: the rung's name.
        plan: the rung's plan.
        progress: (n,) strictly rising, from `FIRST_PROGRESS` to where the rung got.
        loss: (n,) nats per token, mean over seeds.
        error: (n,) standard error of `loss` in nats that comes from noise of single steps; 0 for evaluations.
    """

    name: str
    plan: RunPlan
    progress: NDArray[np.float64]
    loss: NDArray[np.float64]
    error: NDArray[np.float64]


_KNOWN: WeakKeyDictionary[Rung, RungCurve] = WeakKeyDictionary()


def rung_curve(rung: Rung) -> RungCurve:
    """Return a rung's loss over progress: smoothed onto `PROGRESS_GRID` if logged per step, seeds averaged.

    Seeds are averaged point by point over those that got so far; the standard error of the mean is kept. Smoothing
    windows never reach over a sudden change of the LR schedule or of the data, where the loss has a kink. The result is
    remembered as long as the rung lives, since back-tests ask for it many times.
    """
    if rung not in _KNOWN:
        _KNOWN[rung] = _smoothed(rung)
    return _KNOWN[rung]


def _smoothed(rung: Rung) -> RungCurve:
    tables = [_one_curve(curve, rung.plan) for curve in rung.curves]
    longest = max(tables, key=lambda table: table[0][-1])
    grid = longest[0]
    losses, squares = [], []
    for progress, loss, error in tables:
        outside = (grid < progress[0] * (1 - 1e-9)) | (grid > progress[-1] * (1 + 1e-9))
        losses.append(np.where(outside, np.nan, np.interp(grid, progress, loss)))
        squares.append(np.where(outside, np.nan, np.interp(grid, progress, error) ** 2))
    count = np.sum(np.isfinite(losses), axis=0)
    keep = count > 0
    total = np.nansum(losses, axis=0)[keep]
    spread = np.sqrt(np.nansum(squares, axis=0)[keep])
    return RungCurve(
        name=rung.name, plan=rung.plan, progress=grid[keep], loss=total / count[keep], error=spread / count[keep]
    )


def _one_curve(curve: LossCurve, plan: RunPlan) -> tuple[NDArray[np.float64], ...]:
    progress = curve.tokens / plan.total_tokens
    inside = (progress >= FIRST_PROGRESS * (1 - 1e-9)) & (progress <= 1.0 + 1e-6)
    if len(curve) <= DENSE_POINTS or np.count_nonzero(inside) <= DENSE_POINTS // 2:
        if not inside.any():  # So short a log still says where it ends, for the error that the law raises.
            inside[-1] = True
        g = np.minimum(progress[inside], 1.0)
        # A log may hold one point just before and one just after the planned end.
        fresh = np.concatenate([np.diff(g) > 0, [True]])
        return g[fresh], curve.loss[inside][fresh], np.zeros(int(fresh.sum()))
    grid = PROGRESS_GRID[progress[-1] + 1.0 / len(curve) >= PROGRESS_GRID]
    loss, error = local_quadratic(progress, curve.loss, grid, breaks=kinks(plan))
    known = np.isfinite(loss)
    return grid[known], loss[known], error[known]


def kinks(plan: RunPlan) -> list[float]:
    """Return the progress values at which schedule or data change suddenly; no smoothing window reaches over one."""
    schedule = plan.schedule
    found = list(plan.recipe.data_phases or ())
    if schedule.decay_start is not None:
        found.append(schedule.decay_start)
    if schedule.shape == "steps":
        found += [g for g, _ in schedule.points]
    return sorted(g for g in found if 0.0 < g < 1.0)


def local_quadratic(
    progress: NDArray[np.float64],
    loss: NDArray[np.float64],
    grid: NDArray[np.float64],
    *,
    breaks: list[float] | None = None,
    trust: NDArray[np.float64] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Smooth a noisy curve by local least squares on (1, x, x^2) with x = ln(progress), where losses bend least.

    The weights are tricube, (1 - |d / h|^3)^3 with d the distance in progress and half-width h = 0.4 g within
    [0.02, 0.15], never wider than g itself.

    Args:
        progress: (n,) rising, positive.
        loss: (n,) losses, noise independent from point to point.
        grid: (m,) progress values to estimate at.
        breaks: progress values over which no window reaches.
        trust: (n,) further weights, such as 0 for an outlier; 1 by default.

    Returns:
        (m,) estimates and (m,) their standard errors; NaN where a window holds fewer than 8 points.

    Example:
        >>> g = np.linspace(0.001, 1, 1000)
        >>> loss, error = local_quadratic(g, 3.0 - np.log(g), np.array([0.1, 1.0]))
        >>> loss.round(6).tolist(), bool(error.max() < 1e-4)
        ([5.302585, 3.0], True)

    Reference:
        Cleveland (1979), Robust locally weighted regression and smoothing scatterplots, doi:10.2307/2286407.
    """
    edges = np.array([-np.inf, *(breaks or ()), np.inf])
    estimates, errors = np.full(len(grid), np.nan), np.full(len(grid), np.nan)
    for i, at in enumerate(grid):
        half = min(float(np.clip(WINDOW_SHARE * at, NARROWEST, WIDEST)), 0.99 * at)
        segment = int(np.searchsorted(edges, at, side="right"))
        low, high = max(at - half, edges[segment - 1]), min(at + half, edges[segment])
        start, stop = np.searchsorted(progress, [low, high])
        weight = (1.0 - np.minimum(np.abs(progress[start:stop] - at) / half, 1.0) ** 3) ** 3
        if trust is not None:
            weight = weight * trust[start:stop]
        if np.count_nonzero(weight > 0) < LEAST_POINTS:
            continue
        x = np.log(progress[start:stop] / at)
        design = np.stack([np.ones_like(x), x, x * x])
        weighted = design * weight
        # First row of the smoother's matrix: the estimate is row @ loss, its variance sigma^2 |row|^2.
        row = np.linalg.solve(weighted @ design.T, weighted)[0]
        estimates[i] = row @ loss[start:stop]
        # Noise from second differences, free of the trend: E[(y1 - 2 y2 + y3)^2] = 6 sigma^2.
        second = np.diff(loss[start:stop], n=2)
        errors[i] = np.sqrt(np.mean(second**2) / 6.0 * np.sum(row**2))
    return estimates, errors
