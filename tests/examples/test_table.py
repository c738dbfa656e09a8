import numpy as np
import pytest
from table import compare

from trajectory_guard.forecast import Forecast
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan


@pytest.fixture
def forecast() -> Forecast:
    plan = RunPlan(total_steps=1000, tokens_per_step=8, active_params=10, schedule=LRSchedule(shape="linear"))
    return Forecast(plan, progress=[0.05, 1.0], loss=[2.0, 2.0], half_widths={0.8: 0.01, 0.95: 0.02})


def test_the_errors_are_those_of_window_means(forecast):
    losses = np.full(1000, 2.0)
    losses[:100] = 9.0  # before 10 % of training nothing counts
    losses[200:220] = 2.2
    comparison = compare(losses, forecast)
    assert comparison.windows == 45
    assert comparison.max_percent == pytest.approx(10.0)
    assert comparison.mean_percent == pytest.approx(10.0 / 45)
    assert comparison.half_width_percent == pytest.approx(2.0, rel=1e-3)


def test_a_stopped_run_is_compared_as_far_as_it_went(forecast):
    assert compare([2.0] * 505, forecast).windows == 20
    assert compare([2.0] * 90, forecast).windows == 0


def test_a_resumed_run_is_compared_over_what_was_seen(forecast):
    losses = np.full(1000, np.nan)
    losses[510:] = 2.0
    assert compare(losses, forecast).windows == 24


def test_the_table_shows_steps_and_signed_errors(forecast):
    table = compare(np.full(1000, 1.9), forecast).table
    assert "1,000" in table
    assert "-5.00 %" in table
