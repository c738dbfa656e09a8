"""The learning-rate schedule of a run, recognised from its logged learning rates."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from trajectory_guard.curve import LossCurve
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.logs.stitch import largest_gap
from trajectory_guard.lr_schedule import DecayShape, LRSchedule
from trajectory_guard.plan import RunPlan

__all__ = ["schedule_from_lr"]

TOLERANCE = 0.01
"""Largest difference of lr / peak for which a named shape is taken."""

MAX_POINTS = 1000
"""Most points of a table: thinned evenly, corners kept."""

FINEST_WARMUP = 1e-4
"""Shortest warm-up tried where the log begins at the peak, as progress."""


def schedule_from_lr(curve: LossCurve, plan: RunPlan) -> LRSchedule:
    """Return the schedule that a run's logged learning rates followed.

    A named shape (constant, linear, cosine, WSD with its decay shapes, steps) is taken when it lies within 1 % of
    the peak at every logged point, or within what a shift by one step and a half explains (loggers disagree about
    whose step's rate they write). Otherwise, or when the log ends before 95 % of the plan or has holes, the schedule is
    a table of the logged points.

    Args:
        curve: a run with `lr`, whose tokens are those of `plan`'s horizon.
        plan: gives the horizon; its own schedule is not used.

    Raises:
        TrajectoryGuardError: the learning rate is not logged, or is never positive.

    Example:
        >>> from trajectory_guard.lr_schedule import LRSchedule
        >>> shape = LRSchedule(shape="cosine", warmup=0.05, final=0.1)
        >>> plan = RunPlan(total_steps=1000, tokens_per_step=8, active_params=1e6, schedule=shape)
        >>> step = np.arange(10, 1001, 10)
        >>> lr = 3e-4 * shape.ratio(step / 1000)
        >>> curve = LossCurve(step=step, tokens=plan.tokens(step), loss=np.ones(100), lr=lr)
        >>> schedule_from_lr(curve, plan).describe()
        'cosine (warmup=0.05, final=0.1)'
    """
    if curve.lr is None:
        raise TrajectoryGuardError("the log has no learning rate; give the plan a named schedule instead")
    if np.any(curve.lr < 0) or not np.any(curve.lr > 0):
        raise TrajectoryGuardError(f"learning rates must be >= 0 and not all 0, got {curve.lr.min()}..{curve.lr.max()}")
    g = curve.tokens / plan.total_tokens
    inside = g <= 1.0 + 1e-9
    g, e = np.minimum(g[inside], 1.0), (curve.lr / curve.lr.max())[inside]
    if g.size == 0 or not np.any(e > 0):
        raise TrajectoryGuardError("no learning rate is logged within the plan's horizon")
    one_step = 1.0 / plan.total_steps
    whole = g.size >= 5 and g[-1] >= 0.95 and largest_gap(curve.step[inside]) is None
    named = _named(g, e, one_step) if whole else None
    return _table(g, e) if named is None else named


def _named(g: NDArray[np.float64], e: NDArray[np.float64], one_step: float) -> LRSchedule | None:
    warmups = _warmups(g, e)
    start = float(warmups[0])
    steps = _steps(g, e, start)
    tries: list[Callable[[], LRSchedule | None]] = [
        lambda: _fit(g, e, one_step, warmups, lambda p: LRSchedule(shape="constant", warmup=p[0]), []),
        lambda: _fit(g, e, one_step, warmups, lambda p: LRSchedule(shape="linear", warmup=p[0], final=p[1]), [0.1]),
        lambda: _fit(g, e, one_step, warmups, lambda p: LRSchedule(shape="cosine", warmup=p[0], final=p[1]), [0.1]),
    ]
    falls = g[(e < 1 - TOLERANCE) & (g > start)]
    if falls.size and falls[0] < 1.0:
        for shape in ("linear", "1-sqrt", "cosine", "exponential"):
            tries.append(lambda shape=shape: _fit_wsd(g, e, one_step, warmups, shape, float(falls[0])))
    tries.append(lambda: steps if steps is not None and _agrees(steps, g, e, one_step) else None)
    return next((found for attempt in tries if (found := attempt()) is not None), None)


def _warmups(g: NDArray[np.float64], e: NDArray[np.float64]) -> list[float]:
    """Guess where the linear warm-up ends: from the slope of its points, else between the points around the peak."""
    top = int(np.flatnonzero(e >= 1 - TOLERANCE)[0])
    rising = slice(0, top)
    usable = (e[rising] > 0) & (g[rising] > 0)
    guesses = []
    if usable.any():
        guesses.append(float(np.median(g[rising][usable] / e[rising][usable])))
    if top > 0:
        guesses += [float(g[top]), float(g[top - 1])]
    guesses += [0.0, min(FINEST_WARMUP, float(g[top]))]
    return [w for w in dict.fromkeys(guesses) if 0.0 <= w < 1.0]


def _fit(
    g: NDArray[np.float64],
    e: NDArray[np.float64],
    one_step: float,
    warmups: Sequence[float],
    build: Callable[[Sequence[float]], LRSchedule],
    first: list[float],
) -> LRSchedule | None:
    """Fit the parameters after the warm-up by least squares for each guess of it; return the first that agrees."""
    highs = [1.0, *(1.0 for _ in first)]
    for warmup in warmups:
        # Rounded parameters first: 0.05 is what somebody configured, 0.0500003 what a fit returns.
        start = np.array([warmup, *first])
        fitted = least_squares(lambda p: build(_clipped(p, highs)).ratio(g) - e, start, diff_step=1e-4, max_nfev=200).x
        for values in (
            np.round(fitted, 2),
            np.round(fitted, 3),
            np.round(fitted, 4),
            fitted,
            np.array([warmup, *fitted[1:]]),
        ):
            schedule = build(_clipped(values, highs))
            if _agrees(schedule, g, e, one_step):
                return schedule
    return None


def _fit_wsd(
    g: NDArray[np.float64],
    e: NDArray[np.float64],
    one_step: float,
    warmups: Sequence[float],
    shape: DecayShape,
    falls: float,
) -> LRSchedule | None:
    def build(p: Sequence[float]) -> LRSchedule:
        start = min(max(p[2], p[0]), 1 - 1e-6)
        return LRSchedule(shape="wsd", warmup=p[0], final=p[1], decay_start=float(start), decay_shape=shape)

    before = g[g < falls]
    first = [float(e[-1]), float(before[-1]) if before.size else falls]
    return _fit(g, e, one_step, warmups, build, first)


def _clipped(values: Sequence[float] | NDArray[np.float64], highs: list[float]) -> list[float]:
    # A warm-up or a decay start is below 1, and least squares may step outside.
    return [
        float(np.clip(value, 0.0, high - (1e-6 if i == 0 else 0.0)))
        for i, (value, high) in enumerate(zip(values, highs, strict=True))
    ]


def _agrees(schedule: LRSchedule, g: NDArray[np.float64], e: NDArray[np.float64], one_step: float) -> bool:
    """Within 1 % of the peak, or within what a step and a half of shift explains."""
    around = [schedule.ratio(np.clip(g + shift * one_step, 0.0, 1.0)) for shift in (-1.5, -0.75, 0.0, 0.75, 1.5)]
    low, high = np.min(around, axis=0), np.max(around, axis=0)
    return bool(np.all((e >= low - TOLERANCE) & (e <= high + TOLERANCE)))


def _steps(g: NDArray[np.float64], e: NDArray[np.float64], warmup: float) -> LRSchedule | None:
    """Return the staircase of a few levels that the points show, or None."""
    past = g >= warmup
    at, level = g[past], e[past]
    jumps = np.flatnonzero(np.abs(np.diff(level)) > TOLERANCE)
    if not 1 <= jumps.size <= 20 or np.any(np.diff(np.append(jumps, at.size - 1)) < 3):
        return None  # A level holds for a while; what moves at every point is a decay.
    # A level change lies between two points; the later one is where it is seen.
    points = tuple(
        (round(float(at[j + 1]), 4), round(float(np.median(level[j + 1 : k + 1])), 4))
        for j, k in zip(jumps, [*jumps[1:], at.size - 1], strict=True)
    )
    if any(b[0] <= a[0] for a, b in itertools.pairwise(points)):
        return None
    return LRSchedule(shape="steps", warmup=warmup, points=points)


def _table(g: NDArray[np.float64], e: NDArray[np.float64]) -> LRSchedule:
    """Return the logged points, thinned where there are many; the first point at the peak ends the warm-up."""
    if g.size > MAX_POINTS:
        bend = np.abs(np.diff(e, 2, prepend=e[0], append=e[-1]))
        corners = np.argsort(bend, kind="stable")[-MAX_POINTS // 4 :]
        even = np.linspace(0, g.size - 1, MAX_POINTS - corners.size - 2).astype(int)
        kept = np.unique(np.concatenate([corners, even]))
        g, e = g[kept], e[kept]
    top = float(g[int(np.argmax(e >= 1 - TOLERANCE))])
    rises = e[0] < 1 - TOLERANCE
    points = tuple((float(a), float(b)) for a, b in zip(g, e, strict=True))
    return LRSchedule(shape="table", warmup=top if rises and top < 1.0 else 0.0, points=points)
