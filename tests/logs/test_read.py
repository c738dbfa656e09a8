"""read_log: rows as loggers write them, one curve as laws and guards need it."""

import csv
import gzip
import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajectory_guard.errors import FileFormatError, TrajectoryGuardError
from trajectory_guard.logs import read_log, table
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


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_delimiter_byte_order_mark_and_gzip_are_no_obstacle(tmp_path: Path, delimiter: str) -> None:
    text = "\ufeffstep,tokens,loss\r\n1,8,3.5\r\n2,16,3.25\r\n".replace(",", delimiter)
    path = tmp_path / "log.csv"  # The name does not say gzip; the bytes do.
    path.write_bytes(gzip.compress(text.encode()))
    assert read_log(path).curve.loss.tolist() == [3.5, 3.25]


def test_tokens_come_from_the_plan_where_the_log_has_none(tmp_path: Path) -> None:
    log = read_log(write(tmp_path, "step,loss\n50,3.5\n52,3.25\n"), plan=PLAN)
    assert log.curve.tokens.tolist() == [500, 560]
    assert log.curve.tokens_per_point is not None and log.curve.tokens_per_point.tolist() == [10, 30]
    assert "tokens are not logged: taken from the plan" in log.notes


def test_tokens_without_column_or_plan_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="pass a plan"):
        read_log(write(tmp_path, "step,loss\n1,3.5\n"))


def test_tokens_as_the_axis_become_steps_through_the_batch_ramp(tmp_path: Path) -> None:
    for text, axis in (("tokens,loss\n100,3.5\n560,3.25\n", "auto"), ("step,loss\n100,3.5\n560,3.25\n", "tokens")):
        log = read_log(write(tmp_path, text), plan=PLAN, axis=axis)
        assert log.curve.step.tolist() == [10, 52]
        assert log.curve.tokens.tolist() == [100, 560]


def test_tokens_that_contradict_the_plan_are_told(tmp_path: Path) -> None:
    log = read_log(write(tmp_path, "step,tokens,loss\n10,1000,3.5\n20,2000,3.25\n"), plan=PLAN)
    assert any("differ from the plan's" in note for note in log.notes)
    off_by_one = read_log(write(tmp_path, "step,tokens,loss\n10,90,3.5\n20,190,3.25\n"), plan=PLAN)
    assert off_by_one.notes == ()


def test_restart_counter_of_tokens_is_replaced_by_the_plans(tmp_path: Path) -> None:
    log = read_log(write(tmp_path, "step,tokens,loss\n1,10,3.5\n2,20,3.25\n3,10,3.1\n"), plan=PLAN)
    assert log.curve.tokens.tolist() == [10, 20, 30]
    assert "do not rise" in log.notes[-1]


def test_several_files_are_attempts_of_one_run(tmp_path: Path) -> None:
    first = write(tmp_path, "step,tokens,loss\n1,8,3.5\n2,16,3.25\n3,24,9.0\n", "a.csv")
    second = write(tmp_path, '{"step": 3, "tokens": 24, "loss": 3.0, "lr": 0.1}\n', "b.jsonl")
    log = read_log([first, second])
    assert log.curve.loss.tolist() == [3.5, 3.25, 3.0]
    assert np.isnan(log.channels["lr"]).tolist() == [True, True, False]


def test_nan_losses_are_kept_for_replay_and_left_out_of_the_curve(tmp_path: Path) -> None:
    log = read_log(write(tmp_path, "step,tokens,loss\n1,8,3.5\n2,16,nan\n3,24,inf\n4,32,\n5,40,3.0\n"))
    assert log.curve.step.tolist() == [1, 5]
    assert log.step.tolist() == [1, 2, 3, 5]
    assert "2 losses that are not finite" in log.notes[-1]
    assert [row.step for row in log.rows() if not math.isfinite(row.loss)] == [2, 3]


