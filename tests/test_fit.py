import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trajectory_guard.errors import FileFormatError, RecipeMismatchError, TrajectoryGuardError
from trajectory_guard.fit import fit_ladder, load_fit
from trajectory_guard.ladder import Ladder
from trajectory_guard.laws.collapse import CollapseLaw
from trajectory_guard.laws.isoflop import IsoFlop
from trajectory_guard.laws.progress import MatchedProgress
from trajectory_guard.laws.schedule import ScheduleAwareLaw
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan
from trajectory_guard.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def fit(synthetic_ladder):
    return fit_ladder(synthetic_ladder, "matched-progress")


@pytest.fixture(scope="module")
def plan(synthetic_rung):
    return synthetic_rung(1e5).plan


def changed(plan: RunPlan, **fields) -> RunPlan:
    return RunPlan(**{**vars(plan), **fields})


def test_the_forecast_holds_the_truth_inside_its_interval(fit, synthetic_rung):
    rung = synthetic_rung(1e5)
    forecast = fit.forecast(rung.plan)
    (truth,) = rung.curves
    steps = truth.step[truth.step >= forecast.first_step]
    lower, upper = forecast.interval(steps, 0.95)
    inside = (truth.loss[steps - 1] >= lower) & (truth.loss[steps - 1] <= upper)
    assert inside.mean() > 0.95
    assert forecast.first_step == 20
    assert forecast.law == "matched-progress"


def test_a_saved_fit_loads_exactly(fit, plan, tmp_path):
    fit.save(tmp_path / "fit.json")
    again = load_fit(tmp_path / "fit.json")
    assert again.to_dict() == fit.to_dict()
    steps = np.arange(20, 1001)
    np.testing.assert_array_equal(again.forecast(plan).loss(steps), fit.forecast(plan).loss(steps))
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "fit.json").read_bytes()


def test_two_processes_write_the_same_bytes(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    rungs = []
    for size in (10_000, 20_000, 40_000):
        steps = np.arange(1, 501)
        noise = np.exp(0.05 * np.random.default_rng(size).standard_normal(500))
        loss = (1.5 + 3 * (size * steps) ** -0.08) * noise
        rows = "\n".join(f"{s},{v:.5f}" for s, v in zip(steps, loss, strict=True))
        (logs / f"{size}.csv").write_text("step,loss\n" + rows + "\n")
        rungs.append(
            f'[[rung]]\nname = "{size}"\nactive_params = {size}\ntokens_per_step = {size}\nlog = "logs/{size}.csv"'
        )
    head = '[plan]\ntotal_steps = 500\nschedule = { shape = "cosine" }\n'
    (tmp_path / "ladder.toml").write_text(head + "\n".join(rungs))
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "trajectory_guard", "fit", "ladder.toml", "-o", f"{seed}.json"]
        command += ["--law", "matched-progress"]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, cwd=tmp_path, env=environment, capture_output=True)
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()


def test_a_fit_without_channels_says_nothing_of_them(fit, plan):
    assert "channels" not in fit.to_dict()
    assert fit.forecast(plan).channels == {}


def test_channels_leave_the_loss_alone_and_survive_a_file(channel_ladder, plan, tmp_path):
    bare = Ladder(rungs=tuple(dataclasses.replace(rung, channels={}) for rung in channel_ladder.rungs))
    without, fit = (fit_ladder(ladder, "matched-progress").to_dict() for ladder in (bare, channel_ladder))
    assert set(fit) - set(without) == {"channels"}
    assert {name: value for name, value in fit.items() if name != "channels"} == without
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(fit))
    again = load_fit(path)
    assert again.to_dict() == fit
    again.save(path)
    assert load_fit(path).to_dict() == fit
    courses = again.forecast(plan).channels
    assert {name: course.logarithmic for name, course in courses.items()} == {"grad_norm": True, "router/bias": False}


def test_auto_picks_a_law_by_back_test_and_keeps_every_table(synthetic_ladder):
    fit = fit_ladder(synthetic_ladder)
    tried = {row.law for row in fit.backtest} | set(fit.refused)
    assert "matched-progress" in tried
    assert fit.law in {row.law for row in fit.backtest}


def test_a_fit_keeps_rung_points_for_drawing_within_bounds(fit, tmp_path):
    fit.save(tmp_path / "fit.json")
    assert [rung.name for rung in fit.rungs] == ["n10000", "n16000", "n25000", "n40000"]
    assert all(0 < len(rung.loss) <= 200 for rung in fit.rungs)
    assert (tmp_path / "fit.json").stat().st_size < 100_000


def test_one_rung_is_refused_with_every_laws_reason(synthetic_rung):
    with pytest.raises(TrajectoryGuardError, match="no law fits this ladder:\n  matched-progress: .*two rungs"):
        fit_ladder(Ladder(rungs=(synthetic_rung(),)))


