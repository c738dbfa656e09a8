"""Console, JSONL, logger and W&B sinks: what they write, and what is still readable after a crash."""

import io
import json
import os
import sys
import time

import pytest

from trajectory_guard.detect.events import Event, Severity, Verdict
from trajectory_guard.errors import FileFormatError, TrajectoryGuardError
from trajectory_guard.forecast import Forecast
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan
from trajectory_guard.recipe import RecipeCheck
from trajectory_guard.sinks.base import FusedSink
from trajectory_guard.sinks.console import ConsoleSink, event_line, verdict_line
from trajectory_guard.sinks.jsonl import JsonlSink, read_events
from trajectory_guard.sinks.loggers import LoggerSink
from trajectory_guard.sinks.scalars import verdict_scalars

NAN = float("nan")


def forecast(check: RecipeCheck | None = None) -> Forecast:
    plan = RunPlan(total_steps=2000, tokens_per_step=64, active_params=1000, schedule=LRSchedule(shape="constant"))
    return Forecast(plan, progress=[0.1, 1.0], loss=[3.0, 2.0], half_widths={0.8: 0.02, 0.95: 0.04}, check=check)


def verdict(step: int = 567, *, events: tuple[Event, ...] = (), **changes) -> Verdict:
    values = {"loss": 2.7474, "forecast": 2.6522, "lower": 2.5, "upper": 2.8, "residual_nats": 0.0952}
    values |= {"residual_sigma": 1.9, "stage": "watching", "statistic": 31.0, "threshold": 22.3}
    return Verdict(step=step, events=events, **{**values, **changes})


def event(kind: str = "change_up", *, severity: Severity = Severity.WARNING, **changes) -> Event:
    values = {"state": "open", "onset": 540, "detected": 567, "sentence": "CUSUM 31.0 > 22.3 since about step 540."}
    return Event(kind=kind, severity=severity, **{**values, **changes})


def test_a_drifting_verdict_prints_as_one_line():
    assert verdict_line(verdict(events=(event(),)), 2000) == (
        "step    567/2,000 | loss 2.7474 | forecast 2.6522 [2.50, 2.80] | residual +3.6 % (+1.9 sigma) | "
        "CUSUM 31.0 > 22.3 | DRIFTED ABOVE since about step 540"
    )


def test_a_verdict_without_a_forecast_says_so_and_shows_no_nan():
    line = verdict_line(verdict(5, forecast=NAN, lower=NAN, upper=NAN, residual_nats=NAN, stage="no_forecast"), 2000)
    assert line == "step      5/2,000 | loss 2.7474 | no forecast yet"


def test_a_calibrating_verdict_shows_no_statistic():
    assert verdict_line(verdict(residual_sigma=NAN, stage="calibrating"), 2000).endswith("+3.6 % | calibrating")


def test_an_event_is_one_line_with_severity_step_and_rollback():
    line = event_line(event(rollback_step=400), 567)
    assert line == "!! WARNING at step 567: CUSUM 31.0 > 22.3 since about step 540. Roll back to step 400."
    assert event_line(event(state="closed", closed=1900), 1900).startswith("-- closed at step 1,900")


def test_an_event_of_one_step_is_told_by_its_severity_and_not_as_closed():
    moment = {"state": "closed", "closed": 567}
    assert event_line(event(**moment), 567).startswith("!! WARNING at step 567:")
    assert event_line(event(severity=Severity.INFO, **moment), 567).startswith("-- note at step 567:")


def test_a_rollback_that_the_sentence_names_is_not_said_twice():
    line = event_line(event(rollback_step=1000, sentence="the loss has risen; roll back to step 1000."), 1200)
    assert line == "!! WARNING at step 1,200: the loss has risen; roll back to step 1000."


@pytest.mark.parametrize(
    ("levels", "shown"), [((0.8, 0.95, 0.99), "95%"), ((0.8, 0.9), "90%"), ((0.99,), "99%"), ((0.8, 0.99), "95%")]
)
def test_the_console_opens_with_the_95_percent_interval_or_the_nearest_there_is(levels: tuple[float, ...], shown: str):
    stream = io.StringIO()
    table = Forecast(
        forecast().plan, progress=[0.1, 1.0], loss=[3.0, 2.0], half_widths={level: level / 10 for level in levels}
    )
    ConsoleSink(stream).start(table, resumed_step=None)
    assert f"] at {shown}" in stream.getvalue()


