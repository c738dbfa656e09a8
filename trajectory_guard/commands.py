"""The subcommands around fits: fit, forecast, backtest, inspect, plan."""

import argparse
import sys
from pathlib import Path

import numpy as np

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.fit import DelphiFit, fit_ladder, load_fit
from trajectory_guard.fit_picture import draw_fit
from trajectory_guard.laws.backtest import backtest_law, format_backtest
from trajectory_guard.laws.channel import ChannelLaw
from trajectory_guard.laws.progress import MatchedProgress
from trajectory_guard.laws.registry import ALONG_TRAINING, get_law, law_names
from trajectory_guard.laws.terminal import TerminalFit
from trajectory_guard.laws.trend import off_trend
from trajectory_guard.manifest import read_manifest
from trajectory_guard.picture import save_picture
from trajectory_guard.plan import RunPlan


def fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `trajectory-guard fit`."""
    parser.add_argument("manifest", type=Path, help="ladder manifest (TOML)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="fit to write (JSON)")
    parser.add_argument("--law", choices=("auto", *law_names()), default="auto", help="default: auto, by back-test")


def fit_command(args: argparse.Namespace) -> int:
    """Fit the ladder of a manifest and write the fit."""
    read = read_manifest(args.manifest)
    for note in read.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"fitting {len(read.ladder.rungs)} rungs ...", file=sys.stderr)
    fit = fit_ladder(read.ladder, args.law)
    fit.save(args.output)
    print(describe(fit))
    odd = off_trend(get_law(fit.law), read.ladder) if fit.law in ALONG_TRAINING else None
    if odd is not None:
        print(f"note: {odd}")
    print(f"wrote {args.output}")
    return 0


def forecast_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `trajectory-guard forecast`."""
    parser.add_argument("fit", type=Path, help="fit (JSON)")
    parser.add_argument("--plan", type=Path, required=True, help="plan of the run (JSON)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="forecast to write (CSV)")
    parser.add_argument("--points", type=int, default=1000, help="rows at most, default 1000")
    parser.add_argument("--override-recipe", action="store_true", help="forecast although the recipes differ")


def forecast_command(args: argparse.Namespace) -> int:
    """Write the forecast of a plan as CSV."""
    fit, plan = load_fit(args.fit), RunPlan.load(args.plan)
    forecast = fit.forecast(plan, override_recipe=args.override_recipe)
    forecast.to_csv(args.output, points=max(2, args.points))
    lower, upper = forecast.interval(plan.total_steps, 0.8)
    print(
        f"{fit.metric} ({fit.split}) at the end, step {plan.total_steps}: {forecast.loss(plan.total_steps):.4f} nats, "
        f"80 % interval {lower:.4f} to {upper:.4f}; forecast from step {forecast.first_step} on"
    )
    print(f"recipe check: {forecast.check.message()}")
    print(f"wrote {args.output}")
    return 0


def backtest_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `trajectory-guard backtest`."""
    parser.add_argument("manifest", type=Path, help="ladder manifest (TOML)")
    parser.add_argument("--law", choices=("all", *law_names()), default="all", help="default: all along training")


def backtest_command(args: argparse.Namespace) -> int:
    """Print how well each law forecasts rungs that were held out."""
    ladder = read_manifest(args.manifest).ladder
    names = ALONG_TRAINING if args.law == "all" else (args.law,)
    tests = []
    for name in names:
        print(f"back-testing {name} ...", file=sys.stderr)
        tests.append(backtest_law(get_law(name), ladder))
    print(format_backtest([row for test in tests for row in test.rows]))
    for test in tests:
        if test.refused is not None:
            print(f"{test.law} refused the ladder: {test.refused}")
    return 0


def inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `trajectory-guard inspect`."""
    parser.add_argument("fit", type=Path, help="fit (JSON)")
    parser.add_argument("--plan", type=Path, help="also show the forecast for this plan (JSON)")
    parser.add_argument("--draw", type=Path, metavar="PICTURE", help="draw ladder, fit and forecast (.png or .svg)")
    parser.add_argument("--override-recipe", action="store_true", help="forecast although the recipes differ")


def inspect_command(args: argparse.Namespace) -> int:
    """Say in words what a fit holds."""
    fit = load_fit(args.fit)
    print(describe(fit))
    plan = RunPlan.load(args.plan) if args.plan else None
    if plan is not None:
        forecast = fit.forecast(plan, override_recipe=args.override_recipe)
        print("forecast: progress, step, loss in nats, 80 % and 95 % half-width")
        for g in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
            step = max(round(float(plan.step_at(g))), 1)
            if np.isfinite(forecast.loss(step)):
                widths = [100 * forecast.half_width(step, level) for level in (0.8, 0.95)]
                print(f"  {g:4.0%}  {step:>9}  {forecast.loss(step):.4f}  +-{widths[0]:.2f} %  +-{widths[1]:.2f} %")
    if args.draw:
        save_picture(draw_fit(fit, plan, override_recipe=args.override_recipe), args.draw)
        print(f"wrote {args.draw}")
    return 0


def _describe_channel(law: ChannelLaw) -> str:
    largest = max(law.points, key=lambda points: points.flops)
    moved = ", moved along the trend over sizes" if law.rule == "trend" else ""
    errors = [
        f"{name} {'unknown' if error is None else f'{100 * error:.1f} %' if law.logarithmic else f'{error:.3g}'}"
        for name, error in (("nearest", law.error_nearest), ("trend", law.error_trend))
    ]
    return (
        f"{largest.value[0]:.4g} at progress {largest.progress[0]:.2f} to {largest.value[-1]:.4g} at "
        f"{largest.progress[-1]:.2f} of rung {largest.name}; a run follows its nearest rung{moved}; error of the bend, "
        f"one rung left out: {', '.join(errors)}"
    )


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `trajectory-guard plan`."""
    parser.add_argument("fit", type=Path, help="fit of the terminal law (JSON)")
    parser.add_argument("--compute", type=float, required=True, help="FLOPs of the run, in the fit's convention")


def plan_command(args: argparse.Namespace) -> int:
    """Say what a ladder recommends for a compute budget."""
    fit = load_fit(args.fit)
    if not isinstance(fit.model, TerminalFit):
        raise TrajectoryGuardError(
            f"{args.fit} is a fit of law {fit.law!r}; `plan` needs one of law 'terminal': fit --law terminal"
        )
    advice = fit.model.recommend(args.compute)
    print(f"compute: {advice.compute:.4g} FLOPs, {advice.reach:.3g} times the ladder's largest budget")
    print(f"recommended: {advice.params:.4g} parameters, {advice.tokens:.4g} tokens")
    print(f"loss to expect at the end: {advice.loss:.4f} nats")
    for level in (0.8, 0.95):
        width = float(fit.interval.half_width(advice.params, 1.0, level))
        low, high = advice.loss * np.exp([-width, width])
        print(f"{level:.0%} interval: {low:.4f} to {high:.4f} nats (+-{100 * width:.2f} %)")
    low, high = advice.bootstrap
    print(f"resampled optima, 5 to 95 %: {low:.4f} to {high:.4f} nats (no interval: it knows no error of the law)")
    print("what hangs on the floor: floor, loss, rms of the fit")
    for floor, loss, rms in advice.sensitivity:
        print(f"  {floor:.3f}  {loss:.4f}  {rms:.2e}")
    return 0


def describe(fit: DelphiFit) -> str:
    """Return what a fit holds, in words."""
    lines = [f"law {fit.law} for {fit.metric!r} on {fit.split} data"]
    if fit.source is not None:
        lines.append(f"source: {fit.source}")
    for rung in fit.rungs:
        lines.append(
            f"  rung {rung.name}: {rung.plan.active_params:.4g} active parameters, "
            f"{rung.plan.total_tokens:.4g} tokens, {rung.plan.total_flops:.3g} FLOPs ({rung.plan.flops_convention}), "
            + (f"loss {rung.loss[-1]:.4f} nats at progress {rung.progress[-1]:.2f}" if rung.loss else "no points kept")
        )
    interval = fit.interval
    narrow, wide = (100 * float(interval.half_width(interval.largest_params * np.e, 1.0, v)) for v in (0.8, 0.95))
    lines.append(
        f"interval: +-{narrow:.2f} % (80 %) and +-{wide:.2f} % (95 %) at 2.7 times the largest rung's parameters, from "
        f"{interval.backtests} back-tested sizes"
    )
    if isinstance(fit.model, MatchedProgress) and fit.largest_flops is not None:
        floor, sd = fit.model.floor()
        low, high = fit.model.floor_sensitivity(10 * fit.largest_flops)
        lines.append(
            f"floor: {floor:.3f} +- {sd:.3f} nats, hardly told by a ladder; one sd lower or higher moves the final "
            f"loss at 10 times the largest rung's compute to {low:.4f} or {high:.4f} nats"
        )
    lines += [f"channel {name}: {_describe_channel(law)}" for name, law in fit.channels.items()]
    lines.append("back-test:")
    lines.append(format_backtest(fit.backtest))
    lines += [f"{law} refused the ladder: {reason}" for law, reason in fit.refused.items()]
    lines.append("valid for: " + ", ".join(sorted(fit.recipe)))
    return "\n".join(lines)
