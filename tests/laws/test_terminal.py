import csv
import json
from pathlib import Path

import numpy as np
import pytest

from trajectory_guard.curve import LossCurve
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.laws.floor import fit_floor, likely_floor
from trajectory_guard.laws.isoflop import IsoFlop, isoflop_optima
from trajectory_guard.laws.terminal import TerminalFit
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan


def columns(path: Path, *names: str) -> list[np.ndarray]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [np.array([float(row[name]) for row in rows]) for name in names]


@pytest.fixture(scope="module")
def delphi(shared_data: Path) -> TerminalFit:
    path = shared_data / "ladders/delphi_ladder_isoflop.csv"
    return TerminalFit.from_runs(*columns(path, "budget_flops", "params_total", "tokens", "loss"))


def test_published_optima_reproduce_to_all_digits(delphi: TerminalFit, shared_data: Path):
    names = ("budget_flops", "tokens_star", "params_star", "loss_star", "quad_a", "quad_b", "quad_c")
    published = np.transpose(columns(shared_data / "ladders/delphi_ladder_optima.csv", *names))
    ours = []
    for optimum in delphi.optima:
        assert optimum.quadratic is not None and optimum.inside
        ours.append((optimum.compute, optimum.tokens, optimum.params, optimum.loss, *optimum.quadratic))
    np.testing.assert_allclose(ours, published, rtol=1e-11)


def test_published_laws_and_predictions_reproduce(delphi: TerminalFit):
    # marin-community/delphi-blog-data, and the numbers its text gives.
    assert (delphi.floor, delphi.alpha) == pytest.approx((1.644058, 0.0972360), abs=1e-6)
    assert delphi.amplitude == pytest.approx(121.4494, abs=1e-4)
    assert delphi.token_law == pytest.approx((0.04758, 0.5684), rel=1e-4)
    assert delphi.param_law == pytest.approx((13.41, 0.4026), rel=4e-4)
    np.testing.assert_allclose(delphi.expect([1e21, 1e22, 1e23]), [2.746710, 2.525518, 2.348696], atol=1e-5)


def test_held_out_runs_lie_where_the_publication_says_and_inside_the_interval(delphi: TerminalFit, shared_data: Path):
    compute, loss = columns(shared_data / "ladders/delphi_ladder_heldout.csv", "budget_flops", "loss")
    error = 100 * (loss / delphi.expect(compute) - 1)
    for budget, low, high in ((1e21, 0.415, 0.505), (1e22, 0.205, 0.355), (1e23, 0.245, 0.255)):
        found = error[compute == budget]
        assert found.min() > low and found.max() < high
        lower, upper = delphi.recommend(budget).interval[0.95]
        assert np.all((lower < loss[compute == budget]) & (loss[compute == budget] < upper))


def test_bands_and_sensitivity_are_those_of_the_publication(delphi: TerminalFit):
    for compute, low, high in ((1e21, -0.5, 0.8), (1e22, -1.9, 1.8), (1e23, -4.0, 3.1)):
        band = 100 * (np.array(delphi.band(compute)) / delphi.expect(compute) - 1)
        np.testing.assert_allclose(band, [low, high], atol=0.25)
    (_, low, rms_low), (_, high, rms_high) = delphi.sensitivity(1e23, [1.5, 1.75])
    actual = 2.3546013832092285
    assert 100 * (actual / low - 1) == pytest.approx(1.3, abs=0.05)
    assert 100 * (actual / high - 1) == pytest.approx(-0.6, abs=0.05)
    assert max(rms_low, rms_high) / delphi.rms == pytest.approx(1.15, abs=0.01)


def test_a_resampled_band_is_the_same_in_every_call(delphi: TerminalFit):
    assert delphi.band(1e22) == delphi.band(1e22)


def test_67b_run_from_its_three_anchors_with_the_published_floor(shared_data: Path):
    names = ("flops_at_80pct", "active_params", "tokens_full", "loss_paloma_macro_at_80pct")
    runs = [column[:3] for column in columns(shared_data / "ladders/snowball_67b_anchors.csv", *names)]
    assert float(TerminalFit.from_runs(*runs, floor=1.4).expect(1.19e23)) == pytest.approx(2.269, abs=1e-3)
    ours = TerminalFit.from_optima(isoflop_optima(*runs)).recommend(1.19e23)
    lower, upper = ours.interval[0.95]
    assert lower < 2.256 < upper


