"""Outlook and calibration of a guard: the loss to expect from what was seen."""

import dataclasses
import math

import numpy as np
import pytest

from trajectory_guard import Forecast, LRSchedule, RunPlan, TrajectoryGuard
from trajectory_guard.laws.calibrate import calibrate, calibration_window, outlook, outlook_from, recent_log_ratio


@pytest.fixture(params=[8, ((1, 8), (401, 32))], ids=["constant batch", "batch ramp"])
def forecast(request: pytest.FixtureRequest) -> Forecast:
    plan = RunPlan(
        total_steps=2000, tokens_per_step=request.param, active_params=1e4, schedule=LRSchedule(shape="linear")
    )
    g = np.linspace(0.01, 1, 100)
    return Forecast(plan, progress=g, loss=1 + g**-0.2, half_widths={0.8: 0.01, 0.95: 0.02})


def test_a_run_that_is_made_longer_at_a_resume_goes_on_with_a_new_course(forecast: Forecast) -> None:
    guard = TrajectoryGuard(forecast)
    for step, loss in enumerate(losses_of(forecast, 1500, off=0.0), start=1):
        guard.observe(step, loss)
    plan = dataclasses.replace(forecast.plan, total_steps=3000)
    g = np.linspace(0.01, 1, 100)
    longer = TrajectoryGuard(Forecast(plan, progress=g, loss=1 + g**-0.2, half_widths={0.8: 0.01}))
    longer.load_state_dict(guard.state_dict())
    for step in range(1501, 3001):
        longer.observe(step, 1.01 * float(longer.forecast.loss(step)))
    seen = longer.outlook()
    assert seen is not None and seen.recent_percent == pytest.approx(1.0, abs=0.01)


def losses_of(forecast: Forecast, last: int, off: float) -> np.ndarray:
    noise = np.random.default_rng(5).normal(0.0, 0.01, last)
    return np.nan_to_num(np.asarray(forecast.loss(np.arange(1, last + 1))), nan=5.0) * np.exp(off + noise)


def test_there_is_no_outlook_before_it_is_back_tested(forecast: Forecast) -> None:
    guard = TrajectoryGuard(forecast)
    assert guard.outlook() is None
    for step in range(1, outlook_from(forecast.plan)):
        guard.observe(step, 2.5)
    assert guard.outlook() is None
    guard.observe(outlook_from(forecast.plan), 2.5)
    assert guard.outlook() is not None


@pytest.mark.parametrize("last", [1000, 1999, 2000])
def test_the_outlook_is_that_of_every_loss_kept(forecast: Forecast, last: int) -> None:
    losses = losses_of(forecast, last, off=0.004)
    guard = TrajectoryGuard(forecast)
    for step, loss in enumerate(losses, start=1):
        guard.observe(step, float(loss))
    seen = guard.outlook(level=0.95)
    ratio = recent_log_ratio(forecast, np.arange(1, last + 1), losses)
    assert seen is not None and ratio is not None
    # The window ends within one of 200 stretches.
    assert seen == pytest.approx(outlook(forecast, last, ratio, level=0.95), rel=2e-4, abs=0.05)
    assert seen.lower < seen.loss < seen.upper


def test_a_resumed_guard_has_the_same_outlook(forecast: Forecast) -> None:
    losses = losses_of(forecast, 1500, off=-0.003)
    whole, first, second = TrajectoryGuard(forecast), TrajectoryGuard(forecast), TrajectoryGuard(forecast)
    for step, loss in enumerate(losses, start=1):
        whole.observe(step, float(loss))
        (first if step <= 900 else second).observe(step, float(loss))
        if step == 900:
            second.load_state_dict(first.state_dict())
    assert second.outlook() == whole.outlook()


def test_losses_that_are_not_finite_and_steps_trained_again_do_not_count_twice(forecast: Forecast) -> None:
    guard, straight = TrajectoryGuard(forecast), TrajectoryGuard(forecast)
    losses = losses_of(forecast, 1600, off=0.0)
    for step in range(1, 1501):
        guard.observe(step, float(losses[step - 1]) * (1.05 if step > 1000 else 1.0))
    for step in range(1001, 1601):
        guard.observe(step, float(losses[step - 1]))
    for step in range(1, 1601):
        straight.observe(step, float(losses[step - 1]))
    guard.observe(1601, math.nan)
    straight.observe(1601, math.inf)
    assert guard.outlook() == straight.outlook()


def test_there_is_no_calibration_before_its_window_is_over(forecast: Forecast) -> None:
    guard = TrajectoryGuard(forecast)
    assert guard.calibration() is None
    _, last = calibration_window(forecast.plan)
    losses = losses_of(forecast, 2000, off=0.004)
    for step in range(1, last):
        guard.observe(step, float(losses[step - 1]))
    assert guard.calibration() is None
    for step in range(last, last + 11):
        guard.observe(step, float(losses[step - 1]))
    made = guard.calibration()
    assert made is not None and made.last_step == last
    for step in range(last + 11, 2001):
        guard.observe(step, 9.0)
    again = guard.calibration()
    assert again is not None and again.end_percent == made.end_percent


def test_the_calibration_is_that_of_every_loss_kept_and_nothing_is_judged_against_it(forecast: Forecast) -> None:
    losses = losses_of(forecast, 600, off=0.01)
    guard = TrajectoryGuard(forecast)
    verdicts = [guard.observe(step, float(loss)) for step, loss in enumerate(losses, start=1)]
    made, full = guard.calibration(), calibrate(forecast, np.arange(1, 601), losses)
    assert made is not None and made.describe().startswith("forecast calibrated on steps")
    assert made.end_percent == pytest.approx(full.end_percent, abs=0.05) and 0.2 < made.end_percent < 0.6
    assert (made.first_step, made.last_step) == (full.first_step, full.last_step)
    assert guard.forecast is forecast and verdicts[-1].forecast == forecast.loss(600)


def test_a_run_that_skipped_its_start_has_no_calibration(forecast: Forecast) -> None:
    guard = TrajectoryGuard(forecast)
    guard.observe(1500, 2.0)
    assert guard.calibration() is None
