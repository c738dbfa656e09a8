"""The subcommand `trajectory-guard tensorboard`: a guard's cards for a run that was logged without one, by replay."""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from trajectory_guard.detect.events import Event, Severity, Verdict
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.fit import load_fit
from trajectory_guard.forecast import Forecast
from trajectory_guard.logs.tensorboard import event_files
from trajectory_guard.replay import check_channels, log_arguments, open_log, replay
from trajectory_guard.sinks.scalars import check_name
from trajectory_guard.sinks.tensorboard import TensorBoardSink
from trajectory_guard.standing import Standing

__all__ = ["tensorboard_arguments", "tensorboard_command"]

POINTS = 1000
"""Verdicts written over a run: what TensorBoard shows of a scalar by default; events are written always."""


class _Witness:
    """A sink that remembers how the sink behind it failed: a guard switches it off and goes on, a command must not."""

    def __init__(self, sink: TensorBoardSink) -> None:
        self._sink = sink
        self.failure: Exception | None = None

    def start(self, forecast: Forecast, *, resumed_step: int | None) -> None:
        """See `Sink.start`."""
        self._call("start", forecast, resumed_step=resumed_step)

    def standing(self, standing: Standing) -> None:
        """See `TensorBoardSink.standing`."""
        self._call("standing", standing)

    def verdict(self, verdict: Verdict) -> None:
        """See `Sink.verdict`."""
        self._call("verdict", verdict)

    def event(self, event: Event, *, step: int) -> None:
        """See `Sink.event`."""
        self._call("event", event, step=step)

    def flush(self) -> None:
        """See `Sink.flush`."""
        self._call("flush")

    def close(self) -> None:
        """See `Sink.close`."""
        self._call("close")

    def _call(self, method: str, *args: object, **keywords: object) -> None:
        if self.failure is None:
            try:
                getattr(self._sink, method)(*args, **keywords)
            except Exception as error:
                self.failure = error


def tensorboard_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `trajectory-guard tensorboard`."""
    parser.add_argument("fit", type=Path, help="fit (JSON)")
    parser.add_argument("logdir", type=Path, help="folder that holds the run's event files")
    log_arguments(parser)
    parser.add_argument("--channel", action="append", default=[], help="another number of the log to watch; repeatable")
    parser.add_argument("--name", default="guard", help="name of the tags and of the new sub-run, default: guard")


def tensorboard_command(args: argparse.Namespace) -> int:
    """Replay the run of a log folder and write the guard's cards into a new sub-run of it."""
    name, logdir = check_name(args.name), args.logdir
    if not logdir.is_dir() or not event_files(logdir):
        inside = sorted({str(file.parent) for file in logdir.glob("*/**/*tfevents*")})[:5] if logdir.is_dir() else []
        where = f"; there are some in {', '.join(inside)}" if inside else ""
        raise TrajectoryGuardError(f"{logdir}: holds no TensorBoard event files (events.out.tfevents.*){where}")
    if not name.strip("./") or ".." in name.split("/"):
        raise TrajectoryGuardError(f"--name must name a folder inside {logdir}, got {name!r}")
    target = logdir / name
    if target.exists():
        raise TrajectoryGuardError(
            f"{target} exists: the guard was added to this run already, or watched it; remove that folder to add it "
            "anew, or give another --name"
        )
    fit = load_fit(args.fit)
    forecast, log, notes = open_log(args, fit, logdir)
    check_channels(args.channel, log, logdir)
    if any(column.startswith(f"{name}/") for column in log.channels):
        raise TrajectoryGuardError(f"{logdir}: its own event files hold {name}/ tags: a guard of that name watched it")
    for text in notes:
        print(f"note: {text}", file=sys.stderr)
    print(f"judging {len(log.step):,} steps ...", file=sys.stderr)
    # Written beside and renamed: a TensorBoard that looks on sees all of it or nothing.
    partial = Path(tempfile.mkdtemp(dir=logdir, prefix=f".{name.replace('/', '-')}."))
    try:
        # Under the run's own tag the forecast lies on the card of its loss, unless that is in another unit.
        loss_tag = log.column if log.unit == "nats" else None
        sink = _Witness(TensorBoardSink(partial, name=name, loss_tag=loss_tag))
        result = replay(
            forecast,
            log.rows(with_channels=bool(args.channel)),
            sinks=[sink],
            channels=args.channel,
            log_every_n_steps=max(1, len(log.step) // POINTS),
        )
        if sink.failure is not None:
            raise TrajectoryGuardError(f"{target}: not written: {sink.failure}") from sink.failure
        partial.chmod(0o755)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.rename(target)
    finally:
        if partial.exists():
            shutil.rmtree(partial)
    flagged = sum(event.severity >= Severity.WARNING for event in result.guard.events)
    print(f"{result.rows} rows judged, {flagged} events of WARNING and above")
    print(f"wrote {target}: open tensorboard --logdir {logdir}, tab Custom Scalars")
    return 0
