"""Schedule-aware law: one joint fit of runs of any size, horizon and learning-rate schedule."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.laws.memory import MEMORIES, MEMORY_PARAMETERS, Memory, Place, effective_rate, join, locate
from trajectory_guard.laws.solve import nonnegative, polish
from trajectory_guard.plan import RunPlan

__all__ = ["ScheduleAwareLaw"]

Array = NDArray[np.float64]


class _Parameter(NamedTuple):
    name: str
    mean: float
    sd: float
    low: float
    high: float


FLOOR_SHARE, FLOOR_SHARE_SD = 0.55, 0.10
"""Prior of the floor, as a share of the lowest loss in the ladder: over six public families it brings the bias of a
forecast beyond the ladder from -.6 to -.1 % (measured by tests/benchmarks/accuracy.py)."""

_PARAMETERS = (
    _Parameter("floor", FLOOR_SHARE, FLOOR_SHARE_SD, 0.0, 1.0),  # in units of the lowest loss
    _Parameter("ln_a", 0.0, 1.0, -8.0, 4.0),
    _Parameter("ln_b", math.log(0.5), 1.0, -8.0, 5.0),
    _Parameter("ln_c", math.log(0.2), 0.7, -9.0, 3.0),
    _Parameter("alpha", 0.25, 0.10, 0.02, 0.8),
    _Parameter("beta", 0.45, 0.15, 0.05, 1.5),
    _Parameter("kappa", 0.25, 0.25, -0.6, 1.2),
    _Parameter("nu", -0.1, 0.1, -1.0, 0.6),
    _Parameter("q", 0.7, 0.4, 0.1, 2.5),
    _Parameter("ln_tau", math.log(0.1), 1.5, -12.0, 6.0),
    _Parameter("ln_p", 0.0, 0.5, -2.5, 2.0),
    _Parameter("gamma", 0.5, 0.25, 0.0, 1.5),
)
"""Priors (normal) and bounds. They decide where a ladder has one or two sizes and hardly matter from four sizes on.
Values: what single fits of six public families scatter about (measured by tests/benchmarks/accuracy.py)."""

RUN_POINTS, POINT_SD = 4.0, 0.003
"""What a run's points say together: as much as 4 independent ones of relative sd 0.3 %. A law's misfit is smooth along a
run, so more points of the same run add little."""

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

CHUNK = 16384
"""Points whose memory is summed at once, to bound the space for a forecast of a million steps."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Data:
    """Points of many runs as the law sees them, (n,) each."""

    size: Array  # ln(N / 1e8)
    seen: Array  # ln(S / 1e9)
    place: Place
    loss: Array
    weight: Array


