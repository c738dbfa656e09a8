import numpy as np
import pytest

from trajectory_guard.curve import LossCurve
from trajectory_guard.ladder import Rung
from trajectory_guard.laws.smooth import PROGRESS_GRID, local_quadratic, rung_curve
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan


def test_a_parabola_in_log_progress_passes_unchanged():
    g = np.linspace(1e-3, 1, 3000)
    grid = PROGRESS_GRID[PROGRESS_GRID >= 0.02]
    truth = 3.0 - 0.4 * np.log(g) + 0.05 * np.log(g) ** 2
    made, _ = local_quadratic(g, truth, grid)
    np.testing.assert_allclose(made, np.interp(grid, g, truth), rtol=1e-5)


def test_the_steep_start_is_followed_without_bias():
    g = np.arange(1, 3001) / 3000
    truth = 2.0 + 0.4 * g**-0.5
    made, _ = local_quadratic(g, truth, np.array([0.02, 0.03, 0.05]))
    np.testing.assert_allclose(made, 2.0 + 0.4 * np.array([0.02, 0.03, 0.05]) ** -0.5, rtol=5e-3)


def test_standard_errors_are_what_repetition_shows():
    g, grid = np.linspace(1e-3, 1, 2000), np.array([0.05, 0.3, 1.0])
    rng = np.random.default_rng(0)
    runs = [local_quadratic(g, 3.0 - 0.2 * np.log(g) + 0.1 * rng.standard_normal(2000), grid) for _ in range(300)]
    seen = np.std([loss for loss, _ in runs], axis=0)
    np.testing.assert_allclose(np.mean([error for _, error in runs], axis=0), seen, rtol=0.15)


def test_windows_do_not_reach_over_a_sudden_drop():
    plan = RunPlan(
        total_steps=2000,
        tokens_per_step=10,
        active_params=1e3,
        schedule=LRSchedule(shape="steps", points=((0.601, 0.1),)),
    )
    step = np.arange(1, 2001)
    g = plan.progress(step)
    curve = LossCurve(step=step, tokens=plan.tokens(step), loss=3.0 - 0.1 * np.log(g) - 0.2 * (g >= 0.601))
    made = rung_curve(Rung(name="a", plan=plan, curves=(curve,)))
    truth = 3.0 - 0.1 * np.log(made.progress) - 0.2 * (made.progress >= 0.601)
    np.testing.assert_allclose(made.loss, truth, atol=1e-3)


def test_seeds_are_averaged_and_halve_the_variance(synthetic_rung):
    one, four = synthetic_rung(noise=0.05, seeds=(0,)), synthetic_rung(noise=0.05, seeds=(0, 1, 2, 3))
    ratio = rung_curve(four).error / rung_curve(one).error
    assert np.median(ratio) == pytest.approx(0.5, rel=0.1)


def test_a_seed_that_died_early_counts_up_to_where_it_got(synthetic_rung):
    whole, cut = synthetic_rung(noise=0.02, seeds=(0,)), synthetic_rung(noise=0.02, seeds=(1,), until=0.5)
    both = rung_curve(Rung(name="both", plan=whole.plan, curves=(*whole.curves, *cut.curves)))
    alone = rung_curve(whole)
    late, early = both.progress > 0.52, (both.progress < 0.48) & (both.progress > 0.05)
    np.testing.assert_array_equal(both.loss[late], alone.loss[late])
    assert np.all(both.loss[early] != alone.loss[early])


def test_few_evaluations_are_used_as_they_are(hero):
    (curve,) = hero.ladder.rungs[0].curves
    made = rung_curve(hero.ladder.rungs[0])
    np.testing.assert_array_equal(made.loss, curve.loss)
    assert np.all(made.error == 0)
