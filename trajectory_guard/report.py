"""The report: one page about a run against its forecast; the subcommand `trajectory-guard report`.

It is made from a finished log by replay, or by `ReportSink` at the end of a run and at a stop.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trajectory_guard.commands import describe
from trajectory_guard.course import STRETCHES
from trajectory_guard.detect.events import Severity
from trajectory_guard.errors import MissingExtraError, TrajectoryGuardError
from trajectory_guard.files import atomic_write
from trajectory_guard.fit import DelphiFit, load_fit
from trajectory_guard.forecast import Forecast
from trajectory_guard.laws.calibrate import calibrate, calibration_window, outlook, recent_log_ratio
from trajectory_guard.picture import RunRecord
from trajectory_guard.record import KEPT_VERDICTS, RecordSink
from trajectory_guard.replay import log_arguments, open_log, replay
from trajectory_guard.report_figures import draw_ladder, draw_linear, draw_logarithmic, numbered, save_png, svg
from trajectory_guard.report_page import events_table, facts, figure, items, page, section, text_block
from trajectory_guard.sinks.jsonl import read_events

__all__ = ["ReportSink", "report_arguments", "report_command", "write_report"]

RECENT = 0.02
"""Share of the run's steps, the last ones, whose mean is called the loss now."""


class ReportSink(RecordSink):
    """Writes a report when the run ends or is stopped: a sink for any guard.

    It sees every step and keeps at most 4,000 of them, evenly spread. Of the steps before a resume it shows what the
    guard's state holds: means over stretches of half a percent of the run, and the latest 100 events.

    Args:
        path: the report, `.html` or `.png`; replaced when it exists.
        fit: the fit behind the forecast, to be drawn too.
        title: heading.

    Raises:
        MissingExtraError: matplotlib is not installed.
        TrajectoryGuardError: another ending.
    """

    every_step = True

    def __init__(self, path: str | Path, *, fit: DelphiFit | None = None, title: str = "") -> None:
        super().__init__()
        self.path = _checked(path)
        _need_matplotlib()
        self._fit, self._title = fit, title

    def close(self) -> None:
        """Write the report."""
        if self._forecast is None or not self._verdicts:
            return
        notes = ()
        if self._resumed is not None:
            length = max(1, round(self._forecast.plan.total_steps / STRETCHES))
            notes = (f"up to step {self._resumed:,}, before a resume, losses are means of {length:,} steps",)
        write_report(self.path, self._forecast, self.record(), fit=self._fit, title=self._title, notes=notes)


