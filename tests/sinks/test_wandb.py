"""WandbSink in an offline run, read back from the file that would be synced."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

wandb = pytest.importorskip("wandb")

from trajectory_guard.detect.events import Event, Severity, Verdict  # noqa: E402
from trajectory_guard.errors import TrajectoryGuardError  # noqa: E402
from trajectory_guard.forecast import Forecast  # noqa: E402
from trajectory_guard.lr_schedule import LRSchedule  # noqa: E402
from trajectory_guard.plan import RunPlan  # noqa: E402
from trajectory_guard.sinks.wandb import WandbSink  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # W&B's own.


def records(content: bytes) -> Iterator[bytes]:
    """The records of a W&B run file: a LevelDB log of 32 KiB blocks behind a header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # Whole, or the last part.
            yield parts
            parts = b""


def test_without_a_run_the_user_is_told_to_start_one():
    with pytest.raises(TrajectoryGuardError, match="wandb.init"):
        WandbSink()


def test_a_lagged_verdict_is_kept_on_the_guards_own_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    plan = RunPlan(total_steps=100, tokens_per_step=64, active_params=1000, schedule=LRSchedule(shape="constant"))
    table = Forecast(plan, progress=[0.0, 1.0], loss=[3.0, 2.0], half_widths={0.8: 0.02, 0.95: 0.04})
    with wandb.init(mode="offline", dir=tmp_path, project="guard") as run:
        sink = WandbSink()
        sink.start(table, resumed_step=None)
        for step in (1, 2, 3):
            run.log({"theirs": step})  # W&B's own step is ahead of the guard's.
        for step in (1, 2):
            sink.verdict(Verdict(step, 2.5, 2.9, 2.8, 3.0, -0.4, -1.0, "watching", 1.0, 16.0))
        flagged = Event(
            kind="spike", severity=Severity.WARNING, state="open", onset=2, detected=2, sentence="3 of 5 steps"
        )
        sink.event(flagged, step=2)
        sink.verdict(Verdict(2, 2.5, 2.9, 2.8, 3.0, -0.4, -1.0, "watching", 1.0, 16.0, (flagged,)))
        sink.close()
    wandb.teardown()  # Its service writes the file to the end.
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows, axes, alerts = [], [], []
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in items.items() if key.startswith("guard/")})
        if record.HasField("metric"):
            axes.append((record.metric.glob_name, record.metric.step_metric))
        if record.HasField("alert"):
            alerts.append(record.alert.text)
    assert ("guard/*", "guard/step") in axes
    assert [(row["guard/step"], row["guard/flag"]) for row in rows if row] == [(1, 0.0), (2, 0.0), (2, 1.0)]
    assert alerts in ([], ["3 of 5 steps"])
