"""The static picture of a run against its forecast: loss, residual and change statistic over the whole horizon."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.detect.events import Event, Severity
from trajectory_guard.errors import MissingExtraError, TrajectoryGuardError
from trajectory_guard.forecast import Forecast

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["RunRecord", "draw_run", "save_picture"]

# Okabe and Ito's palette: told apart with every common kind of colour blindness, and by lightness in print.
BLUE, ORANGE, VERMILLION, GREY = "#0072B2", "#E69F00", "#D55E00", "#6E6E6E"

POINTS = 800
"""Points of the forecast and of the band of single steps: about one per pixel of the picture, however long the run."""
MEANS, LEAST_MEANS = 200, 20
"""Stretches of the horizon whose means are drawn as the observed line: few enough that noise does not hide the trend. A
run that has just begun is drawn in 20."""
LEAST_RANGE = 8
"""Steps whose range is one point of the band of single steps: of fewer there would be no band to see."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunRecord:
    """What was observed of one run, as arrays.

    Args:
        step: (n,) steps judged, rising.
        loss: (n,) losses in nats; values that are not finite are left out of the picture.
        statistic: (n,) change statistic at each step, or None.
        threshold: (n,) its threshold, or None.
        events: what the guard flagged.
    """

    step: NDArray[np.int64]
    loss: NDArray[np.float64]
    statistic: NDArray[np.float64] | None = None
    threshold: NDArray[np.float64] | None = None
    events: Sequence[Event] = ()