def test_saved_parameters_rebuild_the_fit_exactly(delphi: TerminalFit):
    again = TerminalFit.from_params(json.loads(json.dumps(delphi.to_params())))
    assert again.recommend(1e22) == delphi.recommend(1e22)
    pinned = TerminalFit(delphi.optima, floor=1.5)
    assert TerminalFit.from_params(pinned.to_params()).floor == 1.5
    with pytest.raises(TrajectoryGuardError, match="pinned_floor"):
        TerminalFit.from_params({"optima": []})


def exact(compute: float) -> IsoFlop:
    loss = 1.5 + 100 * compute**-0.1
    return IsoFlop(compute=compute, tokens=1e9, params=1e8, loss=loss, quadratic=None, inside=True, runs=1)


def test_compute_far_beyond_the_ladder_is_refused():
    fit = TerminalFit([exact(c) for c in (1e18, 1e19, 1e20)])
    assert fit.recommend(1e24).reach == pytest.approx(1e4)
    for compute in (1.1e24, 0.0, -1.0, float("nan")):
        with pytest.raises(TrajectoryGuardError, match="1e4 x the largest budget"):
            fit.recommend(compute)


def test_too_few_budgets_and_floors_above_a_loss_are_refused():
    with pytest.raises(TrajectoryGuardError, match="at least 3 compute budgets, got 2"):
        TerminalFit([exact(1e18), exact(1e19)])
    with pytest.raises(TrajectoryGuardError, match="below every loss"):
        fit_floor([1e18, 1e19], [3.0, 2.5], floor=2.6)
    with pytest.raises(TrajectoryGuardError, match="finite and positive"):
        isoflop_optima([1e18], [1e8], [1e9], [np.nan])


def test_a_minimum_outside_the_sampled_tokens_is_flagged_and_a_budget_without_one_left_out():
    tokens = np.array([1e9, 2e9, 4e9])
    x = np.log10(tokens)
    far = 3 + (x - 9.8) ** 2
    hill = 3 - (x - 9.3) ** 2
    found = isoflop_optima([1e18] * 3 + [1e19] * 3, [1e8] * 6, np.tile(tokens, 2), np.append(far, hill))
    assert [optimum.inside for optimum in found] == [False]


def test_three_budgets_take_their_floor_with_the_prior():
    c = np.array([1e18, 1e19, 1e20])
    bent = np.array([3.5, 3.08, 2.75])
    assert fit_floor(c, bent)[0] / 2.75 > 0.4
    loss = np.array([3.5, 3.08, 2.75])
    assert 0.4 < likely_floor(c, loss) / 2.75 < 0.6


def ladder_of_finals(reached: float = 1.0) -> Ladder:
    rungs = []
    for i, params in enumerate((1e6, 2e6, 4e6)):
        plan = RunPlan(
            total_steps=100, tokens_per_step=10**5 * 2**i, active_params=params, schedule=LRSchedule(shape="cosine")
        )
        step = np.array([1, int(100 * reached)])
        final = 1.5 + 50 * plan.total_flops**-0.1
        curve = LossCurve(step=step, tokens=plan.tokens(step), loss=[9.0, final])
        rungs.append(Rung(name=f"r{i}", plan=plan, curves=(curve, curve)))
    return Ladder(rungs=tuple(rungs))


def test_a_ladder_of_finished_runs_gives_its_finals_law():
    ladder = ladder_of_finals()
    fit = TerminalFit.fit(ladder)
    largest = ladder.rungs[-1].plan
    assert fit.loss(largest, np.ones(2)) == pytest.approx(ladder.rungs[-1].curves[0].loss[-1], rel=2e-3)
    assert fit.first_progress(largest) == 1.0
    with pytest.raises(TrajectoryGuardError, match="only the end of training"):
        fit.loss(largest, np.array([0.5]))


def test_a_ladder_of_runs_that_died_is_refused():
    with pytest.raises(TrajectoryGuardError, match="no rung of the ladder reached the end"):
        TerminalFit.fit(ladder_of_finals(0.5))
