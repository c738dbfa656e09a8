"""Matched progress: the loss of rungs at equal progress is a power law of compute."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import isotonic_regression

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Ladder
from trajectory_guard.laws.requirements import read_array, require_agreement, require_fields
from trajectory_guard.laws.smooth import PROGRESS_GRID, RungCurve, rung_curve
from trajectory_guard.plan import RunPlan

__all__ = ["MatchedProgress", "PublishedForecast", "published_forecast"]

FLOOR_MEAN, FLOOR_SD = 0.55, 0.10
"""Prior of the floor as a share of the lowest ladder loss; measured over six public ladder families."""

RUN_SD, RUN_POINTS = 0.0015, 4
"""What a fit's residuals say about the floor: each rung counts as 4 points of relative sd 0.15 %, and of its noise."""

CURVATURE, DRIFT = 1e-4, 1.0
"""Penalties on the squared second derivative of the level, and on the squared first derivative of the exponent, over
ln progress, for rungs that count as 20 points each."""

NOISE_SD = 0.003
"""Relative misfit of a noise-free rung point; a point with noise of this size counts half."""

FLOORS = np.linspace(0.25, 0.85, 13)
"""Floors tried, as shares of the lowest ladder loss: three prior sds each side."""

START, REACH = 0.02, 0.98
"""A forecast begins at 2 % of training at the earliest; at least two rungs must have reached 98 %."""


class PublishedForecast(NamedTuple):
    """Result of `published_forecast`: loss = floor + amplitude (C g)^-exponent at each progress; all (m,)."""

    loss: NDArray[np.float64]
    amplitude: NDArray[np.float64]
    exponent: NDArray[np.float64]
    lowest: NDArray[np.float64]
    highest: NDArray[np.float64]


def published_forecast(
    progress: ArrayLike, losses: ArrayLike, flops: ArrayLike, target_flops: float, *, floor: float = 1.5
) -> PublishedForecast:
    """Forecast by ordinary least squares at each progress on its own, the way of the published 535B forecast.

    At each g: ln(L_k - E) = ln A_g - alpha_g ln(C_k g) over the rungs k, and the forecast E + A_g (C g)^-alpha_g.
    `lowest` and `highest` are the range over fits that leave one rung out. That range is no interval: it held 7 % of
    the target's evaluations. Use `MatchedProgress` for a forecast; this is here to reproduce published ones.

    Args:
        progress: (m,) in (0, 1].
        losses: (k, m) loss of each rung at each progress, above `floor`.
        flops: (k,) FLOPs of the rungs' full plans, k >= 2 (leave-one-out needs 3; with 2 its range is NaN).
        target_flops: FLOPs of the target's full plan.
        floor: irreducible loss E in nats, pinned by hand.

    Raises:
        TrajectoryGuardError: fewer than two rungs, shapes that do not fit, or a loss at or below the floor.

    Example:
        >>> made = published_forecast([0.5, 1.0], [[3.5, 2.5], [2.5, 2.0]], [1.0, 4.0], 16.0)
        >>> made.loss.tolist(), made.exponent.tolist()
        ([2.0, 1.75], [0.5, 0.5])

    Reference:
        Marin issue 8435, pre-registered forecast of the 535B mixture of experts from four rungs.
    """
    g, table, compute = (np.asarray(v, dtype=np.float64) for v in (progress, losses, flops))
    if table.ndim != 2 or table.shape != (len(compute), len(g)) or len(compute) < 2:
        raise TrajectoryGuardError(
            f"losses must be (rungs, progress) with at least two rungs; got {table.shape} for {len(compute)} rungs"
        )
    if not np.all(table > floor):
        raise TrajectoryGuardError(f"every loss must exceed the floor {floor}; the smallest is {np.nanmin(table)}")
    loss, amplitude, exponent = _line_each(g, table, compute, target_flops, floor)
    lowest = highest = np.full_like(loss, np.nan)
    if len(compute) > 2:
        without = [
            _line_each(g, np.delete(table, k, 0), np.delete(compute, k), target_flops, floor)[0]
            for k in range(len(compute))
        ]
        lowest, highest = np.min(without, axis=0), np.max(without, axis=0)
    return PublishedForecast(loss, amplitude, exponent, lowest, highest)


