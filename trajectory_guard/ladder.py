"""Rung and Ladder: finished runs that may be fitted together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trajectory_guard.channel import ChannelSeries
from trajectory_guard.curve import LossCurve
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.plan import RunPlan
from trajectory_guard.recipe import check_recipe

__all__ = ["Ladder", "Rung"]

RUNG_FIELDS = frozenset({"lr_schedule", "warmup", "tokens_per_active_param", "batch_schedule", "data_phases"})
"""Identity fields in which the rungs of a ladder may differ; a law that cannot use such rungs refuses them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rung:
    """One configuration of a ladder with the logs of its finished runs.

    Args:
        name: how messages and reports call it.
        plan: size, horizon, schedule and recipe it was trained with.
        curves: one loss curve per seed.
        channels: name of another scalar, such as `grad_norm` -> one series per seed.

    Raises:
        TrajectoryGuardError: no curve, or a channel that is not given for every seed.

    Example:
        >>> from trajectory_guard.lr_schedule import LRSchedule
        >>> plan = RunPlan(total_steps=2, tokens_per_step=8, active_params=10, schedule=LRSchedule(shape="constant"))
        >>> Rung(name="d8", plan=plan, curves=(LossCurve(step=[1, 2], tokens=[8, 16], loss=[3, 2]),)).name
        'd8'
    """

    name: str
    plan: RunPlan
    curves: tuple[LossCurve, ...]
    channels: Mapping[str, tuple[ChannelSeries, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.curves:
            raise TrajectoryGuardError(f"rung {self.name!r} has no loss curve; give it at least one log")
        for name, series in self.channels.items():
            if len(series) != len(self.curves):
                raise TrajectoryGuardError(
                    f"rung {self.name!r}: channel {name!r} has {len(series)} series for {len(self.curves)} loss "
                    "curves; give it one per seed"
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class Ladder:
    """Rungs of one recipe, ordered by the FLOPs of their full plans.

    Args:
        rungs: at least one, of one metric, split, tokenizer, FLOP convention and whatever else makes losses comparable.

    Raises:
        TrajectoryGuardError: no rung, two of one name, recipes whose losses cannot be compared, or other channels.
    """

    rungs: tuple[Rung, ...]

    def __post_init__(self) -> None:
        if not self.rungs:
            raise TrajectoryGuardError("a ladder needs at least one rung, got none")
        names = [rung.name for rung in self.rungs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise TrajectoryGuardError(f"rung names must differ, got {twice} more than once")
        first = _comparable(self.rungs[0].plan)
        for rung in self.rungs[1:]:
            other = _comparable(rung.plan)
            errors = check_recipe(first, other, override=True).errors
            if errors:
                fields = [text.split(":")[0] for text in errors]
                told = "; ".join(f"{name}: {first[name]!r} and {other[name]!r}" for name in fields)
                raise TrajectoryGuardError(
                    f"rungs {names[0]!r} and {rung.name!r} cannot stand in one ladder, their losses do not compare: "
                    f"{told}. Leave one of them out or correct its plan"
                )
            if set(rung.channels) != set(self.rungs[0].channels):
                raise TrajectoryGuardError(
                    f"rungs {names[0]!r} and {rung.name!r} carry other channels: {sorted(self.rungs[0].channels)} and "
                    f"{sorted(rung.channels)}; every rung of a ladder carries the same"
                )
        object.__setattr__(
            self, "rungs", tuple(sorted(self.rungs, key=lambda rung: (rung.plan.total_flops, rung.name)))
        )

    @property
    def metric(self) -> str:
        """Name of the loss that every rung logged."""
        return self.rungs[0].plan.metric

    @property
    def channels(self) -> tuple[str, ...]:
        """Names of the channels that every rung carries."""
        return tuple(sorted(self.rungs[0].channels))

    def identity(self) -> dict[str, Any]:
        """Return the identity fields on which every rung agrees; a forecast from this ladder is valid for them."""
        first, *others = (rung.plan.identity() for rung in self.rungs)
        return {name: value for name, value in first.items() if not any(differs(name, value, o) for o in others)}


def differs(name: str, value: Any, other: dict[str, Any]) -> bool:
    """Tell whether one identity field of a rung is absent from another's or judged different from it."""
    if name not in other:
        return True
    check = check_recipe({name: value}, {name: other[name]}, override=True)
    return bool(check.errors or check.warnings)


def _comparable(plan: RunPlan) -> dict[str, Any]:
    return {name: value for name, value in plan.identity().items() if name not in RUNG_FIELDS}
