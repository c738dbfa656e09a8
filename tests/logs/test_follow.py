"""LogFollower: each logged loss once, whatever happens to the file and to the follower."""

import itertools
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajectory_guard.errors import FileFormatError, TrajectoryGuardError
from trajectory_guard.logs import LogFollower
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan

HEADER = "step,loss,lr\n"


def line(step: int, loss: float | None = None) -> str:
    return f"{step},{3.0 + 1 / step if loss is None else loss:.5f},0.1\n"


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def drain(follower: LogFollower) -> list[int]:
    """Poll until idle twice, as a watcher does between sleeps."""
    steps: list[int] = []
    for _ in range(4):
        steps += [row.step for row in follower.poll()]
    return steps


def again(follower: LogFollower, path: Path, **arguments: Any) -> LogFollower:
    """Another process continues from the state as it went through JSON."""
    other = LogFollower(path, **arguments)
    other.load_state_dict(json.loads(json.dumps(follower.state_dict(), allow_nan=False)))
    return other


def test_rows_come_once_with_channels(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    follower = LogFollower(path)
    assert follower.poll() == []
    path.write_text(HEADER + line(1) + line(2))
    rows = follower.poll() + follower.poll()
    assert [(row.step, row.loss, dict(row.channels)) for row in rows] == [(1, 4.0, {"lr": 0.1}), (2, 3.5, {"lr": 0.1})]
    assert follower.poll() == []
    append(path, line(3))
    assert drain(follower) == [3]


def test_partial_last_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(HEADER + line(1) + "2,3.")
    follower = LogFollower(path)
    assert drain(follower) == [1]
    append(path, "25,0.1\n")
    rows = follower.poll() + follower.poll()
    assert [(row.step, row.loss) for row in rows] == [(2, 3.25)]


def test_steps_from_zero_become_one_based_and_stay_so_after_a_restart_of_the_follower(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 0, "loss": 5.5}\n{"step": 1, "loss": 5.4}\n')
    follower = LogFollower(path)
    assert drain(follower) == [1, 2]
    follower = again(follower, path)
    append(path, '{"step": 2, "loss": 5.3}\n')
    assert drain(follower) == [3]


def test_log_calls_of_one_step_make_one_row(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"step": 1, "train": {"loss": 3.0}}\n{"step": 1, "lr": 0.1}\n{"step": 2, "train": {"loss": "NaN"}}\n'
    )
    rows = [row for follower in [LogFollower(path)] for _ in range(3) for row in follower.poll()]
    assert dict(rows[0].channels) == {"lr": 0.1}
    assert rows[1].step == 2 and math.isnan(rows[1].loss)