def write_report(
    path: str | Path,
    forecast: Forecast,
    record: RunRecord,
    *,
    fit: DelphiFit | None = None,
    title: str = "",
    notes: Sequence[str] = (),
) -> None:
    """Write the report of a run: loss, residual and statistic, events, calibration, outlook, recipe check, ladder, fit.

    Args:
        path: `.html`, one page that needs no network, or `.png`.
        forecast: what was expected.
        record: what was observed; the statistic may be NaN where it is not known.
        fit: the fit behind the forecast, to be drawn too.
        title: heading.
        notes: what should be said about how the log was read.

    Raises:
        MissingExtraError: matplotlib is not installed.
        TrajectoryGuardError: another ending, or no observations.
    """
    target = _checked(path)
    _need_matplotlib()
    if not len(record.step):
        raise TrajectoryGuardError("nothing to report: no step was observed")
    title = title or f"{forecast.plan.metric} ({forecast.plan.split}) against its forecast"
    drawn = bool(np.any(np.isfinite(record.loss) & (record.loss > 0)))
    shown_fit = fit if fit is not None and fit.rungs else None
    if target.suffix.lower() == ".png":
        figures = [draw_linear(forecast, record), draw_logarithmic(forecast, record)] if drawn else []
        figures += [draw_ladder(shown_fit, forecast)] if shown_fit is not None else []
        save_png(figures, _words(title, forecast, record), target)
        return
    text = _page(title, forecast, record, fit, shown_fit, drawn, notes)
    with atomic_write(target) as file:
        file.write(text)


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `trajectory-guard report`."""
    parser.add_argument("fit", type=Path, help="fit (JSON)")
    parser.add_argument("log", type=Path, help="log of the run: CSV, JSONL, TensorBoard folder, trainer_state.json")
    log_arguments(parser)
    parser.add_argument("--events", type=Path, help="event log of the run (JSONL): show these, not those of the replay")
    parser.add_argument("-o", "--output", type=Path, required=True, help="report to write (.html or .png)")


def report_command(args: argparse.Namespace) -> int:
    """Replay a log and write its report."""
    _checked(args.output)
    _need_matplotlib()
    fit = load_fit(args.fit)
    forecast, log, notes = open_log(args, fit, args.log)
    for text in notes:
        print(f"note: {text}", file=sys.stderr)
    kept = RecordSink()
    print(f"judging {len(log.step):,} steps ...", file=sys.stderr)
    result = replay(
        forecast, log.rows(with_channels=False), sinks=[kept], log_every_n_steps=max(1, len(log.step) // KEPT_VERDICTS)
    )
    sampled, events = kept.record(), result.guard.events
    if args.events:
        events = tuple({(event.kind, event.detected): event for _, event in read_events(args.events)}.values())
    first = int(np.searchsorted(log.step, 1))
    step, loss = log.step[first:], log.loss[first:]
    statistic, threshold = np.full(len(step), np.nan), np.full(len(step), np.nan)
    at = np.searchsorted(step, sampled.step)
    statistic[at], threshold[at] = sampled.statistic, sampled.threshold
    record = RunRecord(step=step, loss=loss, statistic=statistic, threshold=threshold, events=events)
    write_report(args.output, forecast, record, fit=fit, title=f"{args.log} against its forecast", notes=notes)
    print(_verdict(forecast, record)[0])
    print(f"wrote {args.output}")
    return 0


def _checked(path: str | Path) -> Path:
    if Path(path).suffix.lower() not in (".html", ".png"):
        raise TrajectoryGuardError(f"a report is written as .html or .png, got {path}")
    return Path(path)


def _need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", "report") from error


def _verdict(forecast: Forecast, record: RunRecord) -> tuple[str, bool]:
    """The run in one sentence, and whether it is good news."""
    marked = [event for _, event in numbered(record.events)]
    reached = f"{record.step[-1]:,} of {forecast.plan.total_steps:,} steps"
    if not marked:
        return f"Nothing was flagged over {reached}.", True
    # An open event weighs more than a closed one of the same severity, an earlier one more than a later.
    worst = max(marked, key=lambda event: (event.severity, event.state == "open", -event.detected))
    since = "" if worst.onset is None else f" since about step {worst.onset:,}"
    until = "still open" if worst.state == "open" else f"over at step {worst.closed or worst.detected:,}"
    more = f", and {len(marked) - 1} more" if len(marked) > 1 else ""
    return (
        f"{worst.severity.name} {worst.kind}{since}, flagged at {worst.detected:,}, {until}{more} ({reached}).",
        False,
    )


def _facts(forecast: Forecast, record: RunRecord) -> list[tuple[str, str]]:
    """The numbers that a reader looks for first."""
    last, end = int(record.step[-1]), forecast.plan.total_steps
    level = min(max(0.8, forecast.levels[0]), forecast.levels[-1])
    pairs = [("reached", f"step {last:,} of {end:,} ({forecast.plan.progress(last):.0%} of the tokens)")]
    recent = (record.step > last - max(1, RECENT * last)) & np.isfinite(record.loss)
    if recent.any():
        loss, expected = float(record.loss[recent].mean()), float(np.mean(forecast.loss(record.step[recent])))
        pairs.append(("loss now (mean of the last 2 % of steps)", f"{loss:.4f} nats"))
        if np.isfinite(expected):
            width = float(np.mean(forecast.half_width(record.step[recent], level)))
            lower, upper = expected * np.exp(-width), expected * np.exp(width)
            pairs.append(("forecast there", f"{expected:.4f} nats, {level:.0%} interval {lower:.4f} to {upper:.4f}"))
            pairs.append(("residual there", f"{100 * (loss / expected - 1):+.2f} %"))
    lower, upper = forecast.interval(end, level)
    final = f"{forecast.loss(end):.4f} nats, {level:.0%} interval {lower:.4f} to {upper:.4f}"
    pairs.append(("final loss, as forecast before the run", final))
    if last >= calibration_window(forecast.plan)[1]:
        pairs.append(("final loss, calibrated on the start of the run", _calibrated(forecast, record)))
    ratio = recent_log_ratio(forecast, record.step, record.loss)
    seen = None if ratio is None else outlook(forecast, last, ratio, level=level)
    if seen is not None:
        words = f"{seen.loss:.4f} nats, {seen.level:.0%} interval {seen.lower:.4f} to {seen.upper:.4f}"
        pairs.append(("outlook: final loss, given the run so far", words))
    return pairs


def _calibrated(forecast: Forecast, record: RunRecord) -> str:
    """What calibration makes of the forecast's end, and by how much; the run is judged without it."""
    try:
        made = calibrate(forecast, record.step, record.loss)
    except TrajectoryGuardError as error:
        return f"none: {error}"
    return f"{made.forecast.loss(forecast.plan.total_steps):.4f} nats; {made.describe()}; nothing is judged against it"


