"""What laws ask of a ladder and of stored parameters, with the errors that say so."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import RUNG_FIELDS, Ladder, differs
from trajectory_guard.recipe import check_recipe

__all__ = ["read_array", "require_agreement", "require_fields"]


def require_agreement(ladder: Ladder, law: str, varies: Collection[str]) -> None:
    """Refuse a ladder whose rungs differ in an identity field that `law` needs to be equal.

    Differences that only warn (warm-up, batch schedule) pass; the field is then not part of the fit's recipe.

    Raises:
        TrajectoryGuardError: names the two rungs, the fields and their values.
    """
    first = ladder.rungs[0]
    wanted = first.plan.identity()
    for rung in ladder.rungs[1:]:
        found = rung.plan.identity()
        fields = [name for name in wanted if name in RUNG_FIELDS and name not in varies]
        unequal = [name for name in fields if name in found and differs(name, wanted[name], found)]
        check = check_recipe(
            {name: wanted[name] for name in unequal}, {name: found[name] for name in unequal}, override=True
        )
        if check.errors:
            raise TrajectoryGuardError(
                f"law {law!r} needs rungs that agree in these fields; rung {first.name!r} (fit) and {rung.name!r} "
                f"(plan) do not: {'; '.join(check.errors)}. Use a law that models them, such as 'schedule-aware', "
                "or leave one of the rungs out"
            )


def require_fields(params: Mapping[str, Any], names: Collection[str], law: str) -> None:
    """Refuse parameters that are not exactly the named ones.

    Raises:
        TrajectoryGuardError: lists what is missing and what is unknown.
    """
    missing, unknown = sorted(set(names) - set(params)), sorted(set(params) - set(names))
    if missing or unknown:
        raise TrajectoryGuardError(f"params of law {law!r}: missing {missing}, unknown {unknown}")


def read_array(params: Mapping[str, Any], name: str, law: str, shape: tuple[int | None, ...]) -> NDArray[np.float64]:
    """Return one parameter as a float64 array of a shape; None in `shape` is any length of at least one.

    Raises:
        TrajectoryGuardError: not numbers, not finite, or of another shape.
    """
    try:
        values = np.array(params[name], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TrajectoryGuardError(f"params of law {law!r}: `{name}` must hold numbers of one shape") from error
    fits = values.ndim == len(shape) and all(
        got == want or (want is None and got > 0) for got, want in zip(values.shape, shape, strict=True)
    )
    if not fits or not np.all(np.isfinite(values)):
        raise TrajectoryGuardError(
            f"params of law {law!r}: `{name}` must be finite numbers of shape {shape}, got shape {values.shape}"
        )
    return values
