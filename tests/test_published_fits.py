"""The fits of published ladders that ship with the examples: they load, and say what was published."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from trajectory_guard.__main__ import main
from trajectory_guard.fit import load_fit
from trajectory_guard.laws.terminal import TerminalFit
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan
from trajectory_guard.recipe import Recipe

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FITS = EXAMPLES / "fits"


def test_the_dense_fit_gives_the_published_law_and_its_three_forecasts():
    model = load_fit(FITS / "delphi_dense.json").model
    assert isinstance(model, TerminalFit)
    # marin-community/delphi-blog-data: L* = 1.644058 + 121.4494 C^-0.0972360.
    np.testing.assert_allclose([model.floor, model.amplitude, model.alpha], [1.644058, 121.4494, 0.0972360], rtol=1e-5)
    np.testing.assert_allclose(model.expect([1e21, 1e22, 1e23]), [2.746710, 2.525518, 2.348696], atol=1e-5)


@pytest.mark.parametrize(
    ("compute", "losses"), [("1e21", (2.7581, 2.7606)), ("1e22", (2.5308, 2.5342)), ("1e23", (2.3546,))]
)
def test_the_dense_fit_recommends_a_run_whose_interval_holds_what_was_measured(compute, losses, capsys):
    assert main(["plan", str(FITS / "delphi_dense.json"), "--compute", compute]) == 0
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("95% interval")]
    low, high = float(line.split()[2]), float(line.split()[4])
    assert all(low < loss < high for loss in losses)


def hero_plan(**fields) -> RunPlan:
    """The 535B run of marin issue 8435: 22.76e9 active parameters, 6.690294608796058e18 FLOPs a step."""
    tokens = 11264 * 4096
    return RunPlan(
        **{
            "total_steps": 390251,
            "tokens_per_step": tokens,
            "active_params": 22.76e9,
            "schedule": LRSchedule(shape="linear"),
            "flops_per_token": 6.690294608796058e18 / tokens,
            "flops_convention": "per-token-excluding-lm-head",
            "metric": "paloma macro loss, dropless",
            "split": "validation",
            "recipe": Recipe(data="Marin mixture-of-experts ladder", sequence_length=4096),
            **fields,
        }
    )


def test_the_mixture_of_experts_fit_forecasts_the_535b_run_near_the_published_points():
    fit = load_fit(FITS / "marin_hero_moe.json")
    forecast = fit.forecast(hero_plan())
    steps = [19513, 195126, 390251]
    published = np.array([2.392093, 2.172437, 2.038785])
    assert np.all(np.abs(np.log(np.asarray(forecast.loss(steps)) / published)) < forecast.half_width(steps, 0.95))
    assert forecast.check.unknown == ("lr_schedule", "warmup", "batch_schedule")


def test_both_fits_say_their_source_and_carry_no_losses_of_others():
    for name in ("delphi_dense", "marin_hero_moe"):
        fit = load_fit(FITS / f"{name}.json")
        assert fit.source is not None and "marin-community/" in fit.source
        assert all(not rung.loss for rung in fit.rungs)


def test_the_shipped_constants_are_what_our_tool_makes_of_the_public_tables(shared_data, tmp_path):
    spec = importlib.util.spec_from_file_location("fit_published", EXAMPLES / "fit_published.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name in ("delphi_dense", "marin_hero_moe"):
        made, shipped = getattr(script, name)(shared_data / "ladders"), load_fit(FITS / f"{name}.json")
        assert made.recipe == shipped.recipe and made.source == shipped.source
        plan = hero_plan() if name == "marin_hero_moe" else hero_plan(metric=made.metric, recipe=Recipe())
        grid = np.array([1.0]) if name == "delphi_dense" else np.linspace(0.05, 1, 20)
        np.testing.assert_allclose(made.model.loss(plan, grid), shipped.model.loss(plan, grid), rtol=1e-9)
