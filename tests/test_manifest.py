import re
from pathlib import Path

import numpy as np
import pytest

from trajectory_guard.__main__ import main
from trajectory_guard.errors import FileFormatError
from trajectory_guard.fit import load_fit
from trajectory_guard.manifest import read_manifest

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "formats.md"


def write_log(path: Path, *, tokens_per_step: int, steps: int = 1000, first: int = 1, scale: float = 1.0) -> None:
    step = np.arange(first, steps + 1)
    loss = scale * (1.5 + 3 * (tokens_per_step * step) ** -0.15)
    norm = 1.0 + 0.002 * step + 0.1 * (step % 3)
    rows = "\n".join(f"{s},{v:.6f},{n:.3f},{n - 2:.3f}" for s, v, n in zip(step, loss, norm, strict=True))
    path.write_text(f"step,loss,grad_norm,router/bias\n{rows}\n")


@pytest.fixture
def documented(tmp_path: Path) -> Path:
    """The manifest printed in docs/formats.md, with logs beside it."""
    (text,) = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    path = tmp_path / "ladder.toml"
    path.write_text(text)
    write_log(tmp_path / "small.csv", tokens_per_step=1600)
    write_log(tmp_path / "large-seed0.csv", tokens_per_step=6400)
    write_log(tmp_path / "large-seed1.csv", tokens_per_step=6400, steps=700)
    write_log(tmp_path / "large-seed1-restart.csv", tokens_per_step=6400, first=601)
    return path


def test_the_documented_manifest_reads_with_seeds_and_attempts(documented):
    ladder, notes = read_manifest(documented)
    small, large = ladder.rungs
    assert (small.name, small.plan.active_params, small.plan.total_steps) == ("small", 10_000, 1000)
    assert (small.plan.recipe.vocab_size, small.plan.schedule.warmup) == (256, 0.03)
    assert [len(curve) for curve in large.curves] == [1000, 1000]
    assert any("restart" in note for note in notes)


def test_named_columns_are_carried_seed_by_seed_and_stitched(documented):
    small, large = read_manifest(documented).ladder.rungs
    assert sorted(small.channels) == ["grad_norm"]
    assert [len(series.value) for series in large.channels["grad_norm"]] == [1000, 1000]
    assert large.channels["grad_norm"][1].value[[0, 999]].tolist() == [1.102, 3.1]


def test_values_that_are_missing_or_not_finite_are_left_out_of_a_channel(documented, tmp_path):
    lines = (tmp_path / "small.csv").read_text().splitlines()
    lines[10] = ",".join([*lines[10].split(",")[:2], "nan", "0"])
    lines[20] = ",".join([*lines[20].split(",")[:2], "", "0"])
    (tmp_path / "small.csv").write_text("\n".join(lines) + "\n")
    small = read_manifest(documented).ladder.rungs[0]
    (series,) = small.channels["grad_norm"]
    assert len(series.value) == 998 and len(small.curves[0]) == 1000


def test_a_column_that_one_log_lacks_is_refused_with_those_it_has(documented, tmp_path):
    path = tmp_path / "large-seed0.csv"
    path.write_text(path.read_text().replace("grad_norm", "gnorm", 1))
    with pytest.raises(FileFormatError) as caught:
        read_manifest(documented)
    assert "rung 'large': log large-seed0.csv has no columns ['grad_norm']" in str(caught.value)
    assert "['gnorm', 'router/bias']" in str(caught.value)


def test_channels_go_from_the_manifest_into_fit_and_forecast(documented, tmp_path, capsys):
    documented.write_text(documented.read_text().replace('["grad_norm"]', '["grad_norm", "router/bias"]', 1))
    fit_path = tmp_path / "fit.json"
    assert main(["fit", str(documented), "-o", str(fit_path), "--law", "matched-progress"]) == 0
    said = capsys.readouterr().out
    assert main(["inspect", str(fit_path)]) == 0
    for text in (said, capsys.readouterr().out):
        lines = [line for line in text.splitlines() if line.startswith("channel ")]
        assert lines[0].startswith("channel grad_norm: 1.1") and "nearest 0." in lines[0] and "%" in lines[0]
        assert lines[1].startswith("channel router/bias: -0.") and "trend unknown" in lines[1] and "%" not in lines[1]
    fit = load_fit(fit_path)
    course = fit.forecast(fit.rungs[-1].plan).channels["grad_norm"]
    assert course.at(np.array([0.5, 1.0])) == pytest.approx([2.1, 3.1], rel=0.01)


