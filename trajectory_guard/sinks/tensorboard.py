"""TensorBoardSink: the loss inside its forecast interval on the Custom Scalars tab, the forecast beside the loss.

The charts need every tag of a chart at identical steps, so all tags of a verdict are written as one record. The edges
of the bands have a group of tags of their own, so that the guard's group on the plain Scalars tab shows what is worth
looking at. The forecast of the whole horizon goes once, at the start, into the sibling runs `forecast`,
`forecast_lower` and `forecast_upper` under a tag of the loss, where the plain Scalars tab overlays them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from trajectory_guard.detect.events import Event, Severity, Verdict
from trajectory_guard.errors import MissingExtraError, TrajectoryGuardError
from trajectory_guard.forecast import Forecast
from trajectory_guard.sinks.console import rollback_words
from trajectory_guard.sinks.scalars import FlagState, check_name, shown_level, verdict_scalars
from trajectory_guard.standing import Standing

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

__all__ = ["TensorBoardSink"]

FORECAST_POINTS = 200
"""Points of each forecast curve, half of them closer together towards the start, where the loss falls."""

VERDICTS = 4000
"""Verdicts written over a whole run, beside those with events: four for each point that TensorBoard shows by default.
A run of 10^6 steps would else write 20,000, of a dozen tags each."""

_CHARTS = (
    # Title; value, lower edge, upper edge. Means, for the interval is one of the mean: single steps leave it by noise.
    ("Loss, mean of last 1 % of the run (nats)", ("loss_mean", "lower", "upper")),
    (
        "Residual, mean of last 1 % of the run (%)",
        ("residual_mean_percent", "residual_lower_percent", "residual_upper_percent"),
    ),
    ("Change statistic over threshold (alarm at 1)", ("alarm_ratio", "alarm_floor", "alarm_limit")),
    ("Outlook: final loss, given the run so far (nats)", ("outlook", "outlook_lower", "outlook_upper")),
)
"""The cards in the order in which they are read; the channels follow, one card each."""

_EDGES = frozenset(edge for _, (_, *edges) in _CHARTS for edge in edges)


class TensorBoardSink:
    """Writes verdicts, the custom layout, the forecast and event sentences for TensorBoard.

    Verdicts are thinned to about 4,000 over the run by a schedule of steps; one with an event is always written.

    Args:
        target: log folder, or a `SummaryWriter` that already writes there: TensorBoard follows only the newest event
            file of a folder, so two writers must not share one. A writer that is handed in is flushed, never closed.
        name: first part of every tag; two guards of one run need two names.
        loss_tag: tag under which the training script logs its loss: the forecast curves are written under it too, so
            that one card shows both. By default they go with a copy of the loss under `<name>/loss_and_forecast`.

    Raises:
        MissingExtraError: tensorboard is not installed.
        TrajectoryGuardError: the name cannot begin a tag, or the target is neither folder nor writer.
    """

    def __init__(
        self, target: "str | Path | SummaryWriter", *, name: str = "guard", loss_tag: str | None = None
    ) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("tensorboard", "torch") from error
        if not isinstance(target, (str, Path, SummaryWriter)):
            raise TrajectoryGuardError(f"target must be a log folder or a SummaryWriter, got {target!r}")
        self.name = check_name(name)
        # Not `<name>/loss`: the sibling runs lack the edges that the first chart needs, and it would complain.
        self.loss_tag = loss_tag or f"{name}/loss_and_forecast"
        self._copies_loss = loss_tag is None
        self._target = target
        self._writer: SummaryWriter | None = None
        self._flags = FlagState()
        self._standing: Standing | None = None
        self._channels: list[str] = []
        self._spacing, self._last, self._next = 1, 0, 0

    def start(self, forecast: Forecast, *, resumed_step: int | None) -> None:
        """Write layout, forecast card and forecast curves; after a resume make later points of the past void."""
        from torch.utils.tensorboard.writer import SummaryWriter

        purge = None if resumed_step is None else resumed_step + 1
        if isinstance(self._target, SummaryWriter):
            self._writer = self._target
            if purge is not None:
                _purge(self._writer, purge)
        else:
            self._writer = SummaryWriter(str(self._target), purge_step=purge)
        self._spacing, self._last, self._next = max(1, forecast.plan.total_steps // VERDICTS), 0, 0
        self._write_layout(self._writer)
        self._writer.add_text(f"{self.name}/forecast", forecast_card(forecast), resumed_step or 0)
        self._write_curves(forecast, Path(self._writer.log_dir))
        self._writer.flush()

    def reopen(self, events: Sequence[Event]) -> None:
        """Take the events that are known at a resume, for the flag."""
        self._flags.reopen(events)

    def standing(self, standing: Standing) -> None:
        """Keep how the run stands, for the verdict that follows."""
        self._standing = standing

    def verdict(self, verdict: Verdict) -> None:
        """Write every tag at the verdict's step, if it is that one's turn or it has events."""
        writer = self._open_writer()
        # A step before the last one is of a run that went back.
        if self._last <= verdict.step < self._next and not verdict.events:
            return
        self._last, self._next = verdict.step, verdict.step + self._spacing
        standing = self._standing
        new = [] if standing is None else [name for name in standing.channels if name not in self._channels]
        if new:
            self._channels += new
            self._write_layout(writer)
        values = dict.fromkeys((f"{self.name}/channel/{channel}" for channel in self._channels), float("nan"))
        values |= verdict_scalars(verdict, flag=self._flags.at(verdict), name=self.name, standing=standing)
        scalars = {self._tag(key.removeprefix(f"{self.name}/")): value for key, value in values.items()}
        if self._copies_loss:
            scalars[self.loss_tag] = verdict.loss
        _write(writer, scalars, verdict.step)

    def event(self, event: Event, *, step: int) -> None:
        """Write the event's sentence as text, and flush: someone may be looking."""
        self._flags.take(event)
        writer = self._open_writer()
        severity = event.severity.name.lower()
        back = rollback_words(event)
        writer.add_text(f"{self.name}/events", f"**{severity}, {event.state}**: {_plain(event.sentence)}{back}", step)
        if event.severity >= Severity.WARNING:
            writer.flush()

    def flush(self) -> None:
        """Bring what is buffered to disk."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flush; close the writer if it is ours."""
        if self._writer is not None:
            self._writer.flush()
            if self._writer is not self._target:
                self._writer.close()
            self._writer = None

    def _open_writer(self) -> "SummaryWriter":
        if self._writer is None:
            raise TrajectoryGuardError("the TensorBoard sink is not open; start it first")
        return self._writer

    def _tag(self, key: str) -> str:
        return f"{self.name}_bands/{key}" if key in _EDGES else f"{self.name}/{key}"

    def _write_layout(self, writer: "SummaryWriter") -> None:
        """Write the cards of every guard on this writer; a later layout replaces an earlier one."""
        # A channel has no band: its card is one whose edges are the value.
        channels = [(f"Channel {channel}", (f"channel/{channel}",) * 3) for channel in self._channels]
        cards = [(f"{n}. {title}", keys) for n, (title, keys) in enumerate([*_CHARTS, *channels], start=1)]
        layout = _LAYOUTS.setdefault(writer, {})
        # TensorBoard draws Margin cards in reverse order of declaration.
        layout[f"Trajectory ({self.name})"] = {
            title: ["Margin", [self._tag(key) for key in keys]] for title, keys in reversed(cards)
        }
        writer.add_custom_scalars(layout)

    def _write_curves(self, forecast: Forecast, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        first, last = forecast.first_step, forecast.plan.total_steps
        half = FORECAST_POINTS // 2
        spread = np.concatenate([np.linspace(first, last, half), np.geomspace(first, last, half)])
        steps = np.unique(spread.round().astype(np.int64))
        lower, upper = forecast.interval(steps, level=shown_level(forecast))
        curves = {"forecast": forecast.loss(steps), "forecast_lower": lower, "forecast_upper": upper}
        for run, values in curves.items():
            # purge_step=0 makes the curve of an earlier attempt void, so that a resumed run draws one curve.
            with SummaryWriter(str(folder / run), purge_step=0) as writer:
                for step, value in zip(steps.tolist(), np.asarray(values).tolist(), strict=True):
                    _write(writer, {self.loss_tag: value}, step)


_LAYOUTS: "WeakKeyDictionary[SummaryWriter, dict[str, dict[str, list[object]]]]" = WeakKeyDictionary()
"""The layout of each writer: a run holds one, so that a second guard on the same writer adds to it."""


def forecast_card(forecast: Forecast) -> str:
    """Return what the forecast is, as Markdown: law, horizon, final loss with its intervals, recipe check."""
    plan, last = forecast.plan, forecast.plan.total_steps
    rows = [
        ("law", forecast.law),
        ("watched", f"{plan.split} {plan.metric}, nats per token"),
        ("horizon", f"{last:,} steps, {plan.total_tokens:,} tokens, {plan.total_flops:.3g} FLOPs"),
        ("size", f"{plan.active_params:,.0f} active parameters, {plan.tokens_per_active_param:.1f} tokens each"),
        ("forecast from step", f"{forecast.first_step:,}"),
        ("final loss", f"{forecast.loss(last):.4f}"),
    ]
    for level in forecast.levels:
        lower, upper = forecast.interval(last, level=level)
        rows.append((f"{level:.0%} interval of the final loss", f"{lower:.4f} to {upper:.4f}"))
    lines = ["| forecast | |", "|---|---|", *(f"| {key} | {_plain(value)} |" for key, value in rows)]
    check = "\n".join(f"- {_plain(line)}" for line in forecast.check.message().splitlines())
    return "\n".join(lines) + "\n\nRecipe check:\n\n" + check


def _write(writer: "SummaryWriter", scalars: Mapping[str, float], step: int) -> None:
    """Write scalars as one record: `add_scalar` makes one of each, which for a dozen tags takes five times as long."""
    from tensorboard.compat.proto import summary_pb2

    proto: Any = summary_pb2  # Generated code: its names are not known statically.
    values = [proto.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    writer._get_file_writer().add_summary(proto.Summary(value=values), step)


def _plain(text: str) -> str:
    """Text that Markdown leaves as it is."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>#|" else c for c in text)


def _purge(writer: "SummaryWriter", step: int) -> None:
    """Tell TensorBoard that points of this run at `step` and later, written so far, are void."""
    from tensorboard.compat.proto import event_pb2

    proto: Any = event_pb2  # Generated code: its names are not known statically.
    file_writer = writer._get_file_writer()
    file_writer.add_event(proto.Event(step=step, file_version="brain.Event:2"))
    file_writer.add_event(proto.Event(step=step, session_log=proto.SessionLog(status=proto.SessionLog.START)))
