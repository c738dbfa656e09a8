"""LRSchedule: the learning rate over its peak, as a function of progress."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trajectory_guard.errors import TrajectoryGuardError

__all__ = ["LRSchedule"]

Shape = Literal["constant", "linear", "cosine", "wsd", "steps", "table"]
DecayShape = Literal["linear", "1-sqrt", "cosine", "exponential"]


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    r"""Learning rate divided by its peak, e(g), along progress g in [0, 1].

    Warm-up is linear from 0 over g in [0, warmup]. After it, with x = (g - warmup) / (1 - warmup):

    * `"constant"`: 1
    * `"linear"`: 1 - (1 - final) x
    * `"cosine"`: final + (1 - final) (1 + cos(pi x)) / 2
    * `"wsd"`: 1 until `decay_start`, then from 1 to `final` along `decay_shape`
    * `"steps"`: each (g, e) of `points` holds from its g on; 1 before the first
    * `"table"`: linear between the (g, e) of `points`, constant outside them; `warmup` only tells where warm-up ends

    Args:
        shape: one of the six names above.
        warmup: end of the linear warm-up, as progress in [0, 1).
        final: e at g = 1, for `"linear"`, `"cosine"` and `"wsd"`.
        decay_start: progress where a `"wsd"` decay begins.
        decay_shape: how a `"wsd"` decay falls: `"linear"`, `"1-sqrt"`, `"cosine"` or `"exponential"`.
        points: (progress, lr / peak) pairs with strictly rising progress, for `"steps"` and `"table"`.

    Raises:
        TrajectoryGuardError: a parameter is out of range, missing, or belongs to another shape.

    Example:
        >>> LRSchedule(shape="linear", warmup=0.1).ratio([0.0, 0.05, 0.1, 0.55, 1.0]).round(2).tolist()
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    shape: Shape
    warmup: float = 0.0
    final: float = 0.0
    decay_start: float | None = None
    decay_shape: DecayShape = "linear"
    points: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.shape not in get_args(Shape):
            raise TrajectoryGuardError(f"schedule shape must be one of {get_args(Shape)}, got {self.shape!r}")
        if self.decay_shape not in get_args(DecayShape):
            raise TrajectoryGuardError(f"decay_shape must be one of {get_args(DecayShape)}, got {self.decay_shape!r}")
        _in_range("warmup", self.warmup, high=1.0, open_high=True)
        _in_range("final", self.final, high=1.0)
        if (self.shape == "wsd") != (self.decay_start is not None):
            raise TrajectoryGuardError(
                f"decay_start belongs to shape 'wsd' and only there; got shape {self.shape!r} "
                f"and decay_start {self.decay_start!r}"
            )
        if self.decay_start is not None:
            _in_range("decay_start", self.decay_start, low=self.warmup, high=1.0, open_high=True)
        if (self.shape in ("steps", "table")) != bool(self.points):
            raise TrajectoryGuardError(
                f"points belong to shapes 'steps' and 'table' and only there; got shape {self.shape!r} "
                f"and {len(self.points)} points"
            )
        if self.points:
            try:
                table = np.asarray(self.points, dtype=np.float64).reshape(len(self.points), 2)
            except (TypeError, ValueError) as error:
                raise TrajectoryGuardError("points must be (progress, lr / peak) pairs of numbers") from error
            if not np.all(np.isfinite(table)) or np.any(np.diff(table[:, 0]) <= 0) or np.any(table < 0):
                raise TrajectoryGuardError(
                    f"points must be finite, >= 0 and of strictly rising progress, got {self.points[:4]!r}..."
                )
            object.__setattr__(self, "points", tuple((float(g), float(e)) for g, e in table))

    def ratio(self, progress: ArrayLike) -> NDArray[np.float64]:
        """Return lr / peak at each progress (any shape); progress outside [0, 1] is clipped to it."""
        g = np.clip(np.asarray(progress, dtype=np.float64), 0.0, 1.0)
        if self.shape == "table":
            at, value = np.transpose(self.points)
            return np.interp(g, at, value)
        after = self._after_warmup(g)
        if self.warmup > 0:
            return np.where(g < self.warmup, g / self.warmup, after)
        return after

    def _after_warmup(self, g: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.shape == "constant":
            return np.ones_like(g)
        if self.shape == "steps":
            at, value = np.transpose(self.points)
            return np.concatenate(([1.0], value))[np.searchsorted(at, g, side="right")]
        start = self.warmup if self.decay_start is None else self.decay_start
        x = np.clip((g - start) / (1.0 - start), 0.0, 1.0)
        shape = self.decay_shape if self.shape == "wsd" else self.shape
        if shape == "exponential":
            # A decay to zero has no exponential form; 1e-3 of the peak is where its tail is cut.
            return max(self.final, 1e-3) ** x
        fall = {"linear": x, "1-sqrt": np.sqrt(x), "cosine": (1.0 - np.cos(np.pi * x)) / 2.0}[shape]
        return 1.0 - (1.0 - self.final) * fall

    def distance(self, other: "LRSchedule") -> float:
        """Return the largest difference of lr / peak between two schedules where both are past warm-up.

        Example:
            >>> LRSchedule(shape="linear").distance(LRSchedule(shape="constant"))
            1.0
        """
        start = max(self.warmup, other.warmup)
        g = np.linspace(start, 1.0, 401)
        return float(np.max(np.abs(self.ratio(g) - other.ratio(g))))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as plain JSON values."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        kept = {f.name: plain[f.name] for f in fields(self) if plain[f.name] != f.default}
        if self.points:
            kept["points"] = [list(pair) for pair in self.points]
        return kept

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "LRSchedule":
        """Build a schedule from the mapping that `to_dict` returns.

        Raises:
            TrajectoryGuardError: an unknown or missing field, or a value out of range.
        """
        unknown = set(content) - {f.name for f in fields(cls)}
        if unknown or "shape" not in content:
            raise TrajectoryGuardError(
                f"a schedule has the fields {[f.name for f in fields(cls)]} and needs `shape`; got {sorted(content)}"
            )
        values = dict(content)
        if "points" in values:
            try:
                values["points"] = tuple(tuple(pair) for pair in values["points"])
            except TypeError as error:
                raise TrajectoryGuardError(
                    f"schedule points must be [progress, lr / peak] pairs, got {values['points']!r:.80}"
                ) from error
        return cls(**values)

    def describe(self) -> str:
        """Say the schedule in words, as errors and reports show it.

        Example:
            >>> LRSchedule(shape="wsd", warmup=0.01, decay_start=0.8).describe()
            'wsd (warmup=0.01, decay_start=0.8)'
        """
        details = ", ".join(
            f"{key}={value}"
            for key, value in asdict(self).items()
            if key not in ("shape", "points") and key in self.to_dict()
        )
        if self.points:
            details = ", ".join(filter(None, [details, f"{len(self.points)} points"]))
        return f"{self.shape} ({details})" if details else self.shape


def _in_range(name: str, value: object, *, low: float = 0.0, high: float, open_high: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (low <= value and (value < high if open_high else value <= high)):  # type: ignore[operator]
        bracket = ")" if open_high else "]"
        raise TrajectoryGuardError(f"schedule {name} must lie in [{low:g}, {high:g}{bracket}, got {value!r}")