def test_fit_forecast_inspect_and_backtest_run_from_the_command_line(documented, tmp_path, capsys):
    fit_path, plan_path, csv_path = tmp_path / "fit.json", tmp_path / "plan.json", tmp_path / "out" / "forecast.csv"
    assert main(["fit", str(documented), "-o", str(fit_path), "--law", "matched-progress"]) == 0
    assert "law matched-progress" in capsys.readouterr().out
    fit = load_fit(fit_path)
    plan = type(fit.rungs[0].plan)(**{**vars(fit.rungs[-1].plan), "active_params": 80_000, "tokens_per_step": 12_800})
    plan.save(plan_path)
    assert main(["forecast", str(fit_path), "--plan", str(plan_path), "-o", str(csv_path)]) == 0
    assert "80 % interval" in capsys.readouterr().out
    header, *rows = csv_path.read_text().splitlines()
    assert header.startswith("step,tokens,progress,loss,lower_0.5,upper_0.5")
    assert rows[-1].split(",")[0] == "1000"
    assert main(["inspect", str(fit_path), "--plan", str(plan_path)]) == 0
    assert "rung small: 1e+04 active parameters" in capsys.readouterr().out
    assert main(["backtest", str(documented), "--law", "matched-progress"]) == 0
    assert "too small to hold a rung out" in capsys.readouterr().out
    assert main(["plan", str(fit_path), "--compute", "1e20"]) == 2
    assert "needs one of law 'terminal'" in capsys.readouterr().err


def test_a_mismatched_plan_ends_the_command_with_both_values_and_status_2(documented, tmp_path, capsys):
    fit_path, plan_path = tmp_path / "fit.json", tmp_path / "plan.json"
    main(["fit", str(documented), "-o", str(fit_path), "--law", "matched-progress"])
    plan = load_fit(fit_path).rungs[0].plan
    type(plan)(**{**vars(plan), "total_steps": 3000}).save(plan_path)
    out = tmp_path / "f.csv"
    assert main(["forecast", str(fit_path), "--plan", str(plan_path), "-o", str(out)]) == 2
    assert "tokens_per_active_param: fit 160, plan 480" in capsys.readouterr().err
    assert not out.exists()
    assert main(["forecast", str(fit_path), "--plan", str(plan_path), "-o", str(out), "--override-recipe"]) == 0


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("version = 1\n", "version = 2\n", "reads version 1"),
        ('format = "trajectory-guard-ladder"', 'format = "x"', "expected 'trajectory-guard-ladder'"),
        ("[recipe]", "[receipt]", r"unknown fields \['receipt'\]"),
        ('tokenizer = "byte"', "tokenizer = 3", "rung 'small': recipe field `tokenizer`"),
        ('tokenizer = "byte"', 'token = "byte"', "unknown recipe fields"),
        ("active_params = 10_000", "params = 10_000", r"rung 'small': unknown fields \['params'\]"),
        ("active_params = 10_000", "", "missing.*active_params"),
        ("active_params = 10_000", "active_params = -1", "active_params must be a positive"),
        ('name = "small"', "", "number 1 needs a `name`"),
        ('name = "small"', 'name = "large"', "more than once"),
        ('log = "small.csv"', "", "`log` must be a path"),
        ('log = "small.csv"', 'log = "absent.csv"', "rung 'small': .*absent.csv"),
        ('log = "small.csv"', "log = []", "`log` must be a path"),
        ('unit = "nats"', 'unit = "shannons"', "unit must be one of"),
        ('unit = "nats"', "unit = 1", "read.unit must be a str"),
        ('["grad_norm"]', '"grad_norm"', "read.channels must be a list"),
        ('["grad_norm"]', '["grad_norm", ""]', "must be a list of different column names"),
        ('["grad_norm"]', '["grad_norm", "grad_norm"]', "must be a list of different column names"),
        ('["grad_norm"]', "[1]", "must be a list of different column names"),
        ('["grad_norm"]', str([f"c{i}" for i in range(1001)]), "names 1001 columns, at most 1000"),
        ('["grad_norm"]', '["loss"]', r"small.csv has no columns \['loss'\] .* it has \['grad_norm', 'router/bias'\]"),
        ("total_steps = 1000", "total_steps = 500", "times the planned"),
        ("[[rung]]", "[rung]", "not valid TOML|at least one"),
        ("[recipe] ", "[recipe ", "not valid TOML"),
    ],
)
def test_a_wrong_manifest_is_refused_naming_file_and_field(documented, old, new, words):
    text = documented.read_text()
    assert old in text
    documented.write_text(text.replace(old, new, 1))
    with pytest.raises(FileFormatError, match=words) as caught:
        read_manifest(documented)
    assert "ladder.toml" in str(caught.value)