def test_header_and_torn_lines_of_a_restart_are_overcome(tmp_path: Path) -> None:
    text = "step,tokens,loss\n1,8,3.5\n2,16,3.2\n3,2\nstep,tokens,loss,lr\n2,16,3.1,0.1\n3,24,3.0,0.1\n4,32,2.9x"
    log = read_log(write(tmp_path, text))
    assert log.curve.loss.tolist() == [3.5, 3.1, 3.0]
    assert any("torn" in note for note in log.notes) and any("header" in note for note in log.notes)


def test_rows_of_one_step_written_apart_are_joined(tmp_path: Path) -> None:
    # Lightning's CSVLogger: one row per log call, steps counted from 0, learning rate and validation apart.
    rows = ["epoch,step,lr-AdamW,train_loss,val_loss"]
    for step in range(49, 300, 50):
        rows += [f"0,{step},0.001,,", f"0,{step},,{5 - step / 100},", f"0,{step},,,{5.1 - step / 100}"]
    folder = tmp_path / "version_0"
    folder.mkdir()
    write(folder, "\n".join(rows) + "\n", "metrics.csv")
    train = read_log(folder, plan=PLAN)
    assert train.curve.step.tolist() == [50, 100, 150, 200, 250, 300]
    assert train.curve.lr is not None and set(train.curve.lr) == {0.001}
    validation = read_log(folder, plan=PLAN, split="validation")
    assert validation.curve.loss[0] == pytest.approx(5.1 - 0.49)
    assert validation.curve.tokens_per_point is None


def test_validation_is_never_read_from_a_training_column(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="no validation 'loss'"):
        read_log(write(tmp_path, "step,tokens,loss\n1,8,3.5\n"), split="validation")


def test_split_column_keeps_train_and_validation_apart(tmp_path: Path) -> None:
    path = write(tmp_path, "step,tokens,split,loss\n1,8,train,3.5\n1,8,val,3.6\n2,16,train,3.4\n")
    assert read_log(path).curve.loss.tolist() == [3.5, 3.4]
    assert read_log(path, split="validation").curve.loss.tolist() == [3.6]


def test_file_of_several_runs_asks_which(tmp_path: Path) -> None:
    path = write(tmp_path, "run,step,tokens,loss\na,1,8,3.5\nb,1,8,3.6\n")
    with pytest.raises(FileFormatError, match="holds 2 runs"):
        read_log(path)
    assert read_log(path, run="b").curve.loss.tolist() == [3.6]
    with pytest.raises(FileFormatError, match="no run 'c'"):
        read_log(path, run="c")


def test_wandb_chart_export(tmp_path: Path) -> None:
    text = (
        '"Step","big - run - train/loss","big - run - train/loss__MIN","big - run - train/loss__MAX",'
        '"twin - train/loss"\n'
        '"10","3.5","3.5","3.5","3.6"\n"20","3.25","3.25","3.25",""\n'
    )
    log = read_log(write(tmp_path, text), plan=PLAN, run="big - run")
    assert log.curve.loss.tolist() == [3.5, 3.25]
    assert read_log(write(tmp_path, text), plan=PLAN, run="twin").curve.step.tolist() == [10]
    with pytest.raises(FileFormatError, match="choose one"):
        read_log(write(tmp_path, text), plan=PLAN)


def test_jsonl_nested_names_and_text_numbers(tmp_path: Path) -> None:
    lines = [
        {"_step": 0, "trainer/global_step": 1, "train": {"loss": 3.5, "optim": {"lr": 1e-3}}, "note": "warm"},
        {"_step": 1, "trainer/global_step": 2, "train": {"loss": "NaN"}, "hist": [1, 2]},
        {"_step": 2, "trainer/global_step": 3, "train": {"loss": 3.0}, "ok": True},
    ]
    path = write(tmp_path, "\n".join(map(json.dumps, lines)) + '\n{"trainer/glob', "log.jsonl")
    log = read_log(path, plan=PLAN)
    assert log.step.tolist() == [1, 2, 3] and log.curve.step.tolist() == [1, 3]
    assert "the last line is cut off: left out" in log.notes
    assert log.channels["train/optim/lr"][0] == 1e-3


