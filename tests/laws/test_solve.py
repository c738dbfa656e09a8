import numpy as np
import pytest
from scipy.optimize import nnls

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.laws.solve import nonnegative, polish
from trajectory_guard.laws.surface import Surface, fit_surface


def test_nonnegative_agrees_with_the_full_active_set_solver_on_many_random_problems():
    rng = np.random.default_rng(1)
    for _ in range(50):
        basis = rng.normal(size=(40, 4)) * 10.0 ** rng.integers(-3, 4, 4)
        target = rng.normal(size=40)
        ours = nonnegative(basis, target)
        theirs, norm = nnls(basis, target)
        assert ours.min() >= 0
        assert np.linalg.norm(basis @ ours - target) == pytest.approx(norm, rel=1e-9)
        np.testing.assert_allclose(basis @ ours, basis @ theirs, atol=1e-8)


def test_nonnegative_gives_nothing_to_a_column_of_zeros():
    basis = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    assert nonnegative(basis, np.array([2.0, 2.0, 2.0])).round(12).tolist() == [2.0, 0.0]


def test_nonnegative_says_when_a_value_is_not_finite():
    with pytest.raises(TrajectoryGuardError, match="not finite"):
        nonnegative(np.array([[1.0], [np.nan]]), np.ones(2))


def line(x, y):
    basis = np.stack([np.ones_like(x), x], axis=1)
    return lambda p: (basis @ p - y, basis)


def test_polish_without_outliers_is_least_squares():
    x = np.linspace(0, 1, 30)
    y = 1 + 2 * x + 1e-4 * np.sin(40 * x)
    found, _ = polish(line(x, y), np.zeros(2), np.full(2, -9.0), np.full(2, 9.0), scale=1.0)
    np.testing.assert_allclose(found, np.polynomial.polynomial.polyfit(x, y, 1), atol=1e-6)


def test_polish_weight_two_equals_the_point_twice():
    rng = np.random.default_rng(2)
    x, y = np.linspace(0, 1, 20), rng.normal(size=20)
    bounds = (np.full(2, -9.0), np.full(2, 9.0))
    weights = np.ones(20)
    weights[:5] = 2.0
    weighted, _ = polish(line(x, y), np.zeros(2), *bounds, scale=0.3, weights=weights)
    twice = line(np.append(x, x[:5]), np.append(y, y[:5]))
    np.testing.assert_allclose(weighted, polish(twice, np.zeros(2), *bounds, scale=0.3)[0], atol=1e-6)


def test_polish_squares_the_residuals_after_the_robust_ones():
    # One robust point pulls to 0, a squared prior of equal scale at 10: the prior wins.
    def residual(p):
        return np.array([p[0], p[0] - 10.0]) * 5.0, np.full((2, 1), 5.0)

    found, _ = polish(residual, np.zeros(1), np.full(1, -99.0), np.full(1, 99.0), robust=1)
    assert found[0] > 9.5


def test_surface_of_the_published_chinchilla_constants_is_recovered_from_240_points():
    # Constants of Epoch's refit (Besiroglu et al. 2024, arXiv:2404.10102). Their 240 points are not at hand: these are
    # drawn over the same range of sizes and compute, with heavy-tailed noise in the second case.
    true = Surface(floor=1.8172, a=482.01, b=2085.43, alpha=0.3478, beta=0.3658)
    rng = np.random.default_rng(0)
    n = np.exp(rng.uniform(np.log(5e7), np.log(1.6e10), 240))
    d = np.exp(rng.uniform(np.log(6e18), np.log(3e21), 240)) / 6 / n
    exact = fit_surface(n, d, true.loss(n, d))
    for name in ("floor", "a", "b", "alpha", "beta"):
        assert getattr(exact, name) == pytest.approx(getattr(true, name), rel=1e-6)
    noisy = fit_surface(n, d, true.loss(n, d) * np.exp(0.002 * rng.standard_t(3, 240)))
    assert noisy.floor == pytest.approx(true.floor, abs=0.02)
    assert noisy.alpha == pytest.approx(true.alpha, abs=0.01)


def test_surface_optimum_is_the_least_loss_at_its_compute():
    surface = Surface(floor=1.8, a=500.0, b=2000.0, alpha=0.35, beta=0.37)
    n, d = surface.optimum(1e21)
    assert 6 * n * d == pytest.approx(1e21)
    around = n * np.exp(np.linspace(-0.1, 0.1, 21))
    assert np.argmin(surface.loss(around, 1e21 / 6 / around)) == 10


def test_surface_refuses_too_few_runs_and_runs_of_one_size():
    with pytest.raises(TrajectoryGuardError, match="at least 6 runs"):
        fit_surface([1e8] * 5, [1e9] * 5, [3.0] * 5)
    with pytest.raises(TrajectoryGuardError, match="two sizes"):
        fit_surface([1e8] * 6, np.geomspace(1e9, 1e10, 6), np.linspace(3, 2, 6))