def test_a_missing_manifest_and_one_without_rungs_are_refused(tmp_path):
    with pytest.raises(FileFormatError, match="no such file"):
        read_manifest(tmp_path / "none.toml")
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(FileFormatError, match="at least one"):
        read_manifest(tmp_path / "empty.toml")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('recipe = { tokenizer = "bpe" }', "'small' and 'large' .*tokenizer: 'bpe' and 'byte'"),
        ('metric = "other"', "metric"),
        ('flops_convention = "per-token-including-lm-head"\nflops_per_token = 7e4', "flops_convention"),
    ],
)
def test_rungs_whose_losses_cannot_be_compared_are_refused(documented, line, words):
    documented.write_text(documented.read_text().replace('log = "small.csv"', f'log = "small.csv"\n{line}'))
    with pytest.raises(FileFormatError, match=words):
        read_manifest(documented)


def test_a_log_with_nan_gaps_and_duplicates_is_read_and_told(documented, tmp_path):
    lines = (tmp_path / "small.csv").read_text().splitlines()
    lines[300] = lines[300].split(",")[0] + ",nan"
    del lines[400:420]
    lines.insert(500, lines[499])
    (tmp_path / "small.csv").write_text("\n".join(lines) + "\n")
    ladder, notes = read_manifest(documented)
    (curve,) = ladder.rungs[0].curves
    assert len(curve) == 1000 - 20 - 1
    assert sum("'small'" in note for note in notes) >= 2


def test_a_rung_that_died_early_is_told(documented, tmp_path):
    write_log(tmp_path / "small.csv", tokens_per_step=1600, steps=600)
    _, notes = read_manifest(documented)
    assert any("ends at progress 0.600; used up to there" in note for note in notes)


def test_bits_labelled_as_nats_are_told_by_the_first_loss_and_by_the_trend(documented, tmp_path, capsys):
    rungs = "".join(
        f'[[rung]]\nname = "r{k}"\nactive_params = {k * 5000}\ntokens_per_step = {k * 800}\nlog = "r{k}.csv"\n'
        for k in (1, 2, 3, 4, 6)
    )
    documented.write_text(documented.read_text().split("[[rung]]")[0] + rungs)
    for k in (1, 2, 3, 4, 6):
        write_log(tmp_path / f"r{k}.csv", tokens_per_step=800 * k, scale=2.3 if k != 3 else 2.3 / np.log(2))
    assert main(["fit", str(documented), "-o", str(tmp_path / "fit.json"), "--law", "matched-progress"]) == 0
    said = capsys.readouterr()
    assert "'r3', r3.csv: its first loss" in said.err and 'unit = "bits"' in said.err
    assert "'r1', r1.csv: its first loss" not in said.err
    assert "rung 'r3' lies off the trend: +44" in said.out
