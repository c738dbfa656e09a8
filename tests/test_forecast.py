import csv

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.forecast import Forecast
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan

PLAN = RunPlan(total_steps=1000, tokens_per_step=8, active_params=10, schedule=LRSchedule(shape="linear"))
TABLE = {"progress": [0.02, 0.5, 1.0], "loss": [4.0, 3.0, 2.8], "half_widths": {0.8: [0.03, 0.01, 0.01], 0.95: 0.04}}


def make(**fields) -> Forecast:
    return Forecast(PLAN, **{**TABLE, **fields})


def test_loss_is_linear_in_progress_and_absent_outside_the_forecast():
    forecast = make()
    assert forecast.first_step == 20
    assert np.isnan(forecast.loss(19)) and np.isnan(forecast.loss(1001)) and np.isnan(forecast.loss(0))
    assert forecast.loss(20) == 4.0 and forecast.loss(1000) == 2.8
    assert forecast.loss(260) == pytest.approx(3.5)
    assert isinstance(forecast.loss(500), float)
    np.testing.assert_allclose(forecast.loss([[500, 750], [1000, 20]]), [[3.0, 2.9], [2.8, 4.0]])


@given(step=st.integers(20, 1000), level=st.floats(0.8, 0.95))
def test_intervals_hold_the_forecast_and_widen_with_the_level(step, level):
    forecast = make()
    lower, upper = forecast.interval(step, level)
    assert lower < forecast.loss(step) < upper
    assert forecast.half_width(step, 0.8) <= forecast.half_width(step, level) <= forecast.half_width(step, 0.95)


def test_a_normal_error_is_interpolated_exactly_between_levels():
    widths = {level: 0.01 * norm.ppf((1 + level) / 2) for level in (0.5, 0.8, 0.95)}
    forecast = make(half_widths=widths)
    assert forecast.half_width(500, 0.9) == pytest.approx(0.01 * norm.ppf(0.95), rel=1e-12)


@pytest.mark.parametrize("level", [0.5, 0.99, 0.0, float("nan")])
def test_a_level_outside_the_table_is_refused(level):
    with pytest.raises(TrajectoryGuardError, match="lies outside the levels"):
        make().interval(500, level)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"progress": [0.5, 0.5, 1.0]}, "rise strictly"),
        ({"progress": [0.5, 0.7, 1.1]}, "within"),
        ({"progress": [0.2, 0.5, 0.9]}, "it must reach 1"),
        ({"progress": [0.5, 1.0]}, "of one length"),
        ({"loss": [4.0, float("nan"), 2.0]}, "finite and positive"),
        ({"loss": [4.0, -1.0, 2.0]}, "finite and positive"),
        ({"half_widths": {}}, "at least one level"),
        ({"half_widths": {1.5: 0.1}}, "levels must lie"),
        ({"half_widths": {0.8: -0.1}}, "not negative"),
        ({"half_widths": {0.8: 0.2, 0.95: 0.1}}, "must not fall"),
        ({"half_widths": {0.8: float("inf")}}, "finite"),
    ],
)
def test_bad_tables_are_refused(fields, words):
    with pytest.raises(TrajectoryGuardError, match=words):
        make(**fields)


def test_csv_holds_first_and_last_step_and_every_level(tmp_path):
    forecast = make()
    forecast.to_csv(tmp_path / "f.csv", points=11)
    with (tmp_path / "f.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", "tokens", "progress", "loss", "lower_0.8", "upper_0.8", "lower_0.95", "upper_0.95"]
    assert len(rows) == 11 and rows[0]["step"] == "20" and rows[-1]["step"] == "1000"
    assert float(rows[-1]["loss"]) == 2.8
    assert float(rows[-1]["upper_0.95"]) == pytest.approx(2.8 * np.exp(0.04))


def test_a_forecast_of_the_end_alone_starts_at_the_last_step():
    forecast = Forecast(PLAN, progress=[1.0], loss=[2.5], half_widths={0.8: 0.01})
    assert forecast.first_step == 1000
    assert forecast.loss(1000) == 2.5 and np.isnan(forecast.loss(999))
