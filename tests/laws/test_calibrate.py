import numpy as np
import pytest

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.forecast import Forecast
from trajectory_guard.laws.calibrate import calibrate, calibration_window, outlook, outlook_from, recent_log_ratio
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan

PLAN = RunPlan(total_steps=2000, tokens_per_step=8, active_params=1e3, schedule=LRSchedule(shape="cosine", warmup=0.01))
STEPS = np.arange(1, 2001)


def made() -> Forecast:
    progress = np.linspace(0.02, 1, 200)
    return Forecast(PLAN, progress=progress, loss=2.0 + progress**-0.4, half_widths={0.8: 0.01, 0.95: 0.02})


def test_a_run_on_its_forecast_is_left_alone():
    result = calibrate(made(), STEPS, made().loss(STEPS))
    assert abs(result.level_nats) < 1e-9 and abs(result.amplitude) < 1e-9
    np.testing.assert_allclose(result.forecast.loss(STEPS[50:]), made().loss(STEPS[50:]))


def test_half_of_a_level_shift_at_most_is_carried_forward_and_told():
    shift = 0.02
    result = calibrate(made(), STEPS, made().loss(STEPS) + shift)
    carried = result.forecast.loss(2000) - made().loss(2000)
    assert 0 < carried <= shift / 2 + 1e-3
    assert result.end_percent == pytest.approx(100 * carried / made().loss(2000))
    assert f"steps {result.first_step} to {result.last_step}" in result.describe()
    assert result.forecast.law.endswith("calibrated")


def test_only_the_window_counts_and_it_must_be_over():
    first, last = calibration_window(PLAN)
    loss = np.asarray(made().loss(STEPS))
    wild = np.where((first > STEPS) | (last < STEPS), 99.0, loss)
    assert abs(calibrate(made(), STEPS, wild).level_nats) < 1e-9
    with pytest.raises(TrajectoryGuardError, match=f"ends at step {last}"):
        calibrate(made(), STEPS[: last - 1], loss[: last - 1])
    with pytest.raises(TrajectoryGuardError, match="needs three losses"):
        calibrate(made(), [last, last + 1], [3.0, 3.0])


def test_intervals_are_not_narrowed_by_calibration():
    result = calibrate(made(), STEPS, made().loss(STEPS) + 0.01)
    assert result.forecast.half_width(1500, 0.95) == made().half_width(1500, 0.95)


def test_no_outlook_before_it_was_back_tested():
    assert outlook_from(PLAN) == 300
    assert outlook(made(), 299, 0.01) is None
    assert outlook(made(), 300, float("nan")) is None


def test_outlook_moves_the_end_by_half_of_what_was_seen_at_half_time():
    loss = np.asarray(made().loss(STEPS)) * 1.01
    ratio = recent_log_ratio(made(), STEPS[:1000], loss[:1000])
    assert ratio == pytest.approx(np.log(1.01))
    seen = outlook(made(), 1000, ratio, level=0.95)
    assert seen is not None
    assert np.log(seen.loss / made().loss(2000)) == pytest.approx(0.5 * np.log(1.01))
    assert seen.upper / seen.loss == pytest.approx(np.exp(0.9 * 0.02))
    assert "final loss" in seen.describe()


def test_outlook_becomes_the_present_and_narrows_towards_the_end():
    seen = [outlook(made(), step, 0.01) for step in (400, 1400, 1800, 2000)]
    moves = [np.log(o.loss / made().loss(2000)) / 0.01 for o in seen if o is not None]
    np.testing.assert_allclose(moves, [0.5, 0.7, 0.9, 1.0])
    widths = [np.log(o.upper / o.loss) / 0.01 for o in seen if o is not None]
    np.testing.assert_allclose(widths, [0.9, 0.9, 0.7, 0.6])


def test_recent_losses_skip_what_is_not_finite():
    loss = np.asarray(made().loss(STEPS)).copy()
    loss[900:950] = np.nan
    assert recent_log_ratio(made(), STEPS[:1000], loss[:1000]) == pytest.approx(0.0)
    assert recent_log_ratio(made(), [], []) is None
