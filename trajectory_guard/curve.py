"""LossCurve: one run's loss along training, as arrays."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.errors import TrajectoryGuardError

__all__ = ["LossCurve"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LossCurve:
    """The losses of one finished or running run, one point per logged step.

    Any array_like is taken and kept as a read-only array.

    Args:
        step: (n,) completed optimizer updates, integers, strictly rising, at least 0.
        tokens: (n,) training tokens consumed through each step, strictly rising.
        loss: (n,) loss in nats per token, finite and positive.
        lr: (n,) learning rate at each step, or None where it is not logged.
        tokens_per_point: tokens averaged in each loss, scalar or (n,); None where it is not known. It sets the noise.

    Raises:
        TrajectoryGuardError: lengths differ, the axis does not rise, or a value is not finite.

    Example:
        >>> curve = LossCurve(step=[1, 2, 4], tokens=[10, 20, 40], loss=[3.0, 2.9, 2.5])
        >>> len(curve), curve.loss.dtype.name
        (3, 'float64')
    """

    step: NDArray[np.int64]
    tokens: NDArray[np.float64]
    loss: NDArray[np.float64]
    lr: NDArray[np.float64] | None = None
    tokens_per_point: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        step = np.asarray(self.step)
        if step.ndim != 1 or step.size == 0:
            raise TrajectoryGuardError(f"step must be a non-empty vector, got shape {step.shape}")
        for name in ("step", "tokens", "loss", "lr", "tokens_per_point"):
            given = getattr(self, name)
            if given is None:
                continue
            try:
                values = np.asarray(given, dtype=np.float64)
            except (TypeError, ValueError) as error:
                raise TrajectoryGuardError(f"{name} must hold numbers, got {given!r:.80}") from error
            if name == "tokens_per_point":
                values = np.broadcast_to(values, step.shape) if values.ndim == 0 else values
            if values.shape != step.shape:
                raise TrajectoryGuardError(f"{name} has shape {values.shape}, expected {step.shape} as step has")
            bad = np.flatnonzero(~np.isfinite(values))
            if bad.size:
                raise TrajectoryGuardError(
                    f"{name} holds {bad.size} values that are not finite, first {values[bad[0]]} at index {bad[0]}; "
                    "drop these points before building a LossCurve"
                )
            if name == "step" and (np.any(values != np.floor(values)) or np.any(values < 0)):
                raise TrajectoryGuardError(
                    f"step must hold whole numbers of updates >= 0, got {values.tolist()[:5]}..."
                )
            values = np.array(values, dtype=np.int64 if name == "step" else np.float64)
            values.flags.writeable = False
            object.__setattr__(self, name, values)
        for name in ("step", "tokens"):
            falls = np.flatnonzero(np.diff(getattr(self, name)) <= 0)
            if falls.size:
                raise TrajectoryGuardError(
                    f"{name} must rise strictly, but does not after index {falls[0]}; stitch restarts and drop "
                    "duplicates before building a LossCurve"
                )
        if np.any(self.loss <= 0):
            raise TrajectoryGuardError(f"loss must be positive nats per token, smallest is {self.loss.min()}")

    def __len__(self) -> int:
        return len(self.step)
