"""Channel law: the course of another scalar along training, from the smoothed curves of a ladder's rungs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.channel import ChannelCourse, ChannelSeries
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.laws.smooth import FIRST_PROGRESS, PROGRESS_GRID, kinks, local_quadratic

__all__ = ["ChannelLaw", "ChannelPoints", "fit_channel", "smooth_channel"]

MAX_POINTS = 200
"""Points of one rung that a fit may hold; `fit_channel` makes at most one per value of `PROGRESS_GRID`."""

GROUPS = 4000
"""A longer series is taken as the medians of so many groups of neighbours: the narrowest window still holds 80."""

REWEIGHTED = 4
"""Rounds of robust reweighting: after three, a tenth of outliers no longer shows in the curve."""

LEAST_TRUST = 0.01
"""Points that weigh less are left out: a window of nothing else would have no curve."""

TREND_PREFERRED = 1.1
"""The trend over sizes is used only if the nearest rung's curve errs by over a tenth more."""

LEAST_SPREAD = 0.1
"""Sizes whose ln(FLOPs) differ by less tell no trend."""

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ChannelPoints:
    """A channel along one rung, smoothed.

    Args:
        name: the rung's name.
        flops: FLOPs of its full plan.
        progress: (n,) rising, within [0, 1].
        value: (n,) the channel there, in its own units.
    """

    name: str
    flops: float
    progress: tuple[float, ...]
    value: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ChannelLaw:
    """The course of one channel, at equal progress, by the size of the run.

    With y = ln(value) where every rung is positive and y = value where not, C the FLOPs of the plan, C_n those of the
    rung whose ln C is nearest to it, and slope(g) of the least-squares line of y on ln C over the rungs:

        nearest:  y(g) = y_n(g)
        trend:    y(g) = y_n(g) + slope(g) (ln C - ln C_n)

    Both forecast each rung from the others. What is compared is the bend: the rms of actual - forecast about its
    median, for a run's own level is learnt by the guard.

    Args:
        logarithmic: y is the logarithm.
        points: the rungs, by FLOPs.
        error_nearest: leave-one-rung-out error of `nearest`, of y; None where a ladder has one rung.
        error_trend: the same of `trend`; None where it cannot be told.

    Raises:
        TrajectoryGuardError: no rung, or numbers that no channel has.
    """

    logarithmic: bool
    points: tuple[ChannelPoints, ...]
    error_nearest: float | None
    error_trend: float | None

    def __post_init__(self) -> None:
        if not self.points:
            raise TrajectoryGuardError("a channel needs the points of at least one rung")
        for each in self.points:
            if len(each.progress) > MAX_POINTS:
                raise TrajectoryGuardError(f"rung {each.name!r}: more than {MAX_POINTS} points")
            if not 0.0 < each.flops < math.inf:
                raise TrajectoryGuardError(f"rung {each.name!r}: flops must be positive and finite, got {each.flops}")
            try:
                ChannelCourse(progress=each.progress, value=each.value, logarithmic=self.logarithmic)  # type: ignore[arg-type]
            except TrajectoryGuardError as error:
                raise TrajectoryGuardError(f"rung {each.name!r}: {error}") from error
        for error in (self.error_nearest, self.error_trend):
            if error is not None and not 0.0 <= error < math.inf:
                raise TrajectoryGuardError(f"a leave-one-rung-out error must be finite and not negative, got {error}")

    @property
    def rule(self) -> str:
        """`"nearest"` or `"trend"`, whichever the back-test prefers."""
        nearest, trend = self.error_nearest, self.error_trend
        better = nearest is not None and trend is not None and TREND_PREFERRED * trend < nearest
        return "trend" if better else "nearest"

    @property
    def error(self) -> float:
        """Leave-one-rung-out error of the rule used; NaN where it is not known."""
        error = self.error_trend if self.rule == "trend" else self.error_nearest
        return math.nan if error is None else error

    def course(self, flops: float) -> ChannelCourse:
        """Return what the channel should be along a run of so many planned FLOPs.

        Raises:
            TrajectoryGuardError: the trend leaves what a float holds.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            curves = self._scaled()
            progress, y = _predict(curves, math.log(flops), self.rule)
            value = np.exp(y) if self.logarithmic else y
        return ChannelCourse(progress=progress, value=value, logarithmic=self.logarithmic, error=self.error)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {
            "logarithmic": self.logarithmic,
            "error_nearest": self.error_nearest,
            "error_trend": self.error_trend,
            "rungs": [
                {"name": p.name, "flops": p.flops, "progress": list(p.progress), "value": list(p.value)}
                for p in self.points
            ],
        }

    @classmethod
    def from_dict(cls, content: object) -> "ChannelLaw":
        """Rebuild from `to_dict`.

        Raises:
            TrajectoryGuardError: a field is missing, unknown, of the wrong type or out of range.
        """
        names = ["error_nearest", "error_trend", "logarithmic", "rungs"]
        if not isinstance(content, Mapping) or sorted(content) != names:
            raise TrajectoryGuardError(f"a channel has the fields {names}, got {content!r:.200}")
        if not isinstance(content["logarithmic"], bool) or not isinstance(content["rungs"], list):
            raise TrajectoryGuardError("a channel needs `logarithmic`, true or false, and a list of `rungs`")
        errors = {name: content[name] if content[name] is None else _number(name, content[name]) for name in names[:2]}
        points = tuple(_points_from(rung) for rung in content["rungs"])
        return cls(logarithmic=content["logarithmic"], points=points, **errors)

    def _scaled(self) -> list[tuple[float, Array, Array]]:
        """ln C, progress and y of every rung."""
        scale = np.log if self.logarithmic else np.asarray
        return [(math.log(p.flops), np.array(p.progress), scale(np.array(p.value))) for p in self.points]


def fit_channel(ladder: Ladder, name: str) -> ChannelLaw:
    """Smooth one channel of every rung and measure how well the others tell the course of each.

    Args:
        ladder: the rungs.
        name: a channel that they carry.

    Raises:
        TrajectoryGuardError: a rung holds too few values for a curve.
    """
    positive = all(
        np.all(series.value[rung.plan.progress(series.step) >= FIRST_PROGRESS] > 0.0)
        for rung in ladder.rungs
        for series in rung.channels[name]
    )
    points = []
    for rung in ladder.rungs:
        progress, y = smooth_channel(rung, name, logarithmic=positive)
        value = np.exp(y) if positive else y
        # Seven digits are far below any noise and keep the file small.
        columns = [tuple(float(f"{v:.7g}") for v in column) for column in (progress, value)]
        points.append(ChannelPoints(name=rung.name, flops=rung.plan.total_flops, progress=columns[0], value=columns[1]))
    law = ChannelLaw(logarithmic=positive, points=tuple(points), error_nearest=None, error_trend=None)
    curves = law._scaled()
    return ChannelLaw(
        logarithmic=positive,
        points=law.points,
        error_nearest=_left_out(curves, "nearest"),
        error_trend=_left_out(curves, "trend"),
    )


def smooth_channel(rung: Rung, name: str, *, logarithmic: bool) -> tuple[Array, Array]:
    """Return a channel of a rung along `PROGRESS_GRID`, robustly smoothed, its seeds averaged.

    Local least squares (`smooth.local_quadratic`) with bisquare reweighting [1]: after each round a point weighs
    (1 - (r / 6 s)^2)^2, with r its distance from the curve and s the median |r|, so that spikes do not bend the curve.

    Args:
        rung: the rung.
        name: the channel.
        logarithmic: smooth ln(value); values that are not positive are left out.

    Returns:
        (m,) progress and (m,) smoothed ln(value) or value.

    Raises:
        TrajectoryGuardError: no window holds enough values.

    Reference:
        [1] Cleveland (1979), Robust locally weighted regression and smoothing scatterplots, doi:10.2307/2286407.
    """
    curves = [_one_series(series, rung, logarithmic) for series in rung.channels[name]]
    longest = max(curves, key=lambda curve: np.count_nonzero(np.isfinite(curve)))
    total, count, offsets = np.zeros(len(PROGRESS_GRID)), np.zeros(len(PROGRESS_GRID)), []
    for curve in curves:
        known = np.isfinite(curve - longest)
        if known.any():
            # Each on the level of the longest, or the end of a shorter one would bend the mean.
            offsets.append(float(np.mean((curve - longest)[known])))
            total[known] += curve[known] - offsets[-1]
            count += known
    if not count.any():
        most = max(len(series.value) for series in rung.channels[name])
        raise TrajectoryGuardError(
            f"rung {rung.name!r}: channel {name!r} has {most} usable values, too few for a curve; log it as often as "
            "the loss, or leave it out of `channels`"
        )
    keep = count > 0
    return PROGRESS_GRID[keep], total[keep] / count[keep] + np.mean(offsets)


def _one_series(series: ChannelSeries, rung: Rung, logarithmic: bool) -> Array:
    progress, y = rung.plan.progress(series.step), series.value
    usable = (progress > 0.0) & (progress <= 1.0 + 1e-6) & ((y > 0.0) | (not logarithmic))
    progress, y = progress[usable], np.log(y[usable]) if logarithmic else y[usable]
    if len(y) == 0:
        return np.full(len(PROGRESS_GRID), np.nan)
    size = -(-len(y) // GROUPS)
    if size > 1:
        whole = len(y) // size * size
        progress = progress[:whole].reshape(-1, size).mean(axis=1)
        y = np.median(y[:whole].reshape(-1, size), axis=1)
    trust, curve = np.ones(len(y)), np.full(len(PROGRESS_GRID), np.nan)
    reached = progress[-1] + 1.0 / len(y) >= PROGRESS_GRID
    for _ in range(REWEIGHTED):
        curve[reached], _ = local_quadratic(progress, y, PROGRESS_GRID[reached], breaks=kinks(rung.plan), trust=trust)
        known = np.isfinite(curve)
        if not known.any():
            break
        distance = np.abs(y - np.interp(progress, PROGRESS_GRID[known], curve[known]))
        scale = max(6.0 * float(np.median(distance)), 1e-9 * float(np.abs(y).max()), 1e-300)
        trust = (1.0 - np.minimum(distance / scale, 1.0) ** 2) ** 2
        trust[trust < LEAST_TRUST] = 0.0
    return curve


def _predict(curves: Sequence[tuple[float, Array, Array]], log_flops: float, rule: str) -> tuple[Array, Array]:
    """Progress and y of the nearest rung (of two equally near the larger), moved along the trend by that rule."""
    near, progress, y = min(reversed(curves), key=lambda curve: abs(curve[0] - log_flops))
    if rule == "nearest":
        return progress, y
    sizes = np.array([size for size, _, _ in curves])
    read = np.array([np.interp(progress, g, v, left=np.nan, right=np.nan) for _, g, v in curves])
    known = np.isfinite(read)
    count = known.sum(axis=0)
    x = np.where(known, sizes[:, None] - near, 0.0)
    mean = x.sum(axis=0) / count
    x = np.where(known, x - mean, 0.0)
    spread = np.sum(x * x, axis=0)
    told = (count >= 2) & (spread > 0.5 * LEAST_SPREAD**2)
    if not told.any():
        return progress, y
    slope = np.sum(x * np.where(known, read, 0.0), axis=0)[told] / spread[told]
    return progress, y + np.interp(progress, progress[told], slope) * (log_flops - near)


def _left_out(curves: Sequence[tuple[float, Array, Array]], rule: str) -> float | None:
    """Root mean square over held-out rungs of the error of their bend; None where the rest cannot tell it."""
    if len(curves) < (2 if rule == "nearest" else 3):
        return None
    squares = []
    for out, (log_flops, progress, y) in enumerate(curves):
        rest = [curve for index, curve in enumerate(curves) if index != out]
        if rule == "trend" and np.ptp([size for size, _, _ in rest]) < LEAST_SPREAD:
            return None
        at, predicted = _predict(rest, log_flops, rule)
        error = y - np.interp(progress, at, predicted, left=np.nan)
        error = error[np.isfinite(error)]
        if error.size:
            squares.append(float(np.mean((error - np.median(error)) ** 2)))
    return float(f"{math.sqrt(math.fsum(squares) / len(squares)):.7g}") if squares else None


def _points_from(content: object) -> ChannelPoints:
    names = ["flops", "name", "progress", "value"]
    if not isinstance(content, Mapping) or sorted(content) != names or not isinstance(content["name"], str):
        raise TrajectoryGuardError(f"a rung of a channel has the fields {names}, got {content!r:.200}")
    columns = {}
    for name in names[2:]:
        values = content[name]
        if not isinstance(values, list):
            raise TrajectoryGuardError(f"rung {content['name']!r}: {name} must be a list of numbers")
        columns[name] = tuple(_number(name, value) for value in values)
    return ChannelPoints(name=content["name"], flops=_number("flops", content["flops"]), **columns)


def _number(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TrajectoryGuardError(f"{name} must hold numbers, got {value!r:.80}")
    return float(value)
