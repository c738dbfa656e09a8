"""Noise: scale from differences, correlation, quantum, changes."""

import math

import numpy as np
import pytest

from trajectory_guard.detect.noise import NoiseChange, NoiseScale, autocorrelation, long_run_factor


def scale_of(residuals: np.ndarray, losses: np.ndarray | None = None) -> float:
    noise = NoiseScale()
    losses = residuals + 3.0 if losses is None else losses
    for first in range(0, len(residuals), 30):
        noise.add(residuals[first : first + 30].tolist(), losses[first : first + 30].tolist())
    noise.refresh()
    return noise.sigma


def test_the_scale_of_white_noise_is_its_sd():
    residuals = 0.02 * np.random.default_rng(0).standard_normal(512)
    assert scale_of(residuals) == pytest.approx(0.02, rel=0.1)


def test_the_scale_is_blind_to_levels_and_outliers():
    residuals = 0.02 * np.random.default_rng(0).standard_normal(512)
    clean = scale_of(residuals)
    residuals[200:] += 5.0
    residuals[::50] += 1.0
    assert scale_of(residuals) == pytest.approx(clean, rel=0.1)


def test_differences_are_those_of_neighbours_at_weight_1():
    noise = NoiseScale()
    assert noise.add([1.0, 3.0], [1.0, 3.0], [1.0, 2.0]) == [4.0]
    assert noise.add([2.0], [2.5]) == [1.0]
    noise.skip()
    assert noise.add([7.0, 6.5], [7.0, 6.75]) == [0.5]
    assert noise.differences == [4.0, 1.0, 0.5] and noise.quantum == 0.25


def test_a_rounded_loss_has_half_its_step_as_the_least_scale():
    losses = np.round((3.0 + 1e-3 * np.random.default_rng(0).standard_normal(512)) * 64) / 64
    losses[100] += 1 / 64
    assert scale_of(losses - 3.0, losses) == pytest.approx(1 / 128)


@pytest.mark.parametrize("rho", [0.3, 0.6, 0.9])
def test_sums_of_correlated_noise_have_the_size_that_the_factor_says(rho):
    rng = np.random.default_rng(1)
    shocks = rng.standard_normal((200, 3000))
    values = np.zeros_like(shocks)
    for i in range(1, 3000):
        values[:, i] = rho * values[:, i - 1] + shocks[:, i]
    sums = values[:, 1000:].sum(axis=1).std() / math.sqrt(2000)
    differences = np.median(np.abs(np.diff(values[:, 1000:], axis=1))) * 1.0484
    assert long_run_factor(rho) * differences == pytest.approx(sums, rel=0.15)
    assert autocorrelation((values[0, 1000:] / values.std()).tolist()) == pytest.approx(rho, abs=0.08)


def test_white_noise_is_not_corrected():
    assert long_run_factor(0.05) == 1.0 and long_run_factor(-0.5) == 1.0


def test_a_change_of_the_noise_is_told_once_and_a_steady_one_never():
    rng = np.random.default_rng(2)
    change = NoiseChange()
    told = [change.update(block.tolist(), 0.02) for block in abs(0.02 * rng.standard_normal((200, 25)))]
    assert told == [None] * 200
    told = [change.update(block.tolist(), 0.02) for block in abs(0.05 * rng.standard_normal((80, 25)))]
    ratios = [ratio for ratio in told if ratio]
    assert len(ratios) == 1 and ratios[0] > 1.5


def test_a_slow_bend_of_the_forecast_is_no_correlation_of_the_noise():
    rng = np.random.default_rng(3)
    bend = 2.0 * np.exp(-np.arange(400) / 60.0)
    assert abs(autocorrelation((rng.standard_normal(400) + bend).tolist())) < 0.12
