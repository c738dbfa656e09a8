import json
import sys
from pathlib import Path

import numpy as np
import pytest

from trajectory_guard.curve import LossCurve
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.laws.collapse import CollapseLaw
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import shared_ladders


def shape(g):
    return 1 + 0.3 * (1 - g) + 0.05 / g


def run(name: str, params: float, *, per_param: float = 20, upto: float = 1.0, schedule: str = "cosine") -> Rung:
    plan = RunPlan(
        total_steps=1000, tokens_per_step=int(params * per_param / 1000), active_params=params,
        schedule=LRSchedule(shape=schedule, warmup=0.01),
    )  # fmt: skip
    step = np.arange(10, int(1000 * upto) + 1, 10)
    loss = (1.6 + 60 * plan.total_flops**-0.1) * shape(plan.progress(step)) / shape(1.0)
    return Rung(name=name, plan=plan, curves=(LossCurve(step=step, tokens=plan.tokens(step), loss=loss),))


LADDER = Ladder(rungs=tuple(run(f"{n:g}", n) for n in (1e7, 3e7, 1e8, 3e8)))


def test_curves_that_collapse_are_forecast_exactly_in_shape_and_nearly_in_level():
    law = CollapseLaw.fit(LADDER)
    target = run("target", 1e9)
    curve = target.curves[0]
    g = target.plan.progress(curve.step)
    after = g >= law.first_progress(target.plan)
    ratio = curve.loss[after] / law.loss(target.plan, g[after])
    assert np.ptp(ratio) < 2e-3  # linear between knots
    assert abs(ratio[-1] - 1) < 1e-2  # the floor's prior


def test_alignment_to_a_run_s_own_losses_finds_its_final_loss():
    law = CollapseLaw.fit(LADDER)
    target = run("target", 1e9)
    curve = target.curves[0]
    g = target.plan.progress(curve.step)
    early = (g >= 0.05) & (g <= 0.3)
    assert law.align(target.plan, g[early], curve.loss[early]) == pytest.approx(curve.loss[-1], rel=1e-3)
    loss = curve.loss.copy()
    loss[10] *= 2  # one spike does not move the median
    assert law.align(target.plan, g[early], loss[early]) == pytest.approx(curve.loss[-1], rel=1e-3)
    with pytest.raises(TrajectoryGuardError, match="align later"):
        law.align(target.plan, [0.001], [5.0])


def test_the_shape_is_that_of_the_nearest_rung():
    law = CollapseLaw.fit(LADDER)
    for i, rung in enumerate(LADDER.rungs):
        np.testing.assert_array_equal(law.shape_at(rung.plan, law.progress), law.shape[i])


def test_rungs_of_different_schedule_or_tokens_per_parameter_are_refused():
    for odd in (run("odd", 1e9, schedule="linear"), run("odd", 1e9, per_param=40)):
        with pytest.raises(TrajectoryGuardError, match="odd"):
            CollapseLaw.fit(Ladder(rungs=(*LADDER.rungs, odd)))


def test_one_finished_rung_is_too_few():
    with pytest.raises(TrajectoryGuardError, match="at least two rungs of different compute"):
        CollapseLaw.fit(Ladder(rungs=(LADDER.rungs[0], run("died", 1e9, upto=0.5))))


def test_saved_parameters_rebuild_the_law_exactly_and_damaged_ones_are_refused():
    law = CollapseLaw.fit(LADDER)
    params = json.loads(json.dumps(law.to_params()))
    plan, g = LADDER.rungs[0].plan, np.linspace(0.05, 1, 30)
    assert np.array_equal(CollapseLaw.from_params(params).loss(plan, g), law.loss(plan, g))
    for change in ({"floor": 99.0}, {"progress": [1.0]}, {"log_flops": [1.0]}, {"more": 1}):
        with pytest.raises(TrajectoryGuardError):
            CollapseLaw.from_params({**params, **change})


def test_olmo_1b_shape_from_the_760m_run(shared_data: Path):
    runs = shared_ladders.olmo(shared_data)
    law = CollapseLaw.fit(Ladder(rungs=tuple(runs[f"olmo-{size}-5xC"] for size in ("190M", "370M", "760M"))))
    target = runs["olmo-1B-5xC"]
    g, loss = shared_ladders.evaluated(target)
    assert 100 * np.mean(np.abs(loss / law.loss(target.plan, g) - 1)) < 0.3
    early = g <= 0.3
    aligned = law.align(target.plan, g[early], loss[early]) * law.shape_at(target.plan, g[~early])
    assert 100 * np.max(np.abs(loss[~early] / aligned - 1)) < 0.5