class ScheduleAwareLaw:
    """L(N, t) = E + A n^-alpha + B n^kappa S(t)^-beta + c n^nu e(t)^q for runs that share all but size and schedule.

    n = N / 1e8 active parameters; S = integral of e over tokens / 1e9, so that warm-up counts half; e the learning rate
    over its peak, or in its place the effective rate that follows it with delay (`laws.memory`). Which of those is used
    is chosen by back-test: the largest size is held out, or single runs where there are fewer than three sizes.

    The fit minimises soft-L1 of the relative residuals over .3 % plus the squares of normal priors. It needs the
    *planned* schedule and horizon of every run, also of one that was cut short, and one convention of counting
    parameters (a 6 % different count costs .3 %).

    Args:
        memory: form of the learning-rate term.
        theta: parameters in the order of `PARAMETERS`, as many as the form has.
        scores: mean absolute error in percent of each form in the back-test that chose; empty if nothing was chosen.

    Example:
        >>> law = ScheduleAwareLaw("instant", [1.7, 0.4, -0.7, -1.5, 0.22, 0.43, 0.35, -0.1, 0.7])
        >>> from trajectory_guard.lr_schedule import LRSchedule
        >>> plan = RunPlan(total_steps=1000, tokens_per_step=10**7, active_params=1e9,
        ...                schedule=LRSchedule(shape="cosine", warmup=0.01, final=0.1))
        >>> law.loss(plan, np.array([0.1, 0.5, 1.0])).round(3).tolist()
        [3.913, 3.319, 3.169]

    References:
        Hoffmann et al. 2022, arXiv:2203.15556, for the first three terms; Tissue et al. 2024, arXiv:2408.11029, for S.
    """

    name: ClassVar[str] = "schedule-aware"
    varies: ClassVar[frozenset[str]] = frozenset(
        {"lr_schedule", "warmup", "tokens_per_active_param", "batch_schedule"}
    )
    PARAMETERS: ClassVar[tuple[str, ...]] = tuple(parameter.name for parameter in _PARAMETERS)

    def __init__(
        self, memory: Memory, theta: Sequence[float] | Array, scores: Mapping[Memory, float] | None = None
    ) -> None:
        self.memory: Memory = memory
        self.theta = np.array(theta, dtype=np.float64)
        self.scores = dict(scores or {})

    @classmethod
    def fit(cls, ladder: Ladder) -> Self:
        """Fit the law to a ladder of two or more rungs, the form of its learning-rate term chosen by back-test.

        Raises:
            TrajectoryGuardError: fewer than two rungs with points to fit, or rungs of different data phases.
        """
        return cls.fit_with(ladder, None)

    @classmethod
    def fit_with(cls, ladder: Ladder, memory: Memory | None) -> Self:
        """Fit with a given form of the learning-rate term; None chooses it by back-test, as `fit` does.

        Raises:
            TrajectoryGuardError: fewer than two rungs with points to fit, or rungs of different data phases.
        """
        rungs = [rung for rung in ladder.rungs if _has_points(rung)]
        if len(rungs) < 2:
            raise TrajectoryGuardError(
                f"the schedule-aware law needs at least two rungs with points after {START:.0%} of training and twice "
                f"the warm-up, got {len(rungs)} of {len(ladder.rungs)}; add finished runs"
            )
        if len({rung.plan.recipe.data_phases for rung in rungs}) > 1:
            raise TrajectoryGuardError(
                "rungs have different data phases, which the schedule-aware law cannot tell from the schedule; keep "
                "rungs whose mixture changes at the same progress"
            )
        scores: dict[Memory, float] = {}
        if memory is None:
            memory, scores = _choose(rungs)
        return cls(memory, _fit(_gather(rungs, MOST_POINTS), memory), scores)

    def first_progress(self, plan: RunPlan) -> float:
        """Return max(5 %, twice the warm-up), where the law begins to hold."""
        return _first(plan)

    def loss(self, plan: RunPlan, progress: Array) -> Array:
        """Return the loss in nats per token at each progress (m,)."""
        g = np.asarray(progress, dtype=np.float64)
        flat = g.ravel()
        parts = [flat[i : i + CHUNK] for i in range(0, flat.size, CHUNK)]
        losses = [_law(self.theta, _place([plan], [part]), self.memory)[0] for part in parts]
        return np.concatenate(losses).reshape(g.shape) if losses else np.zeros(g.shape)

    def to_params(self) -> dict[str, Any]:
        """Return the parameters as plain JSON values."""
        return {
            "memory": self.memory,
            **dict(zip(self.PARAMETERS, self.theta.tolist(), strict=False)),
            "scores_percent": {form: float(score) for form, score in self.scores.items()},
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """Rebuild the law.

        Raises:
            TrajectoryGuardError: a parameter is missing, unknown or out of range.
        """
        memory = params.get("memory")
        if memory not in MEMORIES:
            raise TrajectoryGuardError(f"`memory` of a schedule-aware fit must be one of {MEMORIES}, got {memory!r}")
        names = _names(memory)
        if set(params) != {"memory", "scores_percent", *names}:
            raise TrajectoryGuardError(
                f"a schedule-aware fit of memory {memory!r} has the parameters {list(names)}, `memory` and "
                f"`scores_percent`; got {sorted(params)}"
            )
        for parameter in _PARAMETERS[: len(names)]:
            value = params[parameter.name]
            high = math.inf if parameter.name == "floor" else parameter.high
            if not isinstance(value, float) or not parameter.low <= value <= high:
                raise TrajectoryGuardError(
                    f"`{parameter.name}` must be a number in [{parameter.low:g}, {high:g}], got {value!r}"
                )
        scores = params["scores_percent"]
        if not isinstance(scores, Mapping) or not all(form in MEMORIES for form in scores):
            raise TrajectoryGuardError(f"`scores_percent` must give a number for some of {MEMORIES}, got {scores!r}")
        return cls(memory, [params[name] for name in names], scores)


def _names(memory: Memory) -> tuple[str, ...]:
    return ScheduleAwareLaw.PARAMETERS[: 9 + MEMORY_PARAMETERS[memory]]


def _first(plan: RunPlan) -> float:
    return min(max(START, WARMUPS * plan.schedule.warmup), 0.99)


def _law(theta: Array, data: _Data, memory: Memory) -> tuple[Array, Array]:
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


def _place(
    plans: Sequence[RunPlan], progress: Sequence[Array], loss: Array | None = None, weight: Array | None = None
) -> _Data:
    """Place points of several runs in the coordinates of the law."""
    place = join(
        [locate(plan.schedule, g, plan.total_tokens / 1e9) for plan, g in zip(plans, progress, strict=True)]
    )
    sizes = [np.full(len(g), math.log(plan.active_params / 1e8)) for plan, g in zip(plans, progress, strict=True)]
    none = np.zeros(0)
    return _Data(
        size=np.concatenate(sizes),
        seen=np.log(place.area),
        place=place,
        loss=none if loss is None else loss,
        weight=none if weight is None else weight,
    )


def _has_points(rung: Rung) -> bool:
    return any(curve.tokens[-1] / rung.plan.total_tokens >= _first(rung.plan) for curve in rung.curves)


def _gather(rungs: Sequence[Rung], most: int) -> _Data:
    """Return the points of rungs that are fitted, each run weighing `RUN_POINTS`."""
    plans, progress, losses, weights = [], [], [], []
    for rung in rungs:
        for curve in rung.curves:
            g = np.minimum(curve.tokens / rung.plan.total_tokens, 1.0)
            kept = g >= _first(rung.plan) - 1e-12
            if not kept.any():
                continue
            g, loss = _thin(g[kept], curve.loss[kept], most)
            share = 1.0 / (1.0 + (EARLY / g) ** 2)
            plans.append(rung.plan)
            progress.append(g)
            losses.append(loss)
            weights.append(RUN_POINTS * share / share.sum())
    return _place(plans, progress, np.concatenate(losses), np.concatenate(weights))


def _thin(g: Array, loss: Array, most: int) -> tuple[Array, Array]:
    """Average a log in bins of equal width in sqrt(progress): narrower where the loss bends."""
    if len(g) <= most:
        return g, loss
    edges = np.linspace(math.sqrt(g[0]), math.sqrt(g[-1]), most + 1)
    label = np.clip(np.searchsorted(edges, np.sqrt(g), side="right") - 1, 0, most - 1)
    count = np.bincount(label, minlength=most)
    used = count > 0
    return tuple(np.bincount(label, values, most)[used] / count[used] for values in (g, loss))  # pyright: ignore


def _fit(data: _Data, memory: Memory, first: Array | None = None) -> Array:
    """Return the parameters that minimise the robust residuals plus priors.

    Args:
        data: the points.
        memory: form of the learning-rate term.
        first: parameters of another form to start from; None starts from `STARTS`.
    """
    table = _PARAMETERS[: 9 + MEMORY_PARAMETERS[memory]]
    mean, sd, low, high = (np.array([row[i] for row in table], dtype=np.float64) for i in (1, 2, 3, 4))
    lowest = float(data.loss.min())
    for vector in (mean, sd, high):
        vector[0] *= lowest
    count = len(data.loss)
    scale = 1.0 / (POINT_SD * data.loss)
    prior = np.diag(1.0 / sd)

    def residual(theta: Array) -> tuple[Array, Array]:
        value, jacobian = _law(theta, data, memory)
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
            _, jacobian = _law(theta, data, "instant")
            weighted = jacobian[:, :4] * (np.sqrt(data.weight) * scale)[:, None]
            target = np.sqrt(data.weight) / POINT_SD
            amplitudes = nonnegative(
                np.concatenate([weighted, [[1.0 / sd[0], 0.0, 0.0, 0.0]]]), np.append(target, mean[0] / sd[0])
            )
            theta[0], theta[1:4] = amplitudes[0], np.log(np.maximum(amplitudes[1:], 1e-3))
            starts.append(theta)
        if memory != "instant":
            return _fit(data, memory, _fit(data, "instant"))
    polished = [polish(residual, start, low, high, robust=count, weights=data.weight, tolerance=TOLERANCE) for start in starts]
    return min(polished, key=lambda result: result[1])[0]


def _choose(rungs: Sequence[Rung]) -> tuple[Memory, dict[Memory, float]]:
    """Choose the remembering form by back-test; return it and the mean absolute error of every form in percent.

    `DEFAULT` stands unless another is better by more than two standard errors of the difference over held-out rungs.
    """
    errors: dict[Memory, list[float]] = {form: [] for form in MEMORIES}
    for held in _folds(rungs):
        fitted = _gather([rung for rung in rungs if rung not in held], BACKTEST_POINTS)
        tested = [_gather([rung], BACKTEST_POINTS) for rung in held]
        start = _fit(fitted, "instant")
        for form in MEMORIES:
            theta = start if form == "instant" else _fit(fitted, form, start)
            for run in tested:
                error = np.abs(_law(theta, run, form)[0] / run.loss - 1.0)
                errors[form].append(100.0 * float(np.average(error, weights=run.weight)))
    scores = {form: float(np.mean(values)) for form, values in errors.items()}
    best = min(MEMORIES[1:], key=lambda form: scores[form])
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
