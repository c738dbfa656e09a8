"""Watch: a guard beside a run it cannot be built into; the subcommand `trajectory-guard watch`.

It follows a log that the run writes, and keeps guard and position in a state file, so that it may be ended and started
at any time. Exit status: 0 at the end of the horizon, after `--idle` seconds without a row, or when interrupted; 2 for
bad input; 3 on a certified and 4 on a critical event, when `--exit-on` asks for it.
"""

import argparse
import json
import logging
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trajectory_guard.actions import Action
from trajectory_guard.detect.events import Event, Severity
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.files import read_json, write_json
from trajectory_guard.fit import load_fit
from trajectory_guard.forecast import Forecast
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.logs.follow import LogFollower
from trajectory_guard.plan import RunPlan
from trajectory_guard.sinks.base import Sink
from trajectory_guard.sinks.console import ConsoleSink
from trajectory_guard.sinks.jsonl import JsonlSink

__all__ = ["EXIT_STATUS", "LogWatch", "run_on_event", "watch_arguments", "watch_command"]

logger = logging.getLogger("trajectory_guard")

FORMAT, VERSION = "trajectory-guard-watch", 1

EXIT_STATUS = {Severity.CERTIFIED: 3, Severity.CRITICAL: 4}
"""Exit status by severity of the event that ended a watch."""

COMMAND_SECONDS = 60.0
"""Time that a command of `--on-event` may take."""


class LogWatch:
    """A guard fed from a growing log, with its state in a file.

    Rows are handed to the guard once; an event's command may run twice when the watch dies between command and state.

    Args:
        forecast: what the loss should be.
        follower: the log.
        state: file of guard and position, read if it exists; None keeps nothing.
        sinks: where verdicts and events are written.
        on_event: called with each event of at least WARNING, when it is flagged and when its severity rises.
        channels: names of the log's other numbers to watch.

    Raises:
        TrajectoryGuardError: the state file is damaged or belongs to another version.
    """

    def __init__(
        self,
        forecast: Forecast,
        follower: LogFollower,
        *,
        state: Path | None = None,
        sinks: tuple[Sink, ...] = (),
        on_event: Callable[[Event], object] | None = None,
        channels: tuple[str, ...] = (),
    ) -> None:
        self.follower = follower
        self.worst: Severity | None = None
        self._state = state
        self._channels = channels
        self._on_event = on_event
        actions: dict[Severity | str, Action] = {Severity.WARNING: self._take}
        self.guard = TrajectoryGuard(forecast, actions=actions, sinks=sinks)
        if state is not None and state.exists():
            content = read_json(state, format=FORMAT, version=VERSION)
            if not {"guard", "follower"} <= set(content):
                raise TrajectoryGuardError(f"{state}: not the state of a watch; remove it to start anew")
            self.guard.load_state_dict(content["guard"])
            follower.load_state_dict(content["follower"])

    def poll(self) -> int:
        """Judge the rows written since the last call, save the state, and return how many there were."""
        rows = self.follower.poll()
        for step, loss, _, others in rows:
            if step >= 1:
                watched = {name: others[name] for name in self._channels if name in others}
                self.guard.observe(step, loss, channels=watched or None)
        if rows and self._state is not None:
            content: dict[str, Any] = {"guard": self.guard.state_dict(), "follower": self.follower.state_dict()}
            write_json(self._state, {"format": FORMAT, "version": VERSION, **content})
        return len(rows)

    def _take(self, event: Event) -> None:
        self.worst = event.severity if self.worst is None else max(self.worst, event.severity)
        if self._on_event is not None:
            self._on_event(event)


def run_on_event(command: str) -> Callable[[Event], None]:
    """Return a function that runs `command` with an event as JSON on its standard input.

    The command is split as a shell would, and runs without one. Failures are logged: watching goes on.

    Raises:
        TrajectoryGuardError: the command is empty or its quotes do not close.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise TrajectoryGuardError(f"--on-event {command!r} cannot be split into words: {error}") from error
    if not words:
        raise TrajectoryGuardError("--on-event needs a command")

    def run(event: Event) -> None:
        text = json.dumps(event.to_dict(), allow_nan=False)
        try:
            done = subprocess.run(words, input=text, text=True, timeout=COMMAND_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            logger.error("--on-event %s: %s; watching goes on", words[0], error)
            return
        if done.returncode:
            logger.error("--on-event %s ended with status %d; watching goes on", words[0], done.returncode)

    return run


def watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `trajectory-guard watch`."""
    parser.add_argument("fit", type=Path, help="fit (JSON)")
    parser.add_argument("log", type=Path, help="growing log: CSV, JSONL or TensorBoard folder; may appear later")
    parser.add_argument("--plan", type=Path, required=True, help="plan of the run (JSON)")
    parser.add_argument("--state", type=Path, help="file that keeps guard and position, to be ended and started again")
    parser.add_argument("--events", type=Path, help="event log to append to (JSONL)")
    parser.add_argument("--metric", default="loss", help="name of the loss in the log, default: loss")
    parser.add_argument(
        "--unit", choices=("nats", "bits", "perplexity"), default="nats", help="unit of the logged loss"
    )
    parser.add_argument("--channel", action="append", default=[], help="another number of the log to watch; repeatable")
    parser.add_argument("--on-event", metavar="CMD", help="run for each warning and above, event as JSON on its input")
    parser.add_argument("--exit-on", choices=("certified", "critical"), help="end with status 3 or 4 on such an event")
    parser.add_argument("--poll", type=float, default=5.0, help="seconds between looks at the log, default 5")
    parser.add_argument("--idle", type=float, help="end after so many seconds without a new row; default: never")
    parser.add_argument("--override-recipe", action="store_true", help="watch although the recipes differ")


def watch_command(args: argparse.Namespace) -> int:
    """Follow a log until its run ends, or until an event that was asked for."""
    for name in ("poll", "idle"):
        value = getattr(args, name)
        if value is not None and not 0.0 <= value < float("inf"):
            raise TrajectoryGuardError(f"--{name} must be seconds, 0 or more, got {value}")
    fit, plan = load_fit(args.fit), RunPlan.load(args.plan)
    forecast = fit.forecast(plan, override_recipe=args.override_recipe)
    follower = LogFollower(args.log, metric=args.metric, split=fit.split, unit=args.unit, plan=plan)
    sinks: list[Sink] = [ConsoleSink()]
    if args.events:
        sinks.append(JsonlSink(args.events))
    watch = LogWatch(
        forecast,
        follower,
        state=args.state,
        sinks=tuple(sinks),
        on_event=run_on_event(args.on_event) if args.on_event else None,
        channels=tuple(args.channel),
    )
    limit = None if args.exit_on is None else Severity[args.exit_on.upper()]
    quiet_since = time.monotonic()
    try:
        with watch.guard:
            while True:
                rows = watch.poll()
                if limit is not None and watch.worst is not None and watch.worst >= limit:
                    return EXIT_STATUS[watch.worst]
                if rows:
                    quiet_since = time.monotonic()
                    continue
                if watch.guard.last_step >= plan.total_steps:
                    return 0
                if args.idle is not None and time.monotonic() - quiet_since >= args.idle:
                    return 0
                time.sleep(args.poll)
    except KeyboardInterrupt:
        return 0