def _line_each(
    g: NDArray[np.float64], losses: NDArray[np.float64], flops: NDArray[np.float64], target: float, floor: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    x = np.log(flops[:, None] * g)
    y = np.log(losses - floor)
    centred = x - x.mean(axis=0)
    slope = (centred * (y - y.mean(axis=0))).sum(axis=0) / (centred**2).sum(axis=0)
    start = y.mean(axis=0) - slope * x.mean(axis=0)
    return floor + np.exp(start + slope * np.log(target * g)), np.exp(start), -slope


@dataclass(frozen=True, kw_only=True, eq=False)
class MatchedProgress:
    """Power law in compute at each progress, smooth along progress, averaged over the floor.

    For a floor E: ln(L_k(g) - E) = m(g) - alpha(g) (ln C_k - c), with residuals in relative loss, the second derivative
    of m and the first derivative of alpha over ln g penalised. The forecast is the mean over floors, weighted by the
    prior E ~ N(0.55, 0.10^2) x lowest ladder loss and by the fit. The floor is what a forecast depends on most, and a
    ladder alone hardly tells it.

    It holds for rungs and targets that share tokens per active parameter, the LR schedule as a function of progress,
    data phases and evaluation.

    Args:
        progress: (m,) knots, rising; the first is where the law begins.
        floors: (e,) floors in nats.
        weights: (e,) their weights, summing to 1.
        log_flops: c, mean ln FLOPs of the rungs' full plans.
        level: (e, m) m(g).
        exponent: (e, m) alpha(g).
        falling: the rungs' losses fall all along, so the forecast is held to do so too.
    """

    name: ClassVar[str] = "matched-progress"
    varies: ClassVar[frozenset[str]] = frozenset()

    progress: NDArray[np.float64]
    floors: NDArray[np.float64]
    weights: NDArray[np.float64]
    log_flops: float
    level: NDArray[np.float64]
    exponent: NDArray[np.float64]
    falling: bool

    @classmethod
    def fit(cls, ladder: Ladder) -> Self:
        """Fit the law to at least two rungs of one recipe that differ in compute.

        Raises:
            TrajectoryGuardError: fewer than two rungs, equal compute, fewer than two rungs trained to the end, or
                rungs that differ in LR schedule, tokens per active parameter or data phases.
        """
        require_agreement(ladder, cls.name, cls.varies)
        curves = [rung_curve(rung) for rung in ladder.rungs]
        log_flops = np.log([curve.plan.total_flops for curve in curves])
        if len(curves) < 2 or np.ptp(log_flops) < 1e-3:
            raise TrajectoryGuardError(
                f"{cls.name} needs at least two rungs of different compute, got {len(curves)} of "
                f"{[f'{math.exp(c):.3g}' for c in log_flops]} FLOPs; train a smaller run of the same recipe"
            )
        knots = _knots(curves)
        centre = float(log_flops.mean())
        lowest = min(float(curve.loss.min()) for curve in curves)
        fits = [_solve(curves, log_flops - centre, knots, share * lowest) for share in FLOORS]
        misfit = np.array([fit[2] for fit in fits])
        variance = RUN_SD**2 + _noise(curves, knots[0])
        log_weight = -0.5 * ((FLOORS - FLOOR_MEAN) / FLOOR_SD) ** 2 - RUN_POINTS * len(curves) * misfit / 2 / variance
        weights = np.exp(log_weight - log_weight.max())
        kept = np.flatnonzero(weights > 1e-4 * weights.sum())
        return cls(
            progress=knots,
            floors=FLOORS[kept] * lowest,
            weights=weights[kept] / weights[kept].sum(),
            log_flops=centre,
            level=np.array([fits[i][0] for i in kept]),
            exponent=np.array([fits[i][1] for i in kept]),
            falling=all(_falls(curve) for curve in curves),
        )

    def first_progress(self, plan: RunPlan) -> float:
        """Return the first knot: the first progress that two rungs and the end of warm-up have passed."""
        return float(self.progress[0])

    def loss(self, plan: RunPlan, progress: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the loss in nats at each progress (m,), linear in ln progress between knots."""
        table = self.at_compute(plan.total_flops)
        return np.interp(np.log(np.maximum(progress, 1e-12)), np.log(self.progress), table)

    def at_compute(self, flops: float) -> NDArray[np.float64]:
        """Return the loss in nats at the knots (m,) for a full plan of `flops` FLOPs."""
        each = self.floors[:, None] + np.exp(self.level - self.exponent * (math.log(flops) - self.log_flops))
        table = self.weights @ each
        return isotonic_regression(table, increasing=False).x if self.falling else table

    def floor(self) -> tuple[float, float]:
        """Return mean and standard deviation of the floor in nats, over its weights."""
        mean = float(self.weights @ self.floors)
        return mean, float(np.sqrt(self.weights @ (self.floors - mean) ** 2))

    def floor_sensitivity(self, flops: float) -> tuple[float, float]:
        """Return the final loss in nats for a floor one standard deviation below and above its mean."""
        mean, sd = self.floor()
        finals = self.floors + np.exp(self.level[:, -1] - self.exponent[:, -1] * (math.log(flops) - self.log_flops))
        low, high = np.interp([mean - sd, mean + sd], self.floors, finals)
        return float(low), float(high)

    def to_params(self) -> dict[str, Any]:
        """Return the parameters as plain JSON values."""
        return {
            "log_flops": self.log_flops,
            "falling": self.falling,
            "progress": self.progress.tolist(),
            "floors": self.floors.tolist(),
            "weights": self.weights.tolist(),
            "level": self.level.tolist(),
            "exponent": self.exponent.tolist(),
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """Rebuild the law from `to_params`.

        Raises:
            TrajectoryGuardError: a parameter is missing, unknown, of the wrong shape or out of range.
        """
        names = ("log_flops", "falling", "progress", "floors", "weights", "level", "exponent")
        require_fields(params, names, cls.name)
        knots = read_array(params, "progress", cls.name, (None,))
        floors = read_array(params, "floors", cls.name, (None,))
        shape = (len(floors), len(knots))
        weights = read_array(params, "weights", cls.name, shape[:1])
        log_flops = float(read_array(params, "log_flops", cls.name, ()))
        if np.any(np.diff(knots) <= 0) or not (knots[0] > 0 and knots[-1] <= 1):
            raise TrajectoryGuardError(f"{cls.name}: `progress` must rise strictly within (0, 1]")
        if np.any(weights < 0) or abs(weights.sum() - 1) > 1e-6 or np.any(floors < 0):
            raise TrajectoryGuardError(f"{cls.name}: `weights` must be >= 0 and sum to 1, and `floors` be >= 0")
        if not isinstance(params["falling"], bool):
            raise TrajectoryGuardError(f"{cls.name}: `falling` must be true or false, got {params['falling']!r}")
        return cls(
            progress=knots,
            floors=floors,
            weights=weights,
            log_flops=log_flops,
            level=read_array(params, "level", cls.name, shape),
            exponent=read_array(params, "exponent", cls.name, shape),
            falling=params["falling"],
        )


def _knots(curves: list[RungCurve]) -> NDArray[np.float64]:
    """Progress values of `PROGRESS_GRID` that at least two rungs cover after warm-up, the first and last added."""
    starts = sorted(max(float(curve.progress[0]), curve.plan.schedule.warmup) for curve in curves)
    ends = sorted((float(curve.progress[-1]) for curve in curves), reverse=True)
    if ends[1] < REACH:
        reached = {curve.name: round(float(curve.progress[-1]), 3) for curve in curves}
        raise TrajectoryGuardError(
            f"matched-progress needs two rungs trained to the end of their plan; the logs reach progress {reached}. "
            "Finish two rungs, or correct total_steps if these were the whole plan"
        )
    # One percent earlier, so that evaluations at nominally equal progress do not lose their first point to rounding.
    first = max(0.99 * starts[1], START)
    inner = PROGRESS_GRID[(first * 1.03 < PROGRESS_GRID) & (PROGRESS_GRID < 1.0)]
    if len(inner) < 3:
        raise TrajectoryGuardError(f"matched-progress: a rung's log begins at progress {first:.3g}, too late to fit")
    return np.concatenate([[first], inner, [1.0]])


def _solve(
    curves: list[RungCurve], compute: NDArray[np.float64], knots: NDArray[np.float64], floor: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Solve the penalised least squares for one floor; returns level, exponent and mean squared relative residual."""
    u = np.log(knots)
    count = len(knots)
    rows, values, points = [], [], 0
    for curve, x in zip(curves, compute, strict=True):
        inside = curve.progress >= knots[0] * (1 - 1e-9)
        loss, error = curve.loss[inside], curve.error[inside]
        at = _interpolation(np.log(curve.progress[inside]), u)
        share = 20.0 * (1.0 - knots[0]) / max(len(loss), 1) * _covered(curve, knots)
        trust = share * NOISE_SD**2 / (NOISE_SD**2 + (error / loss) ** 2)
        scale = np.sqrt(trust) * (loss - floor) / loss
        rows.append(np.hstack([at, -x * at]) * scale[:, None])
        values.append(np.log(loss - floor) * scale)
        points += float(trust.sum())
    step = np.diff(u)
    bend = np.zeros((count - 2, count))
    inner = np.arange(count - 2)
    width = (step[:-1] + step[1:]) / 2.0
    for offset, part in ((0, 1 / step[:-1]), (1, -1 / step[:-1] - 1 / step[1:]), (2, 1 / step[1:])):
        bend[inner, inner + offset] = part / np.sqrt(width)
    drift = np.diff(np.eye(count), axis=0) / np.sqrt(step)[:, None]
    matrix = np.vstack(
        [
            *rows,
            np.hstack([math.sqrt(CURVATURE) * bend, np.zeros_like(bend)]),
            np.hstack([np.zeros_like(drift), math.sqrt(DRIFT) * drift]),
        ]
    )
    data = np.concatenate(values)
    target = np.concatenate([data, np.zeros(len(matrix) - len(data))])
    # Normal equations in a symmetric positive definite solve: several times faster than lstsq at this size.
    solution = np.asarray(np.linalg.solve(matrix.T @ matrix, matrix.T @ target), dtype=np.float64)
    residual = data - matrix[: len(data)] @ solution
    return solution[:count], solution[count:], float(residual @ residual) / points


def _noise(curves: list[RungCurve], start: float) -> float:
    """Mean squared relative standard error of the rung points, weighted as the fit weighs them."""
    relative = [(curve.error / curve.loss)[curve.progress >= start * (1 - 1e-9)] ** 2 for curve in curves]
    trust = [NOISE_SD**2 / (NOISE_SD**2 + square) for square in relative]
    return float(np.concatenate(relative) @ np.concatenate(trust) / np.concatenate(trust).sum())


def _covered(curve: RungCurve, knots: NDArray[np.float64]) -> float:
    """Share of the horizon that a rung's log covers, so that a rung cut short keeps its weight per point."""
    return min(1.0, (float(curve.progress[-1]) - knots[0]) / (1.0 - knots[0]))


def _interpolation(x: NDArray[np.float64], knots: NDArray[np.float64]) -> NDArray[np.float64]:
    """Matrix (len(x), len(knots)) that reads a piecewise linear function of `knots` at `x`."""
    right = np.clip(np.searchsorted(knots, x), 1, len(knots) - 1)
    share = np.clip((x - knots[right - 1]) / (knots[right] - knots[right - 1]), 0.0, 1.0)
    matrix = np.zeros((len(x), len(knots)))
    lines = np.arange(len(x))
    matrix[lines, right - 1] = 1.0 - share
    matrix[lines, right] = share
    return matrix


def _falls(curve: RungCurve) -> bool:
    """Tell whether a rung's loss never rises by more than 1 % over its running minimum."""
    return bool(np.all(curve.loss <= 1.01 * np.minimum.accumulate(curve.loss) + 2 * curve.error))
