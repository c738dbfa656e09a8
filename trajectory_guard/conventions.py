"""The definitions that every room shares: step, tokens, progress, loss, residual; and the unit conversions.

* **step**: number of completed optimizer updates, this one included, so 1-based. The loss at step *s* was measured with
  the weights before update *s*. Frameworks that count from 0 are converted in their adapter.
* **tokens**: training tokens consumed through a step. A batch ramp makes it non-linear in the step.
* **progress**: tokens(step) / planned tokens, in [0, 1]; the axis of every law.
* **loss**: mean cross-entropy in nats per predicted token over all micro-batches and ranks of one optimizer step, in
  fp32, without auxiliary, z- or balance losses, unsmoothed.
* **residual**: loss - forecast, in nats.
* **compute**: FLOPs of the full planned run under a *named* convention. Conventions are never mixed: counting the LM
  head or not moved one published fitted floor from 1.630 to 1.858 and its forecast from 2.056 to 2.100 nats.
"""

import math
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trajectory_guard.errors import TrajectoryGuardError

__all__ = ["FlopsConvention", "LossUnit", "Split", "to_nats"]

LossUnit = Literal["nats", "bits", "perplexity"]
"""Unit of a logged loss: nats per token, bits per token, or exp(nats per token)."""

Split = Literal["train", "validation"]
"""Which data a loss was measured on."""

FlopsConvention = Literal["6ND", "per-token-excluding-lm-head", "per-token-including-lm-head"]
"""How the FLOPs of a run were counted: 6 x active parameters x tokens, or per token without or with the LM head."""


def to_nats(loss: ArrayLike, unit: LossUnit) -> NDArray[np.float64]:
    """Convert a logged loss to nats per token.

    Args:
        loss: losses in `unit`, any shape.
        unit: `"nats"`, `"bits"` (x ln 2) or `"perplexity"` (natural logarithm).

    Returns:
        The same losses in nats, float64, in the shape given.

    Raises:
        TrajectoryGuardError: the unit is not one of the three.

    Example:
        >>> to_nats([1.0, 2.0], "bits").round(4).tolist()
        [0.6931, 1.3863]
    """
    values = np.asarray(loss, dtype=np.float64)
    if unit == "nats":
        return values
    if unit == "bits":
        return values * math.log(2.0)
    if unit == "perplexity":
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(values)
    raise TrajectoryGuardError(f"loss unit must be one of {get_args(LossUnit)}, got {unit!r}")