def test_trainer_state_is_a_window_mean_and_its_zeros_are_nan(tmp_path: Path) -> None:
    history = [{"step": s, "loss": 0.0 if s == 30 else 5 - s / 100, "learning_rate": 1e-3} for s in range(10, 60, 10)]
    history += [{"step": 50, "eval_loss": 4.6}, {"step": 50, "train_runtime": 3.0, "train_loss": 4.5}]
    for step in (9, 50):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        content = {"logging_steps": 10, "log_history": history[:1] if step == 9 else history}
        (folder / "trainer_state.json").write_text(json.dumps(content, indent=2))
    log = read_log(tmp_path, plan=PLAN)
    assert log.step.tolist() == [10, 20, 30, 40, 50] and math.isnan(log.loss[2])
    assert log.curve.tokens_per_point is not None and log.curve.tokens_per_point[0] == 100
    assert any("mean since the log before it" in note for note in log.notes)
    assert read_log(tmp_path, plan=PLAN, split="validation").curve.loss.tolist() == [4.6]


@pytest.mark.parametrize(("factor", "unit"), [(1 / math.log(2), "bits"), (1.0, "nats")])
def test_bits_labelled_as_nats_show_in_the_first_loss(tmp_path: Path, factor: float, unit: str) -> None:
    path = write(tmp_path, f"step,loss\n1,{math.log(256) * factor}\n2,{5.0 * factor}\n")
    log = read_log(path, plan=PLAN)
    assert log.unit == unit and log.curve.loss == pytest.approx([math.log(256), 5.0])
    told = read_log(path, plan=PLAN, unit="nats")
    assert told.curve.loss[0] == pytest.approx(math.log(256) * factor)
    assert any("check it" in note for note in told.notes) == (unit == "bits")


def test_units_are_converted(tmp_path: Path) -> None:
    assert read_log(write(tmp_path, "step,tokens,loss\n1,1,20\n"), unit="perplexity").curve.loss[0] == math.log(20)
    assert read_log(write(tmp_path, "step,tokens,loss\n1,1,2\n"), unit="bits").curve.loss[0] == 2 * math.log(2)


def test_smoothed_log_is_named_and_promises_no_noise(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    raw = 3 + 0.02 * rng.standard_normal(3000)
    smooth = np.convolve(raw, np.ones(20) / 20, mode="valid")
    rows = "".join(f"{s + 1},{loss}\n" for s, loss in enumerate(smooth))
    log = read_log(write(tmp_path, "step,loss\n" + rows), plan=PLAN)
    assert log.curve.tokens_per_point is None
    assert any("looks smoothed" in note for note in log.notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ("1,2,3\n4,5,6\n", "not a header"),
        ("a,b\n1,2\n", "no train 'loss'"),
        ("loss,lr\n1,2\n", "no column counts steps or tokens"),
        ("step,tokens,loss\n1,8,high\n2,16,3\n", "line 2: loss is 'high'"),
        ("step,tokens,loss\n1.5,8,3\n2,16,3\n", "whole steps"),
        ("step,tokens,loss\n-1,8,3\n2,16,3\n", "expected counts"),
        ("step,tokens,loss\n1e30,8,3\n2,16,3\n", "expected counts"),
        ("step,tokens,loss\n1,8,nan\n", "none of its 1 losses"),
        ("step,tokens,loss\n1,8,0\n", "none of its 1 losses"),
        ("step,tokens,loss\n" + "1,2\n" * 20, "is it a CSV file"),
        ('step,tokens,loss\n"1,8,3\n', "is it a CSV file|no row has both|no train"),
        ("[1, 2]\n", "JSON array"),
        ("{}\n", "no train 'loss'"),
        ('{"step": 1}\n[]\n', "not an object"),
        ('{"step": 1}\nnot json\n{"step": 2}\n', "line 2"),
        ('{\n"step": 1,\n', "not valid JSON"),
        ('{"log_history": []}', "no `log_history`"),
        ('{"log_history": [1]}', "is not an object"),
        ('{"a": ' * 100_000, "line 1|not valid JSON"),
        ('{"step": 1, "loss": ' + "9" * 5000 + "}\n", "digit|none of its"),
    ],
)
def test_malformed_logs_say_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        read_log(write(tmp_path, text))


