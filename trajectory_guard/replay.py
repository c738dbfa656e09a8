"""Replay: a guard run over a log, and what it would have said; the subcommand `trajectory-guard replay`."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trajectory_guard.actions import line
from trajectory_guard.detect.events import Event, Severity
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.fit import DelphiFit, load_fit
from trajectory_guard.forecast import Forecast
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.logs.read import LogRead, LogRow, read_log
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.paired import PairedReference
from trajectory_guard.plan import RunPlan
from trajectory_guard.sinks.base import Sink
from trajectory_guard.sinks.jsonl import JsonlSink

__all__ = ["Replay", "check_channels", "log_arguments", "open_log", "replay", "replay_arguments", "replay_command"]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a guard said over a log.

    Args:
        guard: the guard after the last row.
        said: (step, event) for every event that was opened, updated or closed.
        rows: rows judged.
    """

    guard: TrajectoryGuard
    said: tuple[tuple[int, Event], ...]
    rows: int


def replay(
    forecast: Forecast,
    rows: Iterable[LogRow],
    *,
    sinks: Sequence[Sink] = (),
    channels: Sequence[str] = (),
    paired: PairedReference | None = None,
    log_every_n_steps: int = 50,
) -> Replay:
    """Run a silent guard over logged rows.

    Args:
        forecast: what the loss should have been.
        rows: as `LogRead.rows` yields them.
        sinks: where verdicts and events are also written.
        channels: names of the log's other numbers to watch.
        paired: residuals of a run on the same data order.
        log_every_n_steps: steps between verdicts that go to the sinks; events always go.

    Returns:
        The guard and everything it said.
    """
    said: list[tuple[int, Event]] = []
    count = 0
    guard = TrajectoryGuard(
        forecast,
        actions={severity: () for severity in Severity},
        sinks=sinks,
        paired=paired,
        log_every_n_steps=log_every_n_steps,
    )
    with guard:
        for step, loss, _, others in rows:
            if step < 1:
                continue
            count += 1
            watched = {name: others[name] for name in channels if name in others} if channels else None
            verdict = guard.observe(step, loss, channels=watched)
            if verdict.events:
                said.extend((step, event) for event in verdict.events)
    return Replay(guard=guard, said=tuple(said), rows=count)


def log_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that name a finished log and say how it is to be read: those of `open_log`."""
    parser.add_argument(
        "--plan", type=Path, help="plan of the run (JSON); without it the log's last step is the horizon"
    )
    parser.add_argument("--active-params", type=float, help="without a plan: parameters used by one token")
    parser.add_argument("--tokens-per-step", type=int, help="without a plan: where the log has no tokens column")
    parser.add_argument("--metric", default="loss", help="name of the loss in the log, default: loss")
    parser.add_argument("--override-recipe", action="store_true", help="go on although the recipes differ")


def open_log(args: argparse.Namespace, fit: DelphiFit, path: Path) -> tuple[Forecast, LogRead, tuple[str, ...]]:
    """Return the forecast for a logged run, its log, and what should be said about both.

    Args:
        args: parsed `log_arguments`.
        fit: the fit that forecasts.
        path: the log.

    Raises:
        TrajectoryGuardError: neither a plan nor the numbers that replace it.
        FileFormatError: plan or log cannot be read.
        RecipeMismatchError: the fit is for another recipe.
    """
    plan = RunPlan.load(args.plan) if args.plan else None
    log = read_log(path, plan=plan, metric=args.metric, split=fit.split)
    notes = list(log.notes)
    if plan is None:
        plan = _plan_of(fit.recipe, log, args, metric=fit.metric, split=fit.split)
        notes.append(f"no plan: the horizon is taken to be the last step, {plan.total_steps}")
    return fit.forecast(plan, override_recipe=args.override_recipe), log, tuple(notes)


def check_channels(names: Sequence[str], log: LogRead, path: Path) -> None:
    """Check that a log has columns of these names.

    Raises:
        TrajectoryGuardError: one is missing.
    """
    missing = sorted(set(names) - set(log.channels))
    if missing:
        raise TrajectoryGuardError(f"{path}: no columns {missing}; it has {sorted(log.channels)}")


def replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `trajectory-guard replay`."""
    parser.add_argument("fit", type=Path, help="fit (JSON)")
    parser.add_argument("log", type=Path, help="log of the run: CSV, JSONL, TensorBoard folder, trainer_state.json")
    log_arguments(parser)
    parser.add_argument("--events", type=Path, help="event log to write (JSONL)")
    parser.add_argument("--channel", action="append", default=[], help="another number of the log to watch; repeatable")
    parser.add_argument("--paired", type=Path, help="log of a run on the same data order")
    parser.add_argument("--quiet", action="store_true", help="print only warnings and above")


def replay_command(args: argparse.Namespace) -> int:
    """Print what a guard would have said over a log, and when."""
    fit = load_fit(args.fit)
    forecast, log, notes = open_log(args, fit, args.log)
    for text in notes:
        print(f"note: {text}", file=sys.stderr)
    check_channels(args.channel, log, args.log)
    paired = None
    if args.paired:
        twin = read_log(args.paired, plan=forecast.plan, metric=args.metric, split=fit.split)
        paired = PairedReference.from_curve(twin.curve)
    if args.events and args.events.exists():
        raise TrajectoryGuardError(f"{args.events}: exists already; name a new event log, or remove it")
    sinks = [JsonlSink(args.events)] if args.events else []
    result = replay(
        forecast, log.rows(with_channels=bool(args.channel)), sinks=sinks, channels=args.channel, paired=paired
    )
    for step, event in result.said:
        if event.severity >= Severity.WARNING or not args.quiet:
            print(f"at {step}: {line(event)}")
    counts = {severity: sum(e.severity == severity for e in result.guard.events) for severity in reversed(Severity)}
    numbers = ", ".join(f"{count} {severity.name.lower()}" for severity, count in counts.items() if count)
    print(f"{result.rows} rows judged, last step {result.guard.last_step}: {numbers or 'nothing to say'}")
    if args.events:
        print(f"wrote {args.events}")
    return 0


def _plan_of(recipe: object, log: LogRead, args: argparse.Namespace, *, metric: str, split: str) -> RunPlan:
    """The plan of a finished run as far as its log tells."""
    if args.active_params is None:
        raise TrajectoryGuardError("give --plan PLAN, or --active-params N and the log's own length is the horizon")
    steps = int(log.step[-1])
    tokens = args.tokens_per_step or round(float(log.tokens[-1]) / steps)
    if tokens < 1:
        raise TrajectoryGuardError("the log does not tell its tokens; give --tokens-per-step or --plan")
    schedule = recipe.get("lr_schedule") if isinstance(recipe, dict) else None
    return RunPlan(
        total_steps=steps,
        tokens_per_step=tokens,
        active_params=args.active_params,
        schedule=LRSchedule.from_dict(schedule) if schedule else LRSchedule(shape="constant"),
        metric=metric,
        split="validation" if split == "validation" else "train",
    )
