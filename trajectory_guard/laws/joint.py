"""The joint fit behind the schedule-aware law: parameters, priors, residuals, and the choice by back-test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.ladder import Rung
from trajectory_guard.laws.floor import FLOOR_SHARE, FLOOR_SHARE_SD
from trajectory_guard.laws.memory import MEMORIES, MEMORY_PARAMETERS, Memory, Place, effective_rate, join, locate
from trajectory_guard.laws.solve import nonnegative, polish
from trajectory_guard.plan import RunPlan

__all__ = [
    "START",
    "TABLE",
    "choose_memory",
    "evaluate",
    "first_progress",
    "fit_runs",
    "gather",
    "has_points",
    "place_points",
]

Array = NDArray[np.float64]


class Parameter(NamedTuple):
    """One parameter of the law: normal prior and bounds."""

    name: str
    mean: float
    sd: float
    low: float
    high: float


TABLE = (
    Parameter("floor", FLOOR_SHARE, FLOOR_SHARE_SD, 0.0, 1.0),  # in units of the lowest loss
    Parameter("ln_a", 0.0, 1.0, -8.0, 4.0),
    Parameter("ln_b", math.log(0.5), 1.0, -8.0, 5.0),
    Parameter("ln_c", math.log(0.2), 0.5, -9.0, 3.0),
    Parameter("alpha", 0.25, 0.10, 0.02, 0.8),
    Parameter("beta", 0.45, 0.15, 0.05, 1.5),
    Parameter("kappa", 0.25, 0.25, -0.6, 1.2),
    Parameter("nu", -0.1, 0.1, -1.0, 0.6),
    Parameter("q", 0.7, 0.4, 0.1, 2.5),
    Parameter("ln_tau", math.log(0.1), 1.5, -12.0, 6.0),
    Parameter("ln_p", 0.0, 0.5, -2.5, 2.0),
    Parameter("gamma", 0.5, 0.25, 0.0, 1.5),
)
"""Priors (normal) and bounds. They decide where a ladder has one or two sizes and hardly matter from four sizes on.
Values: what single fits of six public families scatter about (measured by tests/benchmarks/accuracy.py)."""

RUN_POINTS, POINT_SD = 4.0, 0.003
"""What a run's points say together: as much as 4 independent ones of relative sd 0.3 %. A law's misfit is smooth along
a run, so more points of the same run add little."""

LEAST_POINTS = 0.5
"""A log that covers part of the horizon counts by that part, but as so many points at least."""

EARLY = 0.1
"""Points at progress g weigh 1 / (1 + (0.1 / g)^2): what the start of a run leaves behind is not in the law."""

START, WARMUPS = 0.05, 2.0
"""The law speaks from the larger of 5 % of training and twice the warm-up."""

MOST_POINTS, BACKTEST_POINTS = 48, 24
"""Bins of progress into which a longer log is averaged, for a fit and for the fits of the choice by back-test."""

DEFAULT: Memory = "multi-power"
"""The remembering form that errs least over the public families (measured by tests/benchmarks/accuracy.py)."""

MOST_FOLDS = 4
"""Most hold-outs of the choice by back-test."""

STARTS = ((0.45, 0.7), (0.3, 0.7), (0.7, 1.0))
"""(beta, q) where the search starts; one optimum was found from all of them on every public family."""

TOLERANCE = 1e-8
"""Relative gain of the objective at which a fit stops: forecasts move by less than 1e-4 % from there."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """Points of many runs as the law sees them, (n,) each."""

    size: Array  # ln(N / 1e8)
    seen: Array  # ln(S / 1e9)
    place: Place
    loss: Array
    weight: Array


def first_progress(plan: RunPlan) -> float:
    """Return max(5 %, twice the warm-up), at most .99."""
    return min(max(START, WARMUPS * plan.schedule.warmup), 0.99)


def evaluate(theta: Array, data: Points, memory: Memory) -> tuple[Array, Array]:
    """Return the law (n,) and its derivatives by every parameter (n, p)."""
    floor, ln_a, ln_b, ln_c, alpha, beta, kappa, nu, q = theta[:9]
    n, s = data.size, data.seen
    if memory == "instant":
        rate, slopes = np.maximum(data.place.rate, 1e-6), None
    else:
        rate, slopes = effective_rate(memory, theta[9:], data.place)
    ln_rate = np.log(rate)
    a = np.exp(ln_a - alpha * n)
    b = np.exp(ln_b + kappa * n - beta * s)
    c = np.exp(ln_c + nu * n + q * ln_rate)
    columns = [np.ones_like(a), a, b, c, -n * a, -s * b, n * b, n * c, ln_rate * c]
    jacobian = np.stack(columns, axis=1)
    if slopes is not None:
        jacobian = np.concatenate([jacobian, (q * c / rate)[:, None] * slopes], axis=1)
    return floor + a + b + c, jacobian


def place_points(
    plans: Sequence[RunPlan], progress: Sequence[Array], loss: Array | None = None, weight: Array | None = None
) -> Points:
    """Place points of several runs in the coordinates of the law."""
    place = join([locate(plan.schedule, g, plan.total_tokens / 1e9) for plan, g in zip(plans, progress, strict=True)])
    sizes = [np.full(len(g), math.log(plan.active_params / 1e8)) for plan, g in zip(plans, progress, strict=True)]
    none = np.zeros(0)
    return Points(
        size=np.concatenate(sizes),
        seen=np.log(place.area),
        place=place,
        loss=none if loss is None else loss,
        weight=none if weight is None else weight,
    )


def has_points(rung: Rung) -> bool:
    """Tell whether a rung's log reaches the progress from which it is fitted."""
    return any(curve.tokens[-1] / rung.plan.total_tokens >= first_progress(rung.plan) for curve in rung.curves)


