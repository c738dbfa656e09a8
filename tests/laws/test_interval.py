import math

import numpy as np
import pytest

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.laws import interval
from trajectory_guard.laws.interval import (
    K0,
    IntervalModel,
    NestedError,
    early_factor,
    fit_interval,
    quantile,
    size_distance,
)


def spread(backtests: int) -> float:
    if not backtests:
        return math.hypot(0.56, 0.43)
    variance = 0.43**2 * (1 + 0.5 * (backtests - 1)) / backtests
    return math.sqrt(1 / (1 / 0.56**2 + 1 / variance) + 0.43**2)


@pytest.mark.parametrize(("m", "q80", "q95"), [(0, 1.68, 3.33), (1, 1.53, 2.69), (2, 1.51, 2.63), (3, 1.51, 2.60)])
def test_quantiles_are_those_of_the_calibration(m, q80, q95):
    # The listed values come from a simulation of a million draws and carry its noise.
    assert quantile(0.8, spread(m)) == pytest.approx(q80, abs=0.02)
    assert quantile(0.95, spread(m)) == pytest.approx(q95, abs=0.02)


def test_quantile_agrees_with_draws():
    rng = np.random.default_rng(0)
    draws = np.abs(rng.normal(0.85, 0.53, 400_000)) * np.exp(0.5 * rng.standard_normal(400_000))
    for level in (0.5, 0.8, 0.95, 0.99):
        assert quantile(level, 0.5) == pytest.approx(np.quantile(draws, level), rel=0.01)


def test_without_back_tests_the_usual_error_of_ladders_stands():
    made = fit_interval([], 1e9)
    assert (made.scale, made.backtests) == (K0, 0)
    assert made.spread == pytest.approx(spread(0))
    # One e-fold beyond the ladder at the end of training: q(.95) x .67 %.
    width = made.half_width(math.e * 1e9, 1.0, 0.95)
    assert width == pytest.approx(quantile(0.95, spread(0)) * 0.0067 * early_factor(1.0), rel=0.01)


def test_one_back_test_pulls_the_scale_half_way_in_logs():
    made = fit_interval([NestedError(target=2, distance=1.0, error=0.02)], 1e9)
    share = (1 / 0.43**2) / (1 / 0.43**2 + 1 / 0.56**2)
    assert math.log(made.scale / K0) == pytest.approx(share * math.log(math.hypot(0.02, 0.0006) / K0), rel=1e-9)


def test_a_lucky_ladder_is_not_believed_below_three_quarters():
    errors = [NestedError(target=t, distance=1.0, error=1e-5) for t in (2, 3, 4)]
    assert fit_interval(errors, 1e9).scale == pytest.approx(0.75 * K0)


def test_a_ladder_of_one_size_promises_less_of_other_sizes_and_as_much_of_its_own():
    one, more = fit_interval([], 1e9, sizes=1), fit_interval([], 1e9)
    assert one.half_width(3e9, 1.0, 0.8) > 2 * more.half_width(3e9, 1.0, 0.8)
    assert one.half_width(1e9, 1.0, 0.8) == pytest.approx(more.half_width(1e9, 1.0, 0.8), rel=0.05)


def test_the_level_of_a_ladder_of_one_size_is_known_from_two_families_only():
    # Predictive sd of a third family around the mean of two, with the spread between targets of one ladder.
    assert fit_interval([], 1e9, sizes=1).spread == pytest.approx(math.sqrt(1.5 * 0.56**2 + 0.43**2))
    rng = np.random.default_rng(0)
    levels = rng.normal(0.0, 0.56, (200_000, 3))
    off = levels[:, 2] - levels[:, :2].mean(axis=1) + rng.normal(0.0, 0.43, 200_000)
    assert fit_interval([], 1e9, sizes=1).spread == pytest.approx(off.std(), rel=0.01)


def test_other_ladders_do_not_know_of_the_constants_of_one_size(monkeypatch):
    errors = [NestedError(target=2, distance=1.0, error=0.02)]
    before = fit_interval(errors, 1e9), fit_interval([], 1e9)
    for name in ("ONE_SIZE_SCALE", "ONE_SIZE_POWER", "ONE_SIZE_FAMILIES"):
        monkeypatch.setattr(interval, name, 9)
    assert (fit_interval(errors, 1e9), fit_interval([], 1e9)) == before


def test_a_larger_target_a_lower_progress_and_a_higher_level_are_wider():
    made = fit_interval([], 1e9)
    at = [made.half_width(n, g, level) for n, g, level in ((2e9, 1, 0.8), (8e9, 1, 0.8), (8e9, 0.05, 0.8))]
    assert at[0] < at[1] < at[2] < made.half_width(8e9, 0.05, 0.95)


def test_a_target_no_larger_than_the_ladder_keeps_a_distance():
    assert size_distance(1.0, 10.0) == 0.1


def test_the_model_survives_json_and_refuses_damage():
    made = fit_interval([], 1e9)
    assert IntervalModel.from_dict(made.to_dict()) == made
    for change in ({"scale": -1.0}, {"scale": "wide"}, {"spread": 10.0}, {"largest_params": 0}, {"extra": 1.0}):
        with pytest.raises(TrajectoryGuardError, match="interval"):
            IntervalModel.from_dict({**made.to_dict(), **change})