def test_the_console_opens_with_the_forecast_and_the_recipe_outcome():
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    sink.start(forecast(RecipeCheck(warnings=("data: fit 'a', plan 'b'",))), resumed_step=12)
    sink.verdict(verdict())
    sink.event(event(), step=567)
    sink.close()
    lines = stream.getvalue().splitlines()
    assert "final loss 2.0000 [1.9216, 2.0816] at 95%; resumed after step 12" in lines[0]
    assert lines[1] == "trajectory-guard: warning: data: fit 'a', plan 'b'"
    assert len(lines) == 4


def test_a_line_is_printed_above_a_progress_bar_not_into_it(capsys: pytest.CaptureFixture[str]):
    from tqdm import tqdm

    bar = tqdm(total=10, file=sys.stdout, ascii=True)
    bar.update(3)
    ConsoleSink().verdict(verdict())
    bar.close()
    for piece in capsys.readouterr().out.split("\r"):
        assert not ("it/s" in piece and "forecast" in piece), "bar and line share a line"


def test_events_are_readable_after_every_prefix_a_crash_may_leave(tmp_path):
    path = tmp_path / "folder" / "events.jsonl"
    sink = JsonlSink(path)
    sink.start(forecast(), resumed_step=None)
    for step in (567, 600):
        sink.event(event(detected=step, size_sigma=float("inf")), step=step)
    sink.close()
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    counts = set()
    for end in range(header, len(whole) + 1):
        path.write_bytes(whole[:end])
        counts.add(len(read_events(path)))
    assert counts == {0, 1, 2}
    assert read_events(path)[1][1].size_sigma is None


def test_a_resumed_log_voids_later_events_of_the_earlier_attempt(tmp_path):
    path = tmp_path / "events.jsonl"
    first = JsonlSink(path)
    first.start(forecast(), resumed_step=None)
    for step in (100, 200, 300):
        first.event(event(detected=step), step=step)
    first.close()
    path.write_bytes(path.read_bytes() + b'{"step": 301, "ki')  # As if the process had died here.
    second = JsonlSink(path)
    second.start(forecast(), resumed_step=200)
    second.event(event(detected=300), step=300)
    second.close()
    assert [step for step, _ in read_events(path)] == [100, 200, 300]
    third = JsonlSink(path)
    third.start(forecast(), resumed_step=None)
    third.close()
    assert read_events(path) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ""),
        ("nonsense\n", "line 1"),
        ('{"format": "other", "version": 1}\n', "expected 'trajectory-guard-events'"),
        ('{"format": "trajectory-guard-events", "version": 99}\n', "newer"),
        ('{"format": "trajectory-guard-events", "version": 1}\n[1]\n', "line 2"),
        ('{"format": "trajectory-guard-events", "version": 1}\n{"step": 3}\n', "line 2"),
        ('{"format": "trajectory-guard-events", "version": 1}\n{"st\n{"step": 3}\n', "line 2 is not valid JSON"),
    ],
)
def test_a_damaged_event_log_says_where(tmp_path, text: str, says: str):
    path = tmp_path / "events.jsonl"
    path.write_text(text)
    if not says:
        assert read_events(path) == []
        return
    with pytest.raises(FileFormatError, match=says):
        read_events(path)


def test_a_missing_event_log_says_so(tmp_path):
    with pytest.raises(FileFormatError, match="no event log"):
        read_events(tmp_path / "none.jsonl")


def test_lines_of_an_overridden_recipe_say_so(tmp_path):
    sink = JsonlSink(tmp_path / "events.jsonl")
    sink.start(forecast(RecipeCheck(errors=("tokenizer: fit 'a', plan 'b'",), overridden=True)), resumed_step=None)
    sink.close()
    header = json.loads((tmp_path / "events.jsonl").read_text())
    assert header["recipe_overridden"] == ["tokenizer: fit 'a', plan 'b'"]


def test_the_flag_is_up_while_a_warning_is_open():
    rows = []

    class Recorder:
        def log_metrics(self, metrics, step=None):
            rows.append((step, metrics.get("guard/flag")))

        def save(self):
            pass

    sink = LoggerSink(Recorder())
    sink.start(forecast(), resumed_step=None)
    sink.verdict(verdict(500))
    sink.event(event("outlier", severity=Severity.INFO), step=550)
    sink.verdict(verdict(550))
    sink.event(event(), step=567)
    sink.verdict(verdict(567))
    sink.event(event(state="closed", closed=700), step=700)
    sink.verdict(verdict(700))
    assert rows[1:] == [(500, 0.0), (550, 0.0), (567, 1.0), (700, 0.0)]


