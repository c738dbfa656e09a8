"""Recipe: what a forecast is valid for, and the check that a plan trains by the same one.

A forecast holds for one recipe. Fit and plan are compared field by field with three outcomes: an *error* makes the
comparison meaningless, a *warning* may move the loss, an *unknown* field is named once and the run goes on.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from trajectory_guard.errors import RecipeMismatchError, TrajectoryGuardError
from trajectory_guard.lr_schedule import LRSchedule

__all__ = ["Recipe", "RecipeCheck", "check_recipe"]

Outcome = Literal["error", "warning"]

MAX_COUNT = 2**53
"""Largest count in a recipe: what float64 holds exactly."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The part of a training recipe that no number of the plan tells; None means not stated.

    Args:
        loss_definition: what the loss averages, such as `"mean cross-entropy, no auxiliary loss"`.
        tokenizer: name and version of the tokenizer; losses per token of different tokenizers cannot be compared.
        vocab_size: number of token types.
        sequence_length: tokens in one training sequence.
        data: name of the data mixture.
        data_phases: progress values in (0, 1) where the mixture changes.
        data_fingerprint: hash of the training data.
        optimizer: name of the optimizer and its scaling rule for the peak learning rate.
        optimizer_constants: betas, weight decay, clipping and the like, by name.
        software: versions of interpreter and libraries, by name.

    Example:
        >>> Recipe(tokenizer="byte", vocab_size=256).to_dict()
        {'tokenizer': 'byte', 'vocab_size': 256}
    """

    loss_definition: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    sequence_length: int | None = None
    data: str | None = None
    data_phases: tuple[float, ...] | None = None
    data_fingerprint: str | None = None
    optimizer: str | None = None
    optimizer_constants: Mapping[str, float | str] | None = None
    software: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name, least in (("vocab_size", 2), ("sequence_length", 1)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and least <= value <= MAX_COUNT):
                raise TrajectoryGuardError(
                    f"recipe field `{name}` must be an integer from {least} to 2^53, got {value!r:.80}"
                )
        if self.data_phases is not None:
            phases = list(self.data_phases)
            inside = all(isinstance(g, (int, float)) and 0 < g < 1 for g in phases)
            if not inside or any(b <= a for a, b in itertools.pairwise(phases)):
                raise TrajectoryGuardError(f"recipe field `data_phases` must rise within (0, 1), got {phases!r:.80}")

    def to_dict(self) -> dict[str, Any]:
        """Return the stated fields as plain JSON values."""
        stated = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if "data_phases" in stated:
            stated["data_phases"] = list(stated["data_phases"])
        for name in ("optimizer_constants", "software"):
            if name in stated:
                stated[name] = dict(stated[name])
        return stated

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Recipe":
        """Build a recipe from the mapping that `to_dict` returns.

        Raises:
            TrajectoryGuardError: an unknown field, or a value of the wrong type.
        """
        unknown = sorted(set(content) - {f.name for f in fields(cls)})
        if unknown:
            raise TrajectoryGuardError(f"unknown recipe fields {unknown}; a recipe has {[f.name for f in fields(cls)]}")
        for name, value in content.items():
            if not isinstance(value, _TYPES[name]) or isinstance(value, bool):
                raise TrajectoryGuardError(f"recipe field `{name}` has the wrong type: {value!r}")
        values = dict(content)
        if "data_phases" in values:
            values["data_phases"] = tuple(values["data_phases"])
        return cls(**values)


_TYPES: dict[str, type | tuple[type, ...]] = {
    "loss_definition": str,
    "tokenizer": str,
    "vocab_size": int,
    "sequence_length": int,
    "data": str,
    "data_phases": (list, tuple),
    "data_fingerprint": str,
    "optimizer": str,
    "optimizer_constants": Mapping,
    "software": Mapping,
}


@dataclass(frozen=True, kw_only=True)
class RecipeCheck:
    """Outcome of comparing a fit's identity with a plan's: sentences by severity.

    Args:
        errors: differences that make the comparison meaningless.
        warnings: differences that may move the loss.
        unknown: names of fields that one side does not state.
        overridden: the errors were accepted by an explicit override.
    """

    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    overridden: bool = False

    def message(self) -> str:
        """Return every outcome as one text, with both values and what to do."""
        lines = [f"error: {text}" for text in self.errors] + [f"warning: {text}" for text in self.warnings]
        if self.unknown:
            lines.append(f"unknown, not compared: {', '.join(self.unknown)}")
        if self.errors:
            lines.append(
                "The errors were overridden."
                if self.overridden
                else "Refit on a ladder of this recipe, correct the plan, or pass override_recipe=True to accept it."
            )
        return "\n".join(lines) or "the recipes agree"


def _equal(fit: Any, plan: Any) -> bool:
    return fit == plan


def _same_schedule(fit: Any, plan: Any) -> bool:
    # 2 % of the peak: below the rounding of schedules that are logged per step, far below any change of shape.
    return LRSchedule.from_dict(fit).distance(LRSchedule.from_dict(plan)) <= 0.02


def _within_tenth(fit: Any, plan: Any) -> bool:
    return abs(math.log(plan / fit)) <= math.log(1.1)


def _same_phases(fit: Any, plan: Any) -> bool:
    return len(fit) == len(plan) and all(abs(a - b) <= 0.01 for a, b in zip(fit, plan, strict=True))


_FIELDS: dict[str, tuple[Outcome, Callable[[Any, Any], bool]]] = {
    "metric": ("error", _equal),
    "split": ("error", _equal),
    "loss_definition": ("error", _equal),
    "tokenizer": ("error", _equal),
    "vocab_size": ("error", _equal),
    "sequence_length": ("error", _equal),
    "lr_schedule": ("error", _same_schedule),
    "tokens_per_active_param": ("error", _within_tenth),
    "data_phases": ("error", _same_phases),
    "flops_convention": ("error", _equal),
    "warmup": ("warning", lambda fit, plan: abs(fit - plan) <= 0.25 * max(fit, plan)),
    "data": ("warning", _equal),
    "data_fingerprint": ("warning", _equal),
    "optimizer": ("warning", _equal),
    "optimizer_constants": ("warning", _equal),
    "software": ("warning", _equal),
    "batch_schedule": ("warning", _equal),
}
"""Each compared field with what a difference means and how equality is judged."""


def check_recipe(fit: Mapping[str, Any], plan: Mapping[str, Any], *, override: bool = False) -> RecipeCheck:
    """Compare the identity recorded in a fit with the identity of a plan, field by field.

    Args:
        fit: identity of the ladder, as `DelphiFit.recipe` holds it. A field the law does not need is left out there.
        plan: identity of the run, from `RunPlan.identity()`.
        override: accept errors; they stay in the result and are written into every event and report.

    Returns:
        The outcome. `unknown` lists the fields that only one of the two states.

    Raises:
        RecipeMismatchError: an error and no override; its message lists *all* outcomes, not only the first.

    Example:
        >>> check_recipe({"tokenizer": "byte", "data": "a"}, {"tokenizer": "byte", "data": "b"}).warnings
        ("data: fit 'a', plan 'b'",)
    """
    found: dict[Outcome, list[str]] = {"error": [], "warning": []}
    unknown = []
    for name, (outcome, same) in _FIELDS.items():
        if name not in fit and name not in plan:
            continue
        if name not in fit or name not in plan:
            unknown.append(name)
            continue
        try:
            agree = same(fit[name], plan[name])
        except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
            raise TrajectoryGuardError(
                f"identity field `{name}` is damaged: fit {fit[name]!r:.80}, plan {plan[name]!r:.80}"
            ) from error
        if not agree:
            found[outcome].append(f"{name}: fit {_show(fit[name])}, plan {_show(plan[name])}")
    check = RecipeCheck(
        errors=tuple(found["error"]),
        warnings=tuple(found["warning"]),
        unknown=tuple(unknown),
        overridden=override and bool(found["error"]),
    )
    if check.errors and not override:
        raise RecipeMismatchError("the forecast is not for this run:\n" + check.message())
    return check


def _show(value: Any) -> str:
    if isinstance(value, Mapping) and "shape" in value:
        return LRSchedule.from_dict(value).describe()
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
