"""Channels: another scalar of a finished run, and the course that it should take along a planned one."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.errors import TrajectoryGuardError

__all__ = ["MAX_CHANNELS", "ChannelCourse", "ChannelSeries"]

MAX_CHANNELS = 1000
"""Most channels carried by a ladder: four rungs of so many make a fit of some 10 MB."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChannelSeries:
    """One channel of one finished run, such as its gradient norm, at the steps where it was logged.

    Args:
        step: (n,) completed optimizer updates, rising.
        value: (n,) the scalar, finite; it may be zero or negative.

    Raises:
        TrajectoryGuardError: lengths differ, the steps do not rise, or a value is not finite.

    Example:
        >>> ChannelSeries(step=[1, 2], value=[0.5, -0.25]).value.tolist()
        [0.5, -0.25]
    """

    step: NDArray[np.float64]
    value: NDArray[np.float64]

    def __post_init__(self) -> None:
        _keep_table(self, "step", "value")


@dataclass(frozen=True, kw_only=True, eq=False)
class ChannelCourse:
    """What a channel should be along a planned run, and how well its course is known.

    Args:
        progress: (m,) strictly rising, within [0, 1]. Before the first entry nothing is expected (NaN); after the last
            one its value holds on.
        value: (m,) the scalar to expect; all positive if `logarithmic`.
        logarithmic: the channel is compared by its logarithm, as fits a positive one, else by difference.
        error: typical error of the course once the run's own level is known: of ln(value) if `logarithmic`, else in
            units of the channel. NaN where it is not known.

    Raises:
        TrajectoryGuardError: the table is not rising, not finite, of unequal lengths, or not positive where it must be.

    Example:
        >>> course = ChannelCourse(progress=[0.1, 1.0], value=[2.0, 1.0])
        >>> course.at(np.array([0.05, 0.55, 1.2])).tolist()
        [nan, 1.5, 1.0]
    """

    progress: NDArray[np.float64]
    value: NDArray[np.float64]
    logarithmic: bool = True
    error: float = float("nan")

    def __post_init__(self) -> None:
        _keep_table(self, "progress", "value")
        if self.progress[0] < 0.0 or self.progress[-1] > 1.0:
            raise TrajectoryGuardError("the progress of a channel's course must lie within [0, 1]")
        if self.logarithmic and np.any(self.value <= 0.0):
            raise TrajectoryGuardError("a logarithmic course must be positive; give logarithmic=False")
        if self.error < 0.0 or self.error == np.inf:
            raise TrajectoryGuardError(f"the error of a channel's course must not be negative, got {self.error}")

    def at(self, progress: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the value to expect at each progress; NaN before the course begins."""
        return np.interp(progress, self.progress, self.value, left=np.nan)


def _keep_table(owner: object, axis: str, name: str) -> None:
    """Replace the columns `axis` and `name` of a frozen dataclass by read-only float arrays, checked."""
    for each in (axis, name):
        try:
            values = np.array(getattr(owner, each), dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise TrajectoryGuardError(f"{each} of a channel must hold numbers") from error
        if values.ndim != 1 or values.size == 0 or not np.all(np.isfinite(values)):
            raise TrajectoryGuardError(f"{each} of a channel must be a non-empty vector of finite numbers")
        values.flags.writeable = False
        object.__setattr__(owner, each, values)
    x, y = getattr(owner, axis), getattr(owner, name)
    if x.shape != y.shape or np.any(np.diff(x) <= 0.0):
        raise TrajectoryGuardError(f"{axis} of a channel must rise strictly, with one {name} each")
