import numpy as np
import pytest

from trajectory_guard.curve import LossCurve
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.fit import fit_ladder
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.laws.progress import MatchedProgress, published_forecast
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan


def test_published_form_reproduces_the_pre_registered_forecast_to_1e_12(hero):
    made = published_forecast(hero.progress, hero.losses, hero.flops, hero.published["hero_flops_excl_lm_head"][-1])
    for ours, theirs in (
        (made.loss, "hero_pred_loss_floor1.5"),
        (made.lowest, "loo_min"),
        (made.highest, "loo_max"),
        (made.exponent, "alpha_g"),
    ):
        np.testing.assert_allclose(ours, hero.published[theirs], rtol=0, atol=1e-12)
    np.testing.assert_allclose(made.amplitude, hero.published["A_g"], rtol=1e-12)
    # Marin issue 8435: 2.392 at 5 %, 2.172 at 50 %, 2.039 at the end.
    np.testing.assert_allclose(made.loss[[0, 9, 19]], [2.392093, 2.172437, 2.038785], atol=1e-6)


def test_published_form_is_exact_on_a_power_law_and_its_range_closes():
    progress, flops = np.array([0.1, 1.0]), np.array([1e18, 4e18, 3e19])
    losses = 1.5 + 50 * (flops[:, None] * progress) ** -0.08
    made = published_forecast(progress, losses, flops, 1e21)
    np.testing.assert_allclose(made.loss, 1.5 + 50 * (1e21 * progress) ** -0.08, rtol=1e-12)
    np.testing.assert_allclose(made.highest - made.lowest, 0, atol=1e-12)


@pytest.mark.parametrize("floor", [2.0, 5.0])
def test_published_form_refuses_a_floor_above_a_loss(floor):
    with pytest.raises(TrajectoryGuardError, match="exceed the floor"):
        published_forecast([1.0], [[3.0], [2.0]], [1.0, 2.0], 4.0, floor=floor)


def test_published_form_refuses_a_single_rung():
    with pytest.raises(TrajectoryGuardError, match="at least two rungs"):
        published_forecast([1.0], [[3.0]], [1.0], 4.0)


def test_three_rungs_forecast_d2048_within_0_7_percent_and_monotone(hero):
    *smaller, target = hero.ladder.rungs
    law = MatchedProgress.fit(Ladder(rungs=tuple(smaller)))
    (curve,) = target.curves
    forecast = law.loss(target.plan, target.plan.progress(curve.step))
    assert np.all(np.diff(law.at_compute(target.plan.total_flops)) <= 0)
    assert len(curve) == 16
    assert np.abs(curve.loss / forecast - 1).max() <= 0.007
    published = published_forecast(hero.progress, hero.losses[:3], hero.flops[:3], hero.flops[3])
    assert np.abs(hero.losses[3, :16] / published.loss[:16] - 1).max() == pytest.approx(0.0090, abs=5e-5)


def test_interval_of_the_535b_plan_is_between_1_5_and_4_percent_at_every_published_point(hero):
    fit = fit_ladder(hero.ladder, "matched-progress")
    plan = hero.target
    forecast = fit.forecast(plan)
    width = forecast.half_width(np.round(plan.step_at(hero.progress)), 0.95)
    assert np.all((width >= 0.015) & (width <= 0.04))
    # The floor that is pinned at 1.5 in the published forecast is averaged over here; both stay within the interval.
    published = hero.published["hero_pred_loss_floor1.5"]
    assert np.all(np.abs(np.log(forecast.loss(np.round(plan.step_at(hero.progress))) / published)) < width)


def test_noise_of_single_steps_leaves_the_forecast_unharmed(synthetic_ladder, synthetic_rung):
    law = MatchedProgress.fit(synthetic_ladder)
    target = synthetic_rung(1e5)
    (truth,) = target.curves
    progress = target.plan.progress(truth.step)
    seen = progress >= 0.1
    error = np.abs(law.loss(target.plan, progress[seen]) / truth.loss[seen] - 1)
    assert error.mean() < 0.006
    assert error.max() < 0.012


