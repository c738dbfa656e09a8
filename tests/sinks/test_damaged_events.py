"""Whatever happens to an event log, reading it ends in events or in our own error."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trajectory_guard.detect.events import Event
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.forecast import Forecast
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.picture import RunRecord
from trajectory_guard.plan import RunPlan
from trajectory_guard.report import write_report
from trajectory_guard.sinks.jsonl import JsonlSink, read_events

JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2**70), st.floats(), st.text(max_size=4), st.just([]), st.just({"a": 1})
)
RELAXED = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def forecast() -> Forecast:
    plan = RunPlan(total_steps=900, tokens_per_step=64, active_params=1e4, schedule=LRSchedule(shape="linear"))
    g = np.linspace(0.02, 1, 50)
    return Forecast(plan, progress=g, loss=1 + g**-0.2, half_widths={0.8: 0.01, 0.95: 0.02})


@pytest.fixture(scope="module")
def log(tmp_path_factory, forecast) -> bytes:
    """A real event log of two attempts: a NaN, a jump, a resume at step 700."""
    path = tmp_path_factory.mktemp("events") / "events.jsonl"
    rng = np.random.default_rng(0)

    def loss(step: int) -> float:
        expected = np.nan_to_num(float(forecast.loss(step)), nan=4.0)
        return float("nan") if step == 30 else expected * (1.1 if step > 650 else 1) + 0.02 * rng.standard_normal()

    guard = TrajectoryGuard(forecast, sinks=[JsonlSink(path)])
    for step in range(1, 701):
        guard.observe(step, loss(step))
    state = guard.state_dict()
    for step in range(701, 750):
        guard.observe(step, loss(step))
    guard.close()
    resumed = TrajectoryGuard(forecast, sinks=[JsonlSink(path)])
    resumed.load_state_dict(state)
    with resumed:
        for step in range(701, 801):
            resumed.observe(step, loss(step))
    assert len(read_events(path)) >= 3
    return path.read_bytes()


def check(path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        found = read_events(path)
    except TrajectoryGuardError as error:
        assert path.name in str(error)
        return
    for step, event in found:
        assert isinstance(step, int) and isinstance(event, Event)
        assert isinstance(event.sentence, str) and isinstance(event.detected, int)


@RELAXED
@given(data=st.data())
def test_bytes_changed_removed_or_doubled(tmp_path, log, data):
    content = bytearray(log)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        length = data.draw(st.sampled_from([1, 7, 300]))
        insert = data.draw(
            st.sampled_from([b"", b"\n", b"{", b"\x00\xff", b"null", b"1e999", bytes(content[at : at + length])])
        )
        content[at : at + data.draw(st.sampled_from([0, length]))] = insert
    check(tmp_path / "e.jsonl", bytes(content))


@RELAXED
@given(data=st.data())
def test_one_wrong_value_in_one_line(tmp_path, log, data):
    lines = [json.loads(line) for line in log.splitlines()]
    line = data.draw(st.sampled_from(lines))
    key = data.draw(st.sampled_from(sorted(line)))
    if data.draw(st.booleans()):
        line[key] = data.draw(JUNK)
    else:
        del line[key]
    check(tmp_path / "e.jsonl", "\n".join(json.dumps(line) for line in lines).encode() + b"\n")


@settings(RELAXED, max_examples=3)
@given(data=st.data())
def test_what_can_be_read_can_be_reported(tmp_path, log, forecast, data):
    lines = [json.loads(line) for line in log.splitlines()]
    line = data.draw(st.sampled_from([line for line in lines if "kind" in line]))
    line[data.draw(st.sampled_from(sorted(set(line) - {"step"})))] = data.draw(JUNK)
    path = tmp_path / "e.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        events = [event for _, event in read_events(path)]
    except TrajectoryGuardError:
        return
    record = RunRecord(step=np.arange(1, 801), loss=np.full(800, 2.0), events=events)
    write_report(tmp_path / "r.html", forecast, record)