def test_rotated_file_is_read_to_its_end_first(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(HEADER + line(1) + line(2))
    follower = LogFollower(path)
    follower.poll()
    append(path, line(3))
    os.rename(path, tmp_path / "log.csv.1")
    follower = again(follower, path)
    path.write_text(line(4) + line(5))  # Many loggers write no header after a rotation.
    assert drain(follower) == [2, 3, 4, 5]


def test_rotated_file_still_written_to_is_followed_until_the_new_one_exists(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(HEADER + line(1))
    follower = LogFollower(path)
    follower.poll()
    os.rename(path, tmp_path / "log.csv.1")
    append(tmp_path / "log.csv.1", line(2))
    assert drain(follower) == [1, 2]


def test_truncated_file_starts_a_new_run(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(HEADER + "".join(line(s) for s in range(1, 6)))
    follower = LogFollower(path)
    follower.poll()
    path.write_text(HEADER + line(1, 7.0) + line(2, 6.0))
    assert drain(follower) == [5, 1, 2]


def test_file_written_anew_with_one_more_column_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(HEADER + "".join(line(s) for s in range(1, 6)))
    follower = LogFollower(path)
    assert drain(follower) == [1, 2, 3, 4, 5]
    rows = "".join(line(s).replace("\n", ",\n") for s in range(1, 6))
    path.write_text("step,loss,lr,val_loss\n" + rows + "6,3.1,0.1,\n7,3.0,0.1,3.3\n")
    assert drain(follower) == [6, 7]


def test_file_replaced_with_rows_up_to_a_checkpoint_goes_on_from_there(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(HEADER + "".join(line(s) for s in range(1, 11)))
    follower = LogFollower(path)
    assert drain(follower)[-1] == 10
    new = tmp_path / "new"
    new.write_text(HEADER + "".join(line(s) for s in range(1, 8)) + line(8, 2.0) + line(9, 1.9))
    os.replace(new, path)
    assert drain(again(follower, path)) == [8, 9]


def test_torn_lines_are_counted_and_survived(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(HEADER + line(1) + "2,3.1\n" + "\x00\x00\n" + "nan,3.0,0.1\n" + HEADER + line(3))
    follower = LogFollower(path)
    assert drain(follower) == [1, 3]
    assert follower.skipped == 2


def test_gzip_and_endless_lines_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\x1f\x8b" + b"\0" * 50 + b"\n")
    with pytest.raises(FileFormatError, match="gzip"):
        LogFollower(tmp_path / "a").poll()
    (tmp_path / "b").write_bytes(b"x" * (2**20 + 2))
    with pytest.raises(FileFormatError, match="no line end"):
        LogFollower(tmp_path / "b").poll()


def test_tokens_only_log_gets_its_steps_from_the_plan(tmp_path: Path) -> None:
    plan = RunPlan(
        total_steps=10, tokens_per_step=((1, 10), (6, 30)), active_params=1.0, schedule=LRSchedule(shape="constant")
    )
    path = tmp_path / "log.csv"
    path.write_text("tokens,loss\n10,3\n50,2.9\n80,2.8\n")
    follower = LogFollower(path, plan=plan)
    rows = follower.poll() + follower.poll()
    assert [(row.step, row.tokens) for row in rows] == [(1, 10.0), (5, 50.0), (6, 80.0)]


WHOLE = {"version": 1, "offset": None, "held": None, "recent": [], "skipped": 0, "tail": None}
TAIL = {"kind": "text", "inode": None, "position": 0, "print": "", "json": False, "header": None, "delimiter": ","}


@pytest.mark.parametrize(
    "state",
    [
        {},
        True,
        {"version": 2},
        {"version": 1, "offset": None, "held": 3},
        {**WHOLE, "held": {"step": "nan", "loss": 3.0}},
        {**WHOLE, "held": {"loss": 3.0}},
        {**WHOLE, "skipped": math.inf},
        {**WHOLE, "tail": {**TAIL, "delimiter": ",,"}},
        {**WHOLE, "tail": {**TAIL, "position": -1}},
    ],
)
def test_damaged_state_is_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    LogFollower(tmp_path / "log.csv").load_state_dict({**WHOLE, "tail": TAIL})
    with pytest.raises(TrajectoryGuardError, match="state"):
        LogFollower(tmp_path / "log.csv").load_state_dict(state)


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 400), max_size=12), restart=st.integers(0, 12), kind=st.sampled_from(["csv", "jsonl"])
)
def test_any_chunking_and_any_restart_gives_every_row_once(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], restart: int, kind: str
) -> None:
    folder = tmp_path_factory.mktemp("follow")
    path = folder / f"log.{kind}"
    steps = list(range(1, 20))
    if kind == "csv":
        text = HEADER + "".join(line(s) for s in steps)
    else:
        text = "".join(json.dumps({"step": s, "loss": 3 + 1 / s, "lr": 0.1}) + "\n" for s in steps)
    edges = sorted({0, *(min(c, len(text)) for c in cuts), len(text)})
    follower, seen = LogFollower(path), []
    for index, (a, b) in enumerate(itertools.pairwise(edges)):
        append(path, text[a:b])
        if index == restart:
            follower = again(follower, path)
        seen += [row.step for row in follower.poll()]
    seen += drain(follower)
    assert seen == steps
    shutil.rmtree(folder)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=80), max_size=6))
def test_any_bytes_are_survived(tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    path = folder / "log"
    follower = LogFollower(path)
    for chunk in chunks:
        with open(path, "ab") as file:
            file.write(chunk)
        try:
            follower.poll()
        except FileFormatError:
            break
        json.dumps(follower.state_dict(), allow_nan=False)
    shutil.rmtree(folder)