def test_two_rungs_forecast_with_the_widest_interval(synthetic_rung, fit, plan):
    two = fit_ladder(Ladder(rungs=(synthetic_rung(2e4), synthetic_rung(4e4))), "matched-progress")
    assert two.interval.backtests == 0
    assert two.interval.spread > fit.interval.spread
    assert two.forecast(plan).half_width(1000, 0.95) > 0.02


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"metric": "paloma"}, "metric: fit 'loss', plan 'paloma'"),
        ({"split": "validation"}, "split: fit 'train', plan 'validation'"),
        ({"recipe": Recipe(tokenizer="bpe", vocab_size=256)}, "tokenizer: fit 'byte', plan 'bpe'"),
        ({"schedule": LRSchedule(shape="cosine", warmup=0.02)}, "lr_schedule: fit linear .* plan cosine"),
        ({"total_steps": 2000}, "tokens_per_active_param: fit 160, plan 320"),
        ({"flops_convention": "per-token-including-lm-head", "flops_per_token": 6e5}, "flops_convention"),
    ],
)
def test_a_plan_of_another_recipe_is_refused_unless_overridden(fit, plan, fields, words):
    other = changed(plan, **fields)
    with pytest.raises(RecipeMismatchError, match=words):
        fit.forecast(other)
    check = fit.forecast(other, override_recipe=True).check
    assert check.overridden and check.errors


def test_an_unstated_field_is_named_and_does_not_stop(fit, plan):
    assert fit.forecast(changed(plan, recipe=Recipe(tokenizer="byte"))).check.unknown == ("vocab_size",)


def test_compute_far_beyond_the_ladder_is_said_and_ten_thousand_times_is_refused(fit, plan):
    def scaled(ratio: float) -> RunPlan:
        factor = ratio**0.5
        return changed(
            plan, active_params=4e4 * factor, total_steps=round(1000 * factor), tokens_per_step=round(160 * 4e4 / 1000)
        )

    assert not fit.forecast(scaled(500)).check.warnings
    assert any("interval is untested" in text for text in fit.forecast(scaled(2000)).check.warnings)
    with pytest.raises(RecipeMismatchError, match="no ladder was tested so far out"):
        fit.forecast(scaled(1e4))
    assert fit.forecast(scaled(1e4), override_recipe=True).check.overridden


def damage(path: Path, **fields) -> None:
    content = json.loads(path.read_text())
    content.update(fields)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"format": "something"}, "expected 'trajectory-guard-fit'"),
        ({"version": 99}, "newer than 1"),
        ({"law": "tea-leaves"}, "no law is called"),
        ({"law": 3}, "`law` must be a str"),
        ({"params": {}}, "missing"),
        ({"params": []}, "`params` must be a dict"),
        ({"split": "test"}, "`split` must be one of"),
        ({"interval": {"scale": 0.1}}, "an interval has the fields"),
        ({"interval": None}, "`interval` must be an object"),
        ({"backtest": {"rows": [{}], "refused": {}}}, "back-test row"),
        ({"backtest": []}, "`rows` and `refused`"),
        ({"rungs": [{"name": "a"}]}, "a rung of a fit"),
        ({"recipe": {"warmup": "short"}}, "`warmup` is damaged"),
        ({"channels": []}, "`channels` must be an object"),
        ({"channels": {"x": {}}}, "channel 'x': a channel has the fields"),
        ({"channels": dict.fromkeys(map(str, range(1001)))}, "at most 1000"),
        ({"surprise": 1}, r"unknown \['surprise'\]"),
    ],
)
def test_a_damaged_fit_is_refused_naming_the_field(fit, tmp_path, fields, words):
    path = tmp_path / "fit.json"
    fit.save(path)
    damage(path, **fields)
    with pytest.raises(FileFormatError, match=words):
        load_fit(path)


def test_a_truncated_missing_or_empty_fit_is_refused(fit, tmp_path):
    path = tmp_path / "fit.json"
    with pytest.raises(FileFormatError, match="no such file"):
        load_fit(path)
    fit.save(path)
    whole = path.read_text()
    for text in (whole[: len(whole) // 2], "", "[]", "null", whole.replace("1", "NaN", 1)):
        path.write_text(text)
        with pytest.raises(FileFormatError):
            load_fit(path)


def test_a_missing_field_is_refused(fit, tmp_path):
    content = fit.to_dict()
    for name in set(content) - {"format", "version"}:
        path = tmp_path / "fit.json"
        path.write_text(json.dumps({key: value for key, value in content.items() if key != name}))
        with pytest.raises(FileFormatError, match=name):
            load_fit(path)


def test_every_field_is_in_the_format_document(fit, channel_ladder):
    text = (ROOT / "docs" / "formats.md").read_text()
    content = fit.to_dict()
    row, rung = content["backtest"]["rows"][0], content["rungs"][0]
    params = [f.name for made in (MatchedProgress, CollapseLaw, IsoFlop, RunPlan) for f in dataclasses.fields(made)]
    params += [*ScheduleAwareLaw.PARAMETERS, "memory", "scores_percent", "optima", "pinned_floor", "source"]
    (channel, *_) = fit_ladder(channel_ladder, "matched-progress").to_dict()["channels"].values()
    params += ["channels", *channel, *channel["rungs"][0]]
    for name in (*content, *content["interval"], *row, *rung, *params):
        assert f"`{name}`" in text, name
