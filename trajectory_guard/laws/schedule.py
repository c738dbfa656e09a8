"""Schedule-aware law: one joint fit of runs of any size, horizon and learning-rate schedule."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Ladder
from trajectory_guard.laws.joint import (
    MOST_POINTS,
    START,
    TABLE,
    choose_memory,
    evaluate,
    first_progress,
    fit_runs,
    gather,
    has_points,
    place_points,
)
from trajectory_guard.laws.memory import MEMORIES, MEMORY_PARAMETERS, Memory
from trajectory_guard.plan import RunPlan

__all__ = ["ScheduleAwareLaw"]

Array = NDArray[np.float64]

CHUNK = 16384
"""Points whose memory is summed at once, to bound the space for a forecast of a million steps."""


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
    varies: ClassVar[frozenset[str]] = frozenset({"lr_schedule", "warmup", "tokens_per_active_param", "batch_schedule"})
    PARAMETERS: ClassVar[tuple[str, ...]] = tuple(parameter.name for parameter in TABLE)

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
        rungs = [rung for rung in ladder.rungs if has_points(rung)]
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
            memory, scores = choose_memory(rungs)
        return cls(memory, fit_runs(gather(rungs, MOST_POINTS), memory), scores)

    def first_progress(self, plan: RunPlan) -> float:
        """Return max(5 %, twice the warm-up), where the law begins to hold."""
        return first_progress(plan)

    def loss(self, plan: RunPlan, progress: Array) -> Array:
        """Return the loss in nats per token at each progress (m,)."""
        g = np.asarray(progress, dtype=np.float64)
        flat = g.ravel()
        parts = [flat[i : i + CHUNK] for i in range(0, flat.size, CHUNK)]
        losses = [evaluate(self.theta, place_points([plan], [part]), self.memory)[0] for part in parts]
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
        names = cls._names(memory)
        if set(params) != {"memory", "scores_percent", *names}:
            raise TrajectoryGuardError(
                f"a schedule-aware fit of memory {memory!r} has the parameters {list(names)}, `memory` and "
                f"`scores_percent`; got {sorted(params)}"
            )
        for parameter in TABLE[: len(names)]:
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

    @classmethod
    def _names(cls, memory: Memory) -> tuple[str, ...]:
        return cls.PARAMETERS[: 9 + MEMORY_PARAMETERS[memory]]