def draw_run(forecast: Forecast, record: RunRecord, *, title: str = "", averaged: bool = False) -> "Figure":
    """Draw loss against forecast and interval, residual in percent, and the change statistic under its threshold.

    The observed loss is drawn as means over stretches of half a percent of the horizon, with the range of single steps
    as a pale band behind them.

    Args:
        forecast: what was expected, with 80 and 95 % intervals when the forecast holds these levels.
        record: what was observed.
        title: heading of the picture.
        averaged: the record holds means already and is drawn as it is.

    Returns:
        A matplotlib figure of 10 x 8 inches.

    Raises:
        MissingExtraError: matplotlib is not installed.
        TrajectoryGuardError: no loss of the record is finite.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", "report") from error

    finite = np.isfinite(record.loss)
    if not np.any(finite):
        raise TrajectoryGuardError("nothing to draw: the run has no finite loss")
    step, loss = record.step[finite], record.loss[finite]
    panels = 2 if record.statistic is None else 3
    figure = Figure(figsize=(10, 8), layout="constrained")
    axes: list[Axes] = list(figure.subplots(panels, 1, sharex=True, gridspec_kw={"height_ratios": [3, 2, 1][:panels]}))
    if title:
        figure.suptitle(title)
    _mark_events(axes, record.events)
    means = max(LEAST_MEANS, round(MEANS * min(1.0, step[-1] / forecast.plan.total_steps)))
    means = len(step) if averaged else means
    _draw_loss(axes[0], forecast, step, loss, means)
    _draw_residual(axes[1], forecast, step, loss, means)
    if record.statistic is not None:
        _draw_statistic(axes[2], record)
    for axis in axes:
        axis.grid(True, color="#E5E5E5", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_xlim(0, forecast.plan.total_steps)
    axes[-1].set_xlabel("step (optimizer updates)")
    figure.align_ylabels(axes)
    return figure


def save_picture(figure: "Figure", path: str | Path) -> None:
    """Write a figure as PNG or SVG, by the ending of `path`.

    Raises:
        TrajectoryGuardError: the ending is neither.
    """
    ending = Path(path).suffix.lower()
    if ending not in (".png", ".svg"):
        raise TrajectoryGuardError(f"a picture is written as .png or .svg, got {path}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format=ending[1:])


def _grid(forecast: Forecast) -> NDArray[np.float64]:
    return np.unique(np.linspace(forecast.first_step, forecast.plan.total_steps, POINTS).round())


def _levels(forecast: Forecast) -> list[float]:
    return [level for level in (0.95, 0.8) if forecast.levels[0] <= level <= forecast.levels[-1]]


def _draw_loss(
    axis: "Axes", forecast: Forecast, step: NDArray[np.int64], loss: NDArray[np.float64], means: int
) -> None:
    grid = _grid(forecast)
    for level, alpha in zip(_levels(forecast), (0.15, 0.25), strict=False):
        lower, upper = forecast.interval(grid, level)
        axis.fill_between(grid, lower, upper, color=BLUE, alpha=alpha, linewidth=0, label=f"{level:.0%} interval")
    axis.plot(grid, forecast.loss(grid), color=BLUE, linewidth=1.5, linestyle="--", label="forecast")
    at, _, low, high = _stretches(step, loss, min(POINTS, max(means, len(step) // LEAST_RANGE)))
    axis.fill_between(at, low, high, color=ORANGE, alpha=0.25, linewidth=0, label="observed, single steps")
    at, mean, *_ = _stretches(step, loss, means)
    axis.plot(at, mean, color=VERMILLION, linewidth=1.2, label="observed, mean")
    inside = np.concatenate([np.asarray(forecast.loss(grid)), mean[at >= forecast.first_step]])
    pad = 0.1 * np.ptp(inside) + 0.01
    axis.set_ylim(inside.min() - pad, inside.max() + pad)
    axis.set_ylabel("loss (nats per token)")
    axis.legend(loc="upper right", frameon=False, ncols=2)


def _draw_residual(
    axis: "Axes", forecast: Forecast, step: NDArray[np.int64], loss: NDArray[np.float64], means: int
) -> None:
    grid = _grid(forecast)
    for level, alpha in zip(_levels(forecast), (0.15, 0.25), strict=False):
        width = np.asarray(forecast.half_width(grid, level))
        axis.fill_between(grid, 100 * np.expm1(-width), 100 * np.expm1(width), color=BLUE, alpha=alpha, linewidth=0)
    axis.axhline(0.0, color=BLUE, linewidth=1.0, linestyle="--")
    expected = np.asarray(forecast.loss(step))
    known = np.isfinite(expected)
    if np.any(known):
        percent = 100 * (loss[known] / expected[known] - 1)
        at, mean, *_ = _stretches(step[known], percent, means)
        axis.plot(at, mean, color=VERMILLION, linewidth=1.2)
        widest = 100 * float(np.max(forecast.half_width(grid, _levels(forecast)[0]))) if _levels(forecast) else 1.0
        reach = 1.3 * max(widest, float(np.quantile(np.abs(mean), 0.98)))
        axis.set_ylim(-reach, reach)
    axis.set_ylabel("residual (% of forecast)")


def _draw_statistic(axis: "Axes", record: RunRecord) -> None:
    for values, colour, style, label in (
        (record.statistic, GREY, "-", "change statistic"),
        (record.threshold, VERMILLION, "--", "threshold"),
    ):
        if values is None:
            continue
        known = np.isfinite(values)
        if np.any(known):
            at, _, _, high = _stretches(record.step[known], values[known], POINTS)
            axis.plot(at, high, color=colour, linestyle=style, linewidth=1.0, label=label)
    axis.set_ylabel("statistic (sigmas)")
    if axis.lines:  # Before calibration is over there is no statistic.
        axis.legend(loc="upper left", frameon=False, ncols=2)


def _mark_events(axes: "Sequence[Axes]", events: Sequence[Event]) -> None:
    flagged = [event for event in events if event.severity >= Severity.WARNING]
    for axis in axes:
        for event in flagged:
            named = axis is axes[0] and event is flagged[0]
            onset = event.detected if event.onset is None else event.onset
            axis.axvline(onset, color=GREY, linestyle=":", label="onset" if named else None)
            axis.axvline(event.detected, color=GREY, linewidth=1.0, label="flagged" if named else None)


def _stretches(step: NDArray[np.int64], values: NDArray[np.float64], bins: int) -> tuple[NDArray[Any], ...]:
    """Return centre, mean, minimum and maximum of `values` over at most `bins` stretches of equal length in steps."""
    if bins < len(step):
        edges = np.unique(np.searchsorted(step, np.linspace(step[0], step[-1] + 1, bins + 1)[:-1]))
    else:
        edges = np.arange(len(step))
    count = np.diff(np.append(edges, len(step)))
    return (
        np.add.reduceat(step, edges) / count,
        np.add.reduceat(values, edges) / count,
        np.minimum.reduceat(values, edges),
        np.maximum.reduceat(values, edges),
    )