def gather(rungs: Sequence[Rung], most: int) -> Points:
    """Return the points that are fitted; a log weighs `RUN_POINTS` times the share of training that it covers."""
    plans, progress, losses, weights = [], [], [], []
    for rung in rungs:
        for curve in rung.curves:
            g = np.minimum(curve.tokens / rung.plan.total_tokens, 1.0)
            kept = g >= first_progress(rung.plan) - 1e-12
            if not kept.any():
                continue
            g, loss = _thin(g[kept], curve.loss[kept], most)
            share = 1.0 / (1.0 + (EARLY / g) ** 2)
            plans.append(rung.plan)
            progress.append(g)
            losses.append(loss)
            covered = (g[-1] - g[0]) / (1.0 - first_progress(rung.plan))
            weights.append(max(RUN_POINTS * covered, LEAST_POINTS) * share / share.sum())
    return place_points(plans, progress, np.concatenate(losses), np.concatenate(weights))


def _thin(g: Array, loss: Array, most: int) -> tuple[Array, Array]:
    """Average a log in bins of equal width in sqrt(progress): narrower where the loss bends."""
    if len(g) <= most:
        return g, loss
    edges = np.linspace(math.sqrt(g[0]), math.sqrt(g[-1]), most + 1)
    label = np.clip(np.searchsorted(edges, np.sqrt(g), side="right") - 1, 0, most - 1)
    count = np.bincount(label, minlength=most)
    used = count > 0
    return tuple(np.bincount(label, values, most)[used] / count[used] for values in (g, loss))  # pyright: ignore


def fit_runs(data: Points, memory: Memory, first: Array | None = None) -> Array:
    """Return the parameters that minimise the robust residuals plus priors.

    Args:
        data: the points.
        memory: form of the learning-rate term.
        first: parameters of another form to start from; None starts from `STARTS`.
    """
    table = TABLE[: 9 + MEMORY_PARAMETERS[memory]]
    mean, sd, low, high = (np.array([row[i] for row in table], dtype=np.float64) for i in (1, 2, 3, 4))
    lowest = float(data.loss.min())
    for vector in (mean, sd, high):
        vector[0] *= lowest
    count = len(data.loss)
    scale = 1.0 / (POINT_SD * data.loss)
    prior = np.diag(1.0 / sd)

    def residual(theta: Array) -> tuple[Array, Array]:
        value, jacobian = evaluate(theta, data, memory)
        return (
            np.concatenate([(value - data.loss) * scale, (theta - mean) / sd]),
            np.concatenate([jacobian * scale[:, None], prior]),
        )

    starts = []
    if first is not None:
        starts.append(np.concatenate([first[:9], mean[9:]]))
    else:
        # The form without memory is cheap: its best optimum starts the others.
        for beta, q in STARTS:
            theta = mean[:9].copy()
            theta[[5, 8]] = beta, q
            theta[:4] = 0.0
            _, jacobian = evaluate(theta, data, "instant")
            weighted = jacobian[:, :4] * (np.sqrt(data.weight) * scale)[:, None]
            target = np.sqrt(data.weight) / POINT_SD
            amplitudes = nonnegative(
                np.concatenate([weighted, [[1.0 / sd[0], 0.0, 0.0, 0.0]]]), np.append(target, mean[0] / sd[0])
            )
            theta[0], theta[1:4] = amplitudes[0], np.log(np.maximum(amplitudes[1:], 1e-3))
            starts.append(theta)
        if memory != "instant":
            return fit_runs(data, memory, fit_runs(data, "instant"))
    polished = [
        polish(residual, start, low, high, robust=count, weights=data.weight, tolerance=TOLERANCE) for start in starts
    ]
    return min(polished, key=lambda result: result[1])[0]


def choose_memory(rungs: Sequence[Rung]) -> tuple[Memory, dict[Memory, float]]:
    """Choose the remembering form by back-test; return it and the mean absolute error of every form in percent.

    `DEFAULT` stands unless another is better by more than two standard errors of the difference over held-out rungs.
    """
    errors: dict[Memory, list[float]] = {form: [] for form in MEMORIES}
    for held in _folds(rungs):
        fitted = gather([rung for rung in rungs if rung not in held], BACKTEST_POINTS)
        tested = [gather([rung], BACKTEST_POINTS) for rung in held]
        start = fit_runs(fitted, "instant")
        for form in MEMORIES:
            theta = start if form == "instant" else fit_runs(fitted, form, start)
            for run in tested:
                error = np.abs(evaluate(theta, run, form)[0] / run.loss - 1.0)
                errors[form].append(100.0 * float(np.average(error, weights=run.weight)))
    scores: dict[Memory, float] = {form: float(np.mean(values)) for form, values in errors.items()}
    best: Memory = min(MEMORIES[1:], key=lambda form: scores[form])
    gain = np.subtract(errors[DEFAULT], errors[best])
    clear = len(gain) > 2 and gain.mean() > 2.0 * gain.std(ddof=1) / math.sqrt(len(gain))
    return (best if clear else DEFAULT), scores


def _folds(rungs: Sequence[Rung]) -> list[list[Rung]]:
    """The largest size where there are three or more; else each rung, or of a dozen or more two halves."""
    largest = max(rung.plan.active_params for rung in rungs)
    top = [rung for rung in rungs if rung.plan.active_params > 0.98 * largest]
    if len({round(math.log(rung.plan.active_params), 2) for rung in rungs}) >= 3:
        return [top]
    count = 2 if len(rungs) >= 12 else min(MOST_FOLDS, len(rungs))
    return [list(rungs[i::count]) for i in range(count)]
