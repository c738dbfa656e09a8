"""Forecast: the loss to expect at every step of one run, with its interval."""

from collections.abc import Mapping
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from trajectory_guard.channel import ChannelCourse
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.files import atomic_write
from trajectory_guard.plan import RunPlan
from trajectory_guard.recipe import RecipeCheck

__all__ = ["Forecast"]


class Forecast:
    """The loss of one planned run at every step, and how far it may be off.

    The forecast is a table over progress, read by linear interpolation in progress. Half-widths are of ln(loss):
    the interval at a level is loss x exp(-+ half-width). Between two given levels the half-width is interpolated in the
    normal quantile of the level, which is exact for a normal error.

    Args:
        plan: the run; it maps steps to progress.
        progress: (m,) strictly rising, within [0, 1]. Before the first entry there is no forecast (NaN).
        loss: (m,) forecast in nats per token.
        half_widths: level in (0, 1) -> (m,) or scalar half-width of ln(loss). At least one level; a promise.
        law: name of the law behind it, for reports.
        check: outcome of the recipe check behind it.
        channels: courses of other scalars along the run, by the names that a guard gets them under.

    Raises:
        TrajectoryGuardError: the table is not rising, not finite, or of unequal lengths.

    Example:
        >>> from trajectory_guard.lr_schedule import LRSchedule
        >>> plan = RunPlan(total_steps=100, tokens_per_step=8, active_params=10, schedule=LRSchedule(shape="linear"))
        >>> forecast = Forecast(plan, progress=[0.1, 1.0], loss=[4.0, 3.1], half_widths={0.8: 0.01, 0.95: 0.02})
        >>> forecast.first_step, round(forecast.loss(55), 6)
        (10, 3.55)
        >>> [round(float(bound), 3) for bound in forecast.interval(55, level=0.95)]
        [3.48, 3.622]
        >>> forecast.loss(9)
        nan
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        progress: ArrayLike,
        loss: ArrayLike,
        half_widths: Mapping[float, ArrayLike],
        law: str = "table",
        check: RecipeCheck | None = None,
        channels: Mapping[str, ChannelCourse] | None = None,
    ) -> None:
        self.plan = plan
        self.law = law
        self.check = check or RecipeCheck()
        self.channels: Mapping[str, ChannelCourse] = dict(channels or {})
        for name, course in self.channels.items():
            if not isinstance(course, ChannelCourse):
                raise TrajectoryGuardError(f"channel {name!r} needs a ChannelCourse, got {type(course).__name__}")
        self._progress = np.asarray(progress, dtype=np.float64)
        self._loss = np.asarray(loss, dtype=np.float64)
        g = self._progress
        if g.ndim != 1 or g.size < 1 or self._loss.shape != g.shape:
            raise TrajectoryGuardError(
                f"progress and loss must be vectors of one length, got shapes {g.shape} and {self._loss.shape}"
            )
        if not np.all(np.isfinite(g)) or np.any(np.diff(g) <= 0) or g[0] < 0 or g[-1] > 1:
            raise TrajectoryGuardError("progress must rise strictly within [0, 1]")
        if not np.all(np.isfinite(self._loss)) or np.any(self._loss <= 0):
            raise TrajectoryGuardError("every forecast loss must be finite and positive")
        if not half_widths:
            raise TrajectoryGuardError("half_widths needs at least one level, such as {0.8: 0.01}")
        self._levels = np.array(sorted(half_widths), dtype=np.float64)
        if self._levels[0] <= 0 or self._levels[-1] >= 1:
            raise TrajectoryGuardError(f"interval levels must lie in (0, 1), got {sorted(half_widths)}")
        rows = [np.broadcast_to(np.asarray(half_widths[v], np.float64), g.shape) for v in sorted(half_widths)]
        self._half_widths = np.stack(rows)
        if not np.all(np.isfinite(self._half_widths)) or np.any(self._half_widths < 0):
            raise TrajectoryGuardError("every half-width must be finite and not negative")
        if np.any(np.diff(self._half_widths, axis=0) < 0):
            raise TrajectoryGuardError("half-widths must not fall from a lower level to a higher one")
        if g[-1] < 1.0:
            raise TrajectoryGuardError(
                f"the forecast ends at progress {g[-1]:g}; it must reach 1, the planned end of the run"
            )

    @property
    def first_step(self) -> int:
        """First step that has a forecast; before it `loss` is NaN."""
        # The tolerance keeps a grid point that lies exactly on a step from being lost to rounding.
        return max(1, int(np.ceil(self.plan.step_at(self._progress[0]) - 1e-9)))

    @property
    def levels(self) -> tuple[float, ...]:
        """Interval levels that the table holds."""
        return tuple(self._levels.tolist())

    @overload
    def loss(self, step: int) -> float: ...
    @overload
    def loss(self, step: ArrayLike) -> NDArray[np.float64] | float: ...
    def loss(self, step: ArrayLike) -> NDArray[np.float64] | float:
        """Return the forecast in nats at each step (scalar or any shape); NaN outside [first_step, total_steps]."""
        return self._read(step, self._loss)

    @overload
    def half_width(self, step: int, level: float = 0.8) -> float: ...
    @overload
    def half_width(self, step: ArrayLike, level: float = 0.8) -> NDArray[np.float64] | float: ...
    def half_width(self, step: ArrayLike, level: float = 0.8) -> NDArray[np.float64] | float:
        """Return the half-width of ln(loss) at each step: about the relative error promised at `level`."""
        return self._read(step, self._half_widths_at(level))

    def interval(
        self, step: ArrayLike, level: float = 0.8
    ) -> tuple[NDArray[np.float64] | float, NDArray[np.float64] | float]:
        """Return (lower, upper) bounds in nats at each step, forecast x exp(-+ half-width).

        Raises:
            TrajectoryGuardError: the level lies outside the levels of the table.
        """
        middle, width = self.loss(step), self.half_width(step, level)
        return middle * np.exp(-width), middle * np.exp(width)

    @property
    def table(self) -> tuple[NDArray[np.float64], NDArray[np.float64], dict[float, NDArray[np.float64]]]:
        """Copies of the table behind the forecast: progress (m,), loss (m,), and half-width (m,) by level."""
        widths = {level: self._half_widths[i].copy() for i, level in enumerate(self.levels)}
        return self._progress.copy(), self._loss.copy(), widths

    def to_csv(self, path: str | Path, *, points: int = 1000) -> None:
        """Write step, tokens, progress, forecast and the interval at each level as CSV, atomically.

        Args:
            path: the file.
            points: at most so many rows, evenly spread over the horizon, the last step included.
        """
        first, last = self.first_step, self.plan.total_steps
        steps = np.unique(np.linspace(first, last, min(points, last - first + 1)).round().astype(np.int64))
        columns = {
            "step": steps,
            "tokens": self.plan.tokens(steps).astype(np.int64),
            "progress": self.plan.progress(steps),
            "loss": self.loss(steps),
        }
        for level in self.levels:
            lower, upper = self.interval(steps, level)
            columns[f"lower_{level:g}"], columns[f"upper_{level:g}"] = lower, upper
        with atomic_write(path) as file:
            file.write(",".join(columns) + "\n")
            for row in zip(*(np.asarray(column).tolist() for column in columns.values()), strict=True):
                file.write(",".join(f"{v:.9g}" if isinstance(v, float) else str(v) for v in row) + "\n")

    def _half_widths_at(self, level: float) -> NDArray[np.float64]:
        levels = self._levels
        if not levels[0] <= level <= levels[-1]:
            raise TrajectoryGuardError(
                f"level {level} lies outside the levels of this forecast, {levels[0]:g} to {levels[-1]:g}"
            )
        exact = np.flatnonzero(levels == level)
        if exact.size:
            return self._half_widths[exact[0]]
        upper = int(np.searchsorted(levels, level))
        low, high, at = ndtri((1.0 + np.array([levels[upper - 1], levels[upper], level])) / 2.0)
        share = (at - low) / (high - low)
        return (1.0 - share) * self._half_widths[upper - 1] + share * self._half_widths[upper]

    def _read(self, step: ArrayLike, values: NDArray[np.float64]) -> NDArray[np.float64] | float:
        s = np.asarray(step, dtype=np.float64)
        read = np.interp(self.plan.progress(s), self._progress, values)
        read = np.where((s >= self.first_step) & (s <= self.plan.total_steps), read, np.nan)
        return float(read) if s.ndim == 0 else read
