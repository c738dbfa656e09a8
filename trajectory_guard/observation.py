"""What a guard takes as one observation: checks that turn user values into plain numbers, or say what to do."""

import math
import operator
from typing import Any

from trajectory_guard.errors import TrajectoryGuardError

__all__ = ["loss_value", "step_value", "tokens_value"]


def step_value(step: Any) -> int:
    """Return a step as a positive int.

    Raises:
        TrajectoryGuardError: not a whole number, or below 1.
    """
    try:
        value = operator.index(step)
    except TypeError:
        item = getattr(step, "item", None)
        value = item() if callable(item) else step
        if not isinstance(value, int):
            raise TrajectoryGuardError(
                f"step must be a whole number, got {step!r:.80}; pass the count of completed optimizer updates"
            ) from None
    if isinstance(step, bool) or value < 1:
        raise TrajectoryGuardError(
            f"step must be at least 1, got {step!r}: it counts completed optimizer updates, this one included; "
            "a loop that counts from 0 passes step + 1"
        )
    return value


def loss_value(loss: Any, what: str = "loss") -> float:
    """Return a loss as a float; NaN and infinities are observations, not errors.

    Args:
        loss: a number, or a tensor or array of one element.
        what: its name in errors.

    Raises:
        TrajectoryGuardError: a string, None, a tensor of several elements, or anything else that is no number.
    """
    if isinstance(loss, (int, float)) and not isinstance(loss, bool):
        return _float(loss, what)
    shape = getattr(loss, "shape", ())
    item = getattr(loss, "item", None)
    if not callable(item):
        raise TrajectoryGuardError(
            f"{what} must be a number, or a tensor of one element, got {type(loss).__name__} {loss!r:.60}; pass a float"
        )
    if math.prod(shape) != 1:
        raise TrajectoryGuardError(
            f"{what} must be one number per optimizer step, got shape {tuple(shape)}; pass its mean, {what}.mean()"
        )
    value = item()
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TrajectoryGuardError(f"{what} must be a real number, got {value!r:.60}")
    return _float(value, what)


def tokens_value(tokens: Any) -> float:
    """Return the tokens averaged in one loss as a positive float.

    Raises:
        TrajectoryGuardError: not a positive finite number.
    """
    value = loss_value(tokens, "tokens")
    if not 0.0 < value < math.inf:
        raise TrajectoryGuardError(
            f"tokens must be a positive number, got {tokens!r}: the predicted tokens averaged in this loss; "
            "leave it out where it is not known"
        )
    return value


def _float(value: float, what: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise TrajectoryGuardError(f"{what} is an integer beyond float64's range; pass a float") from None
