"""RunPlan: the horizon, size, schedule and recipe of one run, known before it starts."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trajectory_guard.conventions import FlopsConvention, Split
from trajectory_guard.errors import FileFormatError, TrajectoryGuardError
from trajectory_guard.files import read_json, write_json
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.planned import PlannedChange
from trajectory_guard.recipe import Recipe

__all__ = ["RunPlan"]

FORMAT = "trajectory-guard-plan"
VERSION = 1

MAX_COUNT, MAX_SIZE = 2**53, 1e60
"""Larger counts are not exact as float64; larger sizes are no model's, and products of smaller ones stay finite."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """One training run as it is planned.

    Args:
        total_steps: optimizer updates of the whole planned run, also when it is meant to be cut short.
        tokens_per_step: training tokens of one optimizer update, over all micro-batches and ranks; or for a batch ramp
            ((first step, tokens), ...) with the first entry at step 1.
        active_params: parameters used by one token (the ladder's own convention, embeddings in or out).
        schedule: learning rate over its peak along progress.
        total_params: all parameters, for the record.
        flops_per_token: FLOPs of one training token; by default 6 x active_params, which is what `"6ND"` means.
        flops_convention: how FLOPs were counted; a fit refuses another convention than its ladder's.
        metric: name of the watched loss.
        split: `"train"` or `"validation"`.
        recipe: what else a forecast depends on.
        changes: changes that move loss or noise on purpose; a guard learns the run's level anew at each.

    Raises:
        TrajectoryGuardError: a number is not positive, a batch ramp is out of order, or names are not known.

    Example:
        >>> plan = RunPlan(total_steps=100, tokens_per_step=((1, 10), (51, 30)), active_params=1e6,
        ...                schedule=LRSchedule(shape="cosine"))
        >>> plan.total_tokens, float(plan.tokens(60)), float(plan.progress(50))
        (2000, 800.0, 0.25)
    """

    total_steps: int
    tokens_per_step: int | tuple[tuple[int, int], ...]
    active_params: float
    schedule: LRSchedule
    total_params: float | None = None
    flops_per_token: float | None = None
    flops_convention: FlopsConvention = "6ND"
    metric: str = "loss"
    split: Split = "train"
    recipe: Recipe = field(default_factory=Recipe)
    changes: tuple[PlannedChange, ...] = ()

    def __post_init__(self) -> None:
        _whole("total_steps", self.total_steps)
        if not isinstance(self.tokens_per_step, int):
            try:
                ramp = tuple((first, tokens) for first, tokens in self.tokens_per_step)
            except (TypeError, ValueError) as error:
                raise TrajectoryGuardError(
                    f"tokens_per_step must be an int or ((first step, tokens), ...), got {self.tokens_per_step!r}"
                ) from error
            for first, tokens in ramp:
                _whole("first step of a batch phase", first)
                _whole("tokens_per_step", tokens)
            firsts = [first for first, _ in ramp]
            if not ramp or firsts[0] != 1 or any(b <= a for a, b in itertools.pairwise(firsts)):
                raise TrajectoryGuardError(
                    f"a batch ramp must start at step 1 and rise strictly, got first steps {firsts}"
                )
            if firsts[-1] > self.total_steps:
                raise TrajectoryGuardError(
                    f"a batch phase begins at step {firsts[-1]}, after total_steps = {self.total_steps}"
                )
            object.__setattr__(self, "tokens_per_step", ramp)
        else:
            _whole("tokens_per_step", self.tokens_per_step)
        _positive("active_params", self.active_params)
        for name in ("total_params", "flops_per_token"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if not isinstance(self.schedule, LRSchedule):
            raise TrajectoryGuardError(f"schedule must be an LRSchedule, got {self.schedule!r}")
        if not isinstance(self.recipe, Recipe):
            raise TrajectoryGuardError(f"recipe must be a Recipe, got {self.recipe!r}")
        for name, allowed in (("flops_convention", FlopsConvention), ("split", Split)):
            if getattr(self, name) not in get_args(allowed):
                raise TrajectoryGuardError(f"{name} must be one of {get_args(allowed)}, got {getattr(self, name)!r}")
        object.__setattr__(self, "changes", tuple(self.changes))
        for change in self.changes:
            if not isinstance(change, PlannedChange):
                raise TrajectoryGuardError(f"changes must hold PlannedChange objects, got {change!r:.80}")
            if change.step > self.total_steps:
                raise TrajectoryGuardError(
                    f"the change {change.reason!r} begins at step {change.step}, after total_steps = {self.total_steps}"
                )
        if not isinstance(self.metric, str) or not self.metric:
            raise TrajectoryGuardError(f"metric must be a name, got {self.metric!r}")
        if self.flops_convention != "6ND" and self.flops_per_token is None:
            raise TrajectoryGuardError(
                f"flops_convention {self.flops_convention!r} needs flops_per_token; only '6ND' has a default"
            )

    @property
    def batch_phases(self) -> tuple[tuple[int, int], ...]:
        """(first step, tokens per step) of every batch phase; one entry where there is no ramp."""
        if isinstance(self.tokens_per_step, int):
            return ((1, self.tokens_per_step),)
        return self.tokens_per_step

    @property
    def total_tokens(self) -> int:
        """Training tokens of the whole planned run."""
        return int(self.tokens(self.total_steps))

    @property
    def tokens_per_active_param(self) -> float:
        """Planned tokens over active parameters."""
        return self.total_tokens / self.active_params

    @property
    def total_flops(self) -> float:
        """FLOPs of the whole planned run, in `flops_convention`."""
        per_token = 6.0 * self.active_params if self.flops_per_token is None else self.flops_per_token
        return per_token * self.total_tokens

    def tokens(self, step: ArrayLike) -> NDArray[np.float64]:
        """Return the training tokens consumed through each step (any shape); past the horizon as planned."""
        s = np.asarray(step, dtype=np.float64)
        consumed = np.zeros_like(s)
        phases = self.batch_phases
        for (first, size), (following, _) in zip(phases, (*phases[1:], (math.inf, 0)), strict=True):
            consumed += size * np.clip(s - (first - 1), 0.0, following - first)
        return consumed

    def progress(self, step: ArrayLike) -> NDArray[np.float64]:
        """Return tokens(step) / planned tokens, in [0, 1] within the horizon."""
        return self.tokens(step) / self.total_tokens

    def step_at(self, progress: ArrayLike) -> NDArray[np.float64]:
        """Return the (fractional) step where a progress in [0, 1] is reached: the inverse of `progress`."""
        knots = np.array([0.0, *(first - 1.0 for first, _ in self.batch_phases[1:]), float(self.total_steps)])
        return np.interp(np.asarray(progress, dtype=np.float64) * self.total_tokens, self.tokens(knots), knots)

    def identity(self) -> dict[str, Any]:
        """Return every fact that a fit's recipe is compared with, as plain JSON values by field name."""
        horizon = self.total_tokens
        return {
            "metric": self.metric,
            "split": self.split,
            **self.recipe.to_dict(),
            "lr_schedule": self.schedule.to_dict(),
            "warmup": self.schedule.warmup,
            "tokens_per_active_param": self.tokens_per_active_param,
            "flops_convention": self.flops_convention,
            # Relative to the horizon, so that rungs and target of one batch rule agree.
            "batch_schedule": [
                [round(float(self.tokens(first - 1)) / horizon, 3), round(size / self.batch_phases[0][1], 3)]
                for first, size in self.batch_phases
            ],
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        content: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, (LRSchedule, Recipe)):
                value = value.to_dict()
            elif f.name == "tokens_per_step" and isinstance(value, tuple):
                value = [list(phase) for phase in value]
            elif f.name == "changes":
                value = [change.to_dict() for change in value] or None
            if value is not None:
                content[f.name] = value
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "RunPlan":
        """Build a plan from the mapping that `to_dict` returns.

        Raises:
            TrajectoryGuardError: a field is unknown, missing or out of range.
        """
        names = [f.name for f in fields(cls)]
        unknown = sorted(set(content) - set(names))
        missing = [n for n in ("total_steps", "tokens_per_step", "active_params", "schedule") if n not in content]
        if unknown or missing:
            raise TrajectoryGuardError(f"a plan has the fields {names}; unknown here: {unknown}, missing: {missing}")
        values = dict(content)
        for name, build in (("schedule", LRSchedule.from_dict), ("recipe", Recipe.from_dict)):
            if name in values:
                if not isinstance(values[name], Mapping):
                    raise TrajectoryGuardError(f"plan field `{name}` must be an object, got {values[name]!r}")
                values[name] = build(values[name])
        if isinstance(values["tokens_per_step"], list):
            values["tokens_per_step"] = tuple(map(tuple, values["tokens_per_step"]))
        if "changes" in values:
            if not isinstance(values["changes"], (list, tuple)):
                raise TrajectoryGuardError(f"plan field `changes` must be a list, got {values['changes']!r:.80}")
            values["changes"] = tuple(PlannedChange.from_dict(change) for change in values["changes"])
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON (docs/formats.md), atomically."""
        write_json(path, {"format": FORMAT, "version": VERSION, **self.to_dict()})

    @classmethod
    def load(cls, path: str | Path) -> "RunPlan":
        """Read a plan that `save` wrote.

        Raises:
            FileFormatError: the file is missing, damaged, of a newer version, or not a valid plan.
        """
        content = read_json(path, format=FORMAT, version=VERSION)
        try:
            return cls.from_dict({k: v for k, v in content.items() if k not in ("format", "version")})
        except (TrajectoryGuardError, TypeError, ValueError) as error:
            raise FileFormatError(f"{path}: {error}") from error


def _whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNT:
        raise TrajectoryGuardError(f"{name} must be a positive integer up to 2^53, got {value!r}")


def _positive(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not (0 < value < MAX_SIZE):
        raise TrajectoryGuardError(f"{name} must be a positive finite number, got {value!r}")
