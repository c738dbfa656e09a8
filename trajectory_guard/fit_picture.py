"""The static picture of a fit: its ladder along training, the loss over compute, and a forecast."""

from typing import TYPE_CHECKING, Literal

import numpy as np

from trajectory_guard.errors import MissingExtraError, TrajectoryGuardError
from trajectory_guard.fit import DelphiFit
from trajectory_guard.laws.terminal import TerminalFit
from trajectory_guard.plan import RunPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_fit"]

BLUE, GREY = "#0072B2", "#6E6E6E"
# Okabe and Ito's palette without blue, which is the forecast's: told apart with every common kind of colour blindness.
RUNG_COLOURS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")

SLICES = (0.1, 0.25, 0.5, 1.0)
"""Progress at which the loss is drawn over compute."""


def draw_fit(fit: DelphiFit, plan: RunPlan | None = None, *, override_recipe: bool = False) -> "Figure":
    """Draw the rungs that a fit carries, its law through them, and the forecast of a plan.

    Args:
        fit: the fit; one without rung points shows its law and the forecast alone.
        plan: a run to forecast.
        override_recipe: draw a forecast although the recipes differ.

    Returns:
        A matplotlib figure of 12 x 5 inches: loss over progress, and loss over compute at several progress values.

    Raises:
        MissingExtraError: matplotlib is not installed.
        TrajectoryGuardError: there is nothing to draw, neither rungs nor a plan.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", "report") from error
    if not fit.rungs and plan is None and not isinstance(fit.model, TerminalFit):
        raise TrajectoryGuardError("nothing to draw: the fit carries no rungs; name a plan to draw its forecast")
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(f"{fit.law} law, {fit.metric} on {fit.split} data")
    if isinstance(fit.model, TerminalFit):
        _draw_terminal(figure.subplots(), fit.model, plan)
        return figure
    along, over = figure.subplots(1, 2)
    _draw_along(along, fit, plan, override_recipe)
    _draw_over_compute(over, fit, plan)
    return figure


def _draw_along(axis: "Axes", fit: DelphiFit, plan: RunPlan | None, override: bool) -> None:
    for index, rung in enumerate(fit.rungs):
        colour = RUNG_COLOURS[index % len(RUNG_COLOURS)]
        if rung.progress:
            style = "." if max(rung.error) == 0 else "-"
            axis.plot(rung.progress, rung.loss, style, color=colour, label=rung.name)
        grid = np.linspace(fit.model.first_progress(rung.plan), 1.0, 300)
        fitted = fit.model.loss(rung.plan, grid)
        label = None if rung.progress else f"{rung.name}, fitted"
        axis.plot(grid, fitted, color=colour, linewidth=0.8, linestyle=":", label=label)
    if plan is not None:
        forecast = fit.forecast(plan, override_recipe=override)
        progress, loss, widths = forecast.table
        for level, alpha in ((0.95, 0.15), (0.8, 0.25)):
            low, high = loss * np.exp(-widths[level]), loss * np.exp(widths[level])
            axis.fill_between(progress, low, high, color=BLUE, alpha=alpha, linewidth=0, label=f"{level:.0%} interval")
        axis.plot(progress, loss, color=BLUE, linewidth=1.5, linestyle="--", label="forecast")
    axis.set(xlabel="progress (tokens over planned tokens)", ylabel="loss (nats per token)", xlim=(0, 1))
    _finish(axis)


def _draw_over_compute(axis: "Axes", fit: DelphiFit, plan: RunPlan | None) -> None:
    plans = [rung.plan for rung in fit.rungs] + ([plan] if plan is not None else [])
    flops = [p.total_flops for p in plans]
    for g, shade in zip(SLICES, ("#BBBBBB", "#999999", GREY, "#333333"), strict=True):
        if any(g < fit.model.first_progress(p) for p in plans):
            continue
        fitted = [float(fit.model.loss(p, np.array([g]))[0]) for p in plans]
        axis.plot(flops, fitted, color=shade, linewidth=1.0, linestyle=":", marker="_", label=f"fit at {g:.0%}")
        for index, rung in enumerate(fit.rungs):
            if rung.progress and rung.progress[0] <= g <= rung.progress[-1] * 1.02:
                seen = np.interp(g, rung.progress, rung.loss)
                axis.plot([rung.plan.total_flops], [seen], ".", color=RUNG_COLOURS[index % len(RUNG_COLOURS)])
    if plan is not None:
        axis.axvline(plan.total_flops, color=BLUE, linewidth=1.0, linestyle="--", label="forecast")
    axis.set(xlabel="compute of the full plan (FLOPs)", ylabel="loss (nats per token)", xscale="log")
    _finish(axis, "lower left")


def _draw_terminal(axis: "Axes", model: TerminalFit, plan: RunPlan | None) -> None:
    compute = np.array([optimum.compute for optimum in model.optima])
    end = max(compute[-1] * 100, 0.0 if plan is None else plan.total_flops)
    grid = np.geomspace(compute[0], end, 200)
    axis.plot(grid, model.expect(grid), color=BLUE, linestyle="--", label="law")
    axis.plot(compute, [o.loss for o in model.optima], ".", color=RUNG_COLOURS[0], label="optimum of each budget")
    if plan is not None:
        axis.axvline(plan.total_flops, color=BLUE, linewidth=1.0, label="plan")
    axis.set(xlabel="compute (FLOPs)", ylabel="final loss (nats per token)", xscale="log")
    _finish(axis)


def _finish(axis: "Axes", place: Literal["upper right", "lower left"] = "upper right") -> None:
    axis.grid(True, color="#E5E5E5", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc=place, frameon=False, fontsize="small", ncols=2)