def test_wrong_places_and_arguments(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="no such log"):
        read_log(tmp_path / "absent.csv")
    with pytest.raises(FileFormatError, match="holds no event files"):
        read_log(tmp_path)
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(gzip.compress(b"step,tokens,loss\n" + b"1,8,3\n" * 5000)[:-20])
    with pytest.raises(FileFormatError, match="gzip"):
        read_log(path)
    (tmp_path / "latin.csv").write_bytes(b"step,loss\n1,\xff\n")
    with pytest.raises(FileFormatError, match="UTF-8"):
        read_log(tmp_path / "latin.csv")
    for arguments in ({"unit": "digits"}, {"split": "test"}, {"axis": "time"}):
        with pytest.raises(TrajectoryGuardError, match="must be one of"):
            read_log(path, **arguments)


def test_size_limits_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "step,tokens,loss\n" + "1,8,3\n" * 100)
    with monkeypatch.context() as patch:
        patch.setattr(table, "MAX_LOG_BYTES", 100)
        with pytest.raises(FileFormatError, match="more than 100 bytes"):
            read_log(path)
    with monkeypatch.context() as patch:
        patch.setattr(table, "MAX_CELLS", 100)
        with pytest.raises(FileFormatError, match="more than 100 numbers"):
            read_log(path)
    with pytest.raises(FileFormatError, match="longer than"):
        read_log(write(tmp_path, "x" * 2**21))


def test_public_per_step_log_reads_like_the_csv_module_reads_it(shared_data: Path) -> None:
    path = shared_data / "faults" / "local" / "healthy_s0.csv"
    with open(path) as file:
        expected = list(csv.DictReader(file))
    log = read_log(path, plan=PLAN)
    assert log.curve.step.tolist() == [int(row["step"]) + 1 for row in expected]
    assert log.curve.loss.tolist() == [float(row["loss"]) for row in expected]
    assert log.channels["grad_norm"].tolist() == [float(row["grad_norm"]) for row in expected]
    assert log.unit == "nats" and log.autocorrelation is not None and abs(log.autocorrelation) < 0.05
    assert log.notes[0].startswith("steps counted from 0")


def test_public_ladder_file_gives_each_of_its_runs(shared_data: Path) -> None:
    path = shared_data / "ladders" / "olmo.csv.gz"
    runs = defaultdict(list)
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            if row["loss"]:
                runs[row["run"]].append((int(row["step"]), float(row["loss"])))
    for run in list(runs)[::10]:
        log = read_log(path, run=run)
        assert dict(zip(log.step.tolist(), log.loss.tolist(), strict=True)).items() <= set(runs[run])


CELLS = st.sampled_from(
    ["1", "2", "3", "10", "nan", "inf", "-1", "1e400", "", "x", '"', "step", "loss", "1_0", "é", "\x00"]
)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.lists(CELLS, max_size=4), max_size=8), st.sampled_from([None, PLAN]))
def test_any_table_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], plan: RunPlan | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_text("step,tokens,loss\n" + "\n".join(",".join(row) for row in rows))
    try:
        log = read_log(path, plan=plan)
    except FileFormatError:
        return
    assert np.all(np.isfinite(log.curve.loss)) and len(list(log.rows())) == len(log.step)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["step", "loss", "tokens", "log_history", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(JSON, max_size=4), st.booleans())
def test_any_json_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, entries: list, state: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text(json.dumps({"log_history": entries}) if state else "\n".join(map(json.dumps, entries)))
    try:
        read_log(path, plan=PLAN)
    except FileFormatError:
        return


@settings(max_examples=120, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"", b"step,loss\n", b"\x1f\x8b", b"{"]))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, start: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(start + data)
    try:
        read_log(path, plan=PLAN)
    except FileFormatError:
        return