def test_a_rung_that_died_early_is_used_up_to_where_it_got(synthetic_rung):
    whole = [synthetic_rung(n) for n in (1e4, 1.6e4, 4e4)]
    cut = synthetic_rung(2.5e4, until=0.5)
    with_cut = MatchedProgress.fit(Ladder(rungs=(*whole, cut)))
    without = MatchedProgress.fit(Ladder(rungs=tuple(whole)))
    flops = 1e13
    assert not np.array_equal(with_cut.at_compute(flops), without.at_compute(flops))
    np.testing.assert_allclose(with_cut.at_compute(flops), without.at_compute(flops), rtol=0.005)


def test_a_ladder_whose_runs_all_died_early_is_refused_with_how_far_they_got(synthetic_rung):
    ladder = Ladder(rungs=(synthetic_rung(1e4), synthetic_rung(2e4, until=0.5), synthetic_rung(3e4, until=0.6)))
    with pytest.raises(TrajectoryGuardError, match=r"'n30000': 0\.6"):
        MatchedProgress.fit(ladder)


def test_one_rung_is_refused(synthetic_rung):
    with pytest.raises(TrajectoryGuardError, match="at least two rungs"):
        MatchedProgress.fit(Ladder(rungs=(synthetic_rung(),)))


def test_rungs_of_different_schedules_are_refused_naming_both(synthetic_rung):
    first, second = synthetic_rung(1e4), synthetic_rung(2e4)
    constant = RunPlan(**{**vars(second.plan), "schedule": LRSchedule(shape="constant", warmup=0.02)})
    ladder = Ladder(rungs=(first, Rung(name="flat", plan=constant, curves=second.curves)))
    with pytest.raises(TrajectoryGuardError, match=r"'n10000'.*'flat'.*linear .*constant .*schedule-aware"):
        MatchedProgress.fit(ladder)


def test_rungs_of_different_tokens_per_parameter_are_refused(synthetic_rung):
    first, second = synthetic_rung(1e4), synthetic_rung(2e4)
    longer = RunPlan(**{**vars(second.plan), "total_steps": 2000})
    ladder = Ladder(rungs=(first, Rung(name="long", plan=longer, curves=second.curves)))
    with pytest.raises(TrajectoryGuardError, match="tokens_per_active_param: fit 160, plan 320"):
        MatchedProgress.fit(ladder)


def test_a_loss_that_rises_at_the_end_is_forecast_to_rise(synthetic_rung):
    def rising(rung: Rung) -> Rung:
        (curve,) = rung.curves
        progress = rung.plan.progress(curve.step)
        loss = curve.loss * (1 + 0.5 * np.maximum(progress - 0.8, 0))
        return Rung(
            name=rung.name, plan=rung.plan, curves=(LossCurve(step=curve.step, tokens=curve.tokens, loss=loss),)
        )

    law = MatchedProgress.fit(Ladder(rungs=tuple(rising(synthetic_rung(n)) for n in (1e4, 2e4, 4e4))))
    table = law.at_compute(1e13)
    assert not law.falling
    assert table[-1] > 1.03 * table.min()


def test_parameters_survive_json_exactly(synthetic_ladder):
    law = MatchedProgress.fit(synthetic_ladder)
    again = MatchedProgress.from_params(law.to_params())
    np.testing.assert_array_equal(again.at_compute(1e14), law.at_compute(1e14))
    assert again.to_params() == law.to_params()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": [1.0]}, "shape"),
        ({"progress": [0.5, 0.4]}, "rise strictly"),
        ({"extra": 1}, "unknown"),
        ({"floors": "low"}, "must hold numbers"),
        ({"falling": 1}, "true or false"),
    ],
)
def test_damaged_parameters_are_refused(synthetic_ladder, change, message):
    params = {**MatchedProgress.fit(synthetic_ladder).to_params(), **change}
    with pytest.raises(TrajectoryGuardError, match=message):
        MatchedProgress.from_params(params)