def _words(title: str, forecast: Forecast, record: RunRecord) -> list[str]:
    """The text of a report as a picture."""
    lines = [title, _verdict(forecast, record)[0], ""]
    lines += [f"{name}: {value}" for name, value in _facts(forecast, record)]
    lines += [f"recipe check: {line}" for line in forecast.check.message().splitlines()]
    return lines + [f"event {number}: step {e.detected:,}: {e.sentence}" for number, e in numbered(record.events)[:12]]


def _page(
    title: str,
    forecast: Forecast,
    record: RunRecord,
    fit: DelphiFit | None,
    shown_fit: DelphiFit | None,
    drawn: bool,
    notes: Sequence[str],
) -> str:
    plan = forecast.plan
    verdict, good = _verdict(forecast, record)
    sections = [facts(_facts(forecast, record))]
    if drawn:
        label = "Loss against forecast and interval, residual in percent, change statistic under its threshold"
        linear = svg(lambda: draw_linear(forecast, record), label=label)
        caption = (
            "Top: loss with the forecast and its intervals. Middle: residual in percent of the forecast, inside the "
            "same intervals. Bottom: change statistic over its threshold; it alarms at 1. Lines across all panels: "
            "where an event was flagged, dotted where it began; numbers as in the table below."
        )
        sections.append(section("The run", figure(linear, caption)))
    else:
        sections.append(section("The run", "<p>No loss was finite and positive: there is nothing to draw.</p>"))
    info = [event for event in record.events if event.severity < Severity.WARNING]
    sections.append(section("Events", events_table(numbered(record.events), info)))
    if drawn:
        logarithmic = svg(lambda: draw_logarithmic(forecast, record), label="The same on logarithmic axes")
        sections.append(
            section("The same on logarithmic axes", figure(logarithmic, "The start of the run, spread out."))
        )
    compute = f"{plan.total_flops:.3g} FLOPs ({plan.flops_convention})"
    rows = [
        ("law", forecast.law),
        ("watched", f"{plan.split} {plan.metric}, nats per token"),
        ("horizon", f"{plan.total_steps:,} steps, {plan.total_tokens:,} tokens, {compute}"),
        ("size", f"{plan.active_params:,.0f} active parameters, {plan.tokens_per_active_param:.1f} tokens each"),
        ("forecast from step", f"{forecast.first_step:,}"),
        *(
            (f"final loss, {v:.0%} interval", "{:.4f} to {:.4f} nats".format(*forecast.interval(plan.total_steps, v)))
            for v in forecast.levels
        ),
    ]
    check = section("Recipe check", items(forecast.check.message().splitlines()))
    sections += [section("The forecast", facts(rows)), check]
    if fit is not None:
        parts = [text_block("rungs, interval and back-test of the fit", describe(fit))]
        if shown_fit is not None:
            drawing = svg(lambda: draw_ladder(shown_fit, forecast), label="Ladder and fit behind the forecast")
            caption = "Left: rungs, fit (dotted) and forecast along training. Right: loss over compute."
            parts.insert(0, figure(drawing, caption))
        sections.append(section("Ladder and fit behind the forecast", *parts))
    if notes:
        sections.append(section("How the log was read", items(notes)))
    return page(title, verdict, good=good, sections=sections)
