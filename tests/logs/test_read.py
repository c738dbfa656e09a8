"""read_log: rows as loggers write them, one curve as laws and guards need it."""

from pathlib import Path

import pytest

from trajectory_guard.errors import FileFormatError
from trajectory_guard.logs import read_log
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan
from trajectory_guard.recipe import Recipe

PLAN = RunPlan(
    total_steps=100,
    tokens_per_step=((1, 10), (51, 30)),
    active_params=1e6,
    schedule=LRSchedule(shape="cosine"),
    recipe=Recipe(vocab_size=256),
)


def write(folder: Path, text: str, name: str = "log.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_plain_csv_gives_curve_lr_and_channels(tmp_path: Path) -> None:
    log = read_log(write(tmp_path, "step,tokens,lr,loss,grad_norm\n1,8,0.1,3.5,1\n2,16,0.2,3.25,2\n"))
    assert log.curve.step.tolist() == [1, 2]
    assert log.curve.tokens.tolist() == [8, 16]
    assert log.curve.lr is not None and log.curve.lr.tolist() == [0.1, 0.2]
    assert log.channels["grad_norm"].tolist() == [1, 2]
    assert [row.channels["grad_norm"] for row in log.rows()] == [1, 2]
    assert log.notes == ()


def test_tokens_come_from_the_plan_where_the_log_has_none(tmp_path: Path) -> None:
    log = read_log(write(tmp_path, "step,loss\n50,3.5\n52,3.25\n"), plan=PLAN)
    assert log.curve.tokens.tolist() == [500, 560]
    assert log.curve.tokens_per_point is not None and log.curve.tokens_per_point.tolist() == [10, 30]
    assert "tokens are not logged: taken from the plan" in log.notes


def test_tokens_without_column_or_plan_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="pass a plan"):
        read_log(write(tmp_path, "step,loss\n1,3.5\n"))