def test_the_flag_is_still_up_after_a_resume_within_an_event():
    rows = []

    class Recorder:
        def log_metrics(self, metrics, step=None):
            rows.append((step, metrics.get("guard/flag")))

        def save(self):
            pass

    def guard_with(*sinks: LoggerSink) -> TrajectoryGuard:
        return TrajectoryGuard(forecast(), sinks=sinks, log_every_n_steps=1)

    first = guard_with()
    first.observe(300, NAN)
    second = guard_with(LoggerSink(Recorder()))
    second.load_state_dict(first.state_dict())
    for step in range(301, 366):
        second.observe(step, 2.9)
    assert rows[1:] == [(step, float(step < 364)) for step in range(301, 366)]


def test_what_was_logged_before_a_saved_state_is_flushed_with_it():
    calls = []

    class Recorder:
        def log_metrics(self, metrics, step=None):
            calls.append(step)

        def save(self):
            calls.append("saved")

    guard = TrajectoryGuard(forecast(), sinks=[LoggerSink(Recorder())], log_every_n_steps=1)
    guard.state_dict()
    assert calls == []  # Nothing has begun.
    guard.observe(300, 2.9)
    guard.state_dict()
    assert calls[-2:] == [300, "saved"]
    guard.close()
    calls.clear()
    guard.state_dict()
    assert calls == []  # The sinks are closed.


def test_every_verdict_has_the_same_tags():
    nothing = verdict(5, forecast=NAN, lower=NAN, upper=NAN, residual_nats=NAN, residual_sigma=NAN)
    assert set(verdict_scalars(nothing, flag=False)) == set(verdict_scalars(verdict(), flag=True))


@pytest.mark.parametrize("name", ["", "a b", "/a", "a/", "a|b"])
def test_a_name_that_cannot_begin_a_tag_is_refused(name: str):
    with pytest.raises(TrajectoryGuardError, match="name"):
        LoggerSink(None, name=name)  # type: ignore[arg-type]


class Slow:
    """A sink each of whose calls takes as long as it is told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.delay_s = 0.0

    def start(self, forecast: Forecast, *, resumed_step: int | None) -> None:
        self._take("start")

    def verdict(self, verdict: Verdict) -> None:
        self._take("verdict")

    def event(self, event: Event, *, step: int) -> None:
        self._take("event")

    def flush(self) -> None:
        self._take("flush")

    def close(self) -> None:
        self._take("close")

    def _take(self, call: str) -> None:
        self.calls.append(call)
        time.sleep(self.delay_s)


@pytest.mark.parametrize("call", ["verdict", "event", "flush"])
def test_a_sink_that_blocks_is_waited_for_once_and_switched_off_with_one_message(
    call: str, caplog: pytest.LogCaptureFixture
):
    slow = Slow()
    sink = FusedSink(slow, slow_call_s=0.5)
    calls = {"verdict": lambda: sink.verdict(verdict()), "event": lambda: sink.event(event(), step=1)}
    calls["flush"] = sink.flush
    sink.start(forecast(), resumed_step=None)
    calls[call]()
    assert not caplog.records
    slow.delay_s = 0.6
    for _ in range(3):
        calls[call]()
    sink.close()
    assert slow.calls == ["start", call, call]
    (record,) = caplog.records
    assert (record.levelname, record.exc_info) == ("ERROR", None)
    assert f"in {call}(), over 0.5 s, and is switched off; training goes on" in record.getMessage()


def test_the_log_in_and_the_last_upload_of_a_sink_may_take_their_time(caplog: pytest.LogCaptureFixture):
    slow = Slow()
    sink = FusedSink(slow, slow_call_s=0.01)
    slow.delay_s = 0.05
    sink.start(forecast(), resumed_step=None)
    sink.close()
    assert slow.calls == ["start", "close"]
    assert not caplog.records


def test_a_full_disk_switches_the_sink_off_with_one_message(caplog: pytest.LogCaptureFixture):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    sink = FusedSink(JsonlSink("/dev/full"))
    sink.start(forecast(), resumed_step=None)
    sink.event(event(), step=1)
    sink.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "switched off" in caplog.text
