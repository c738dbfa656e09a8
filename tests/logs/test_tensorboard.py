"""Event directories: what real writers wrote comes back, against TensorBoard's own reader."""

import contextlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajectory_guard.errors import FileFormatError, MissingExtraError
from trajectory_guard.logs import LogFollower, read_log, tensorboard
from trajectory_guard.logs.records import DamagedRecord, masked_crc32c, records
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan

writers = pytest.importorskip("torch.utils.tensorboard", reason="needs the extra trajectory-guard[torch]")

PLAN = RunPlan(total_steps=1000, tokens_per_step=8, active_params=1.0, schedule=LRSchedule(shape="constant"))


def log_steps(folder: Path, steps: range, *, suffix: str, base: float = 3.0, purge_step: int | None = None) -> None:
    # Names of event files hold their second; a suffix keeps two of one second in order.
    with writers.SummaryWriter(folder, filename_suffix=suffix, purge_step=purge_step) as writer:
        for step in steps:
            writer.add_scalar("train/loss", base + 1 / step, step)
            writer.add_scalar("lr", 0.5, step)
            if step % 10 == 0:
                writer.add_scalar("val/loss", base + 2 / step, step)


def test_scalars_equal_those_of_event_accumulator(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_steps(tmp_path, range(1, 101), suffix=".a")
    accumulator = accumulators.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    for split, tag in (("train", "train/loss"), ("validation", "val/loss")):
        expected = accumulator.Scalars(tag)
        log = read_log(tmp_path, plan=PLAN, split=split)
        assert log.step.tolist() == [event.step for event in expected]
        assert log.loss.tolist() == [event.value for event in expected]
    assert read_log(tmp_path, plan=PLAN).curve.lr is not None


def test_tensor_scalars_are_read(tmp_path: Path) -> None:
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path))
    for step, content in enumerate(
        [
            tensor_pb2.TensorProto(dtype=1, tensor_content=np.float32(3.5).tobytes()),
            tensor_pb2.TensorProto(dtype=1, float_val=[3.25]),
            tensor_pb2.TensorProto(dtype=2, double_val=[3.0]),
        ],
        start=1,
    ):
        value = summary_pb2.Summary.Value(tag="loss", tensor=content)
        writer.add_event(event_pb2.Event(step=step, summary=summary_pb2.Summary(value=[value])))
    writer.close()
    assert read_log(tmp_path, plan=PLAN).curve.loss.tolist() == [3.5, 3.25, 3.0]


def test_resume_with_purge_step_voids_what_came_after(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 31), suffix=".a")
    log_steps(tmp_path, range(25, 28), suffix=".b", base=4.0, purge_step=21)
    log = read_log(tmp_path, plan=PLAN)
    assert log.step.tolist() == [*range(1, 21), 25, 26, 27]
    assert log.loss[-1] == pytest.approx(4 + 1 / 27)


def test_killed_writer_counts_up_to_its_last_event_and_damage_is_named(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 31), suffix=".a")
    (file,) = tensorboard.event_files(tmp_path)
    data = file.read_bytes()
    file.write_bytes(data[:-7])
    assert read_log(tmp_path, plan=PLAN).step[-1] in (29, 30)
    middle = len(data) // 2
    file.write_bytes(data[:middle] + b"\xff" * 40 + data[middle + 40 :])
    log = read_log(tmp_path, plan=PLAN)
    assert 10 < log.step[-1] < 20 and any("damaged at byte" in note for note in log.notes)


def test_empty_and_foreign_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "events.out.tfevents.1.host"
    file.write_bytes(b"")
    with pytest.raises(FileFormatError, match="no scalars"):
        read_log(tmp_path)
    file.write_bytes(b"what is this, and why is it here?")
    with pytest.raises(FileFormatError, match="checksum"):
        read_log(tmp_path)
    with pytest.raises(FileFormatError, match="no such log"):
        read_log(tmp_path / "events.out.tfevents.2.host")


def test_follower_reads_a_growing_directory_once_through_its_own_restart(tmp_path: Path) -> None:
    follower = LogFollower(tmp_path)
    assert follower.poll() == []
    seen: list[tuple[int, float]] = []
    with writers.SummaryWriter(tmp_path) as writer:
        for step in range(1, 41):
            writer.add_scalar("lr", 0.5, step)
            writer.add_scalar("loss", 3.0 + step, step)
            writer.add_scalar("grad_norm", step, step)
            if step % 7 == 0:
                writer.flush()
                seen += [(row.step, row.channels["grad_norm"]) for row in follower.poll()]
                other = LogFollower(tmp_path)
                other.load_state_dict(json.loads(json.dumps(follower.state_dict(), allow_nan=False)))
                follower = other
    for _ in range(3):
        seen += [(row.step, row.channels["grad_norm"]) for row in follower.poll()]
    assert seen == [(step, float(step)) for step in range(1, 41)]


def test_follower_reads_the_next_files_of_a_restarted_run(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 6), suffix=".a")
    follower = LogFollower(tmp_path)
    steps = [row.step for _ in range(3) for row in follower.poll()]
    log_steps(tmp_path, range(4, 8), suffix=".b")
    steps += [row.step for _ in range(3) for row in follower.poll()]
    assert steps == [1, 2, 3, 4, 5, 4, 5, 6, 7]


def test_checksum_is_the_one_tensorboard_writes(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 3), suffix=".a")
    (file,) = tensorboard.event_files(tmp_path)
    found = list(records(file))
    assert len(found) == 1 + 4 and found[-1][1] == file.stat().st_size
    for data, after in found:
        stored = int.from_bytes(file.read_bytes()[after - 4 : after], "little")
        assert masked_crc32c(data) == stored


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 2000), junk=st.binary(min_size=1, max_size=30), cut=st.booleans())
def test_any_damage_is_read_around_or_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, junk: bytes, cut: bool
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damage"
    if not folder.exists():
        folder.mkdir()
        log_steps(folder, range(1, 21), suffix=".a")
        (file,) = tensorboard.event_files(folder)
        (folder / "whole").write_bytes(file.read_bytes())
    (file,) = tensorboard.event_files(folder)
    data = (folder / "whole").read_bytes()
    at = min(at, len(data))
    file.write_bytes(data[:at] + junk + (b"" if cut else data[at + len(junk) :]))
    with contextlib.suppress(FileFormatError):
        read_log(folder, plan=PLAN)
    follower = LogFollower(folder)
    follower.poll()
    follower.poll()


def test_damaged_length_is_not_trusted(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes((2**60).to_bytes(8, "little") + b"\0" * 20)
    with pytest.raises(DamagedRecord):
        list(records(file))


def test_absent_tensorboard_names_its_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(MissingExtraError, match=r"pip install \"trajectory-guard\[torch\]\""):
        read_log(tmp_path)
