import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trajectory_guard.curve import LossCurve
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.laws.joint import evaluate, place_points
from trajectory_guard.laws.memory import MEMORIES, MEMORY_PARAMETERS
from trajectory_guard.laws.schedule import ScheduleAwareLaw
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan
from trajectory_guard.recipe import Recipe

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import shared_ladders

TRUE = ScheduleAwareLaw("multi-power", [1.7, 0.4, -0.7, -1.5, 0.23, 0.43, 0.3, -0.1, 0.75, np.log(0.03), 0.1, 0.5])
SHAPES = (
    LRSchedule(shape="cosine", warmup=0.02, final=0.1),
    LRSchedule(shape="wsd", warmup=0.02, decay_start=0.8),
    LRSchedule(shape="constant", warmup=0.02),
)


def run(
    name: str, params: float, tokens: float, schedule: LRSchedule, *, upto: float = 1.0, noise=0.0, **recipe
) -> Rung:
    plan = RunPlan(
        total_steps=2000, tokens_per_step=int(tokens / 2000), active_params=params, schedule=schedule,
        recipe=Recipe(**recipe),
    )  # fmt: skip
    step = np.arange(40, int(2000 * upto) + 1, 40)
    loss = TRUE.loss(plan, plan.progress(step)) * (1 + noise * np.random.default_rng(len(name)).normal(size=len(step)))
    return Rung(name=name, plan=plan, curves=(LossCurve(step=step, tokens=plan.tokens(step), loss=loss),))


def made_ladder(**options) -> Ladder:
    sizes = (5e7, 1e8, 2e8)
    rungs = [
        run(f"{n:g}-{k:g}-{shape.shape}", n, n * k, shape, **options)
        for n in sizes
        for k in (10, 40)
        for shape in SHAPES
    ]
    return Ladder(rungs=tuple(rungs))


@pytest.fixture(scope="module")
def ladder() -> Ladder:
    return made_ladder()


@pytest.fixture(scope="module")
def law(ladder: Ladder) -> ScheduleAwareLaw:
    return ScheduleAwareLaw.fit(ladder)


@pytest.mark.parametrize("shape", [*SHAPES, LRSchedule(shape="steps", warmup=0.02, points=((0.5, 0.3),))])
def test_forecasts_a_larger_and_longer_run_of_any_schedule(law: ScheduleAwareLaw, shape: LRSchedule):
    target = run("target", 8e8, 1.6e10, shape)
    curve = target.curves[0]
    g = target.plan.progress(curve.step)
    after = g >= law.first_progress(target.plan)
    # Half a percent: sizes reach to a quarter of the target's, and the priors are not centred on the truth.
    np.testing.assert_allclose(law.loss(target.plan, g[after]), curve.loss[after], rtol=5e-3)


def test_chooses_a_form_that_remembers_and_says_how_all_did(law: ScheduleAwareLaw):
    assert law.memory in MEMORIES[1:]
    assert set(law.scores) == set(MEMORIES)
    assert law.scores[law.memory] < law.scores["instant"]


def test_a_run_that_died_early_is_used_up_to_where_it_got(ladder: Ladder, law: ScheduleAwareLaw):
    *others, last = ladder.rungs
    cut = run(last.name, last.plan.active_params, last.plan.total_tokens, last.plan.schedule, upto=0.5)
    found = ScheduleAwareLaw.fit_with(Ladder(rungs=(*others, cut)), "multi-power")
    np.testing.assert_allclose(found.loss(last.plan, np.ones(1)), law.loss(last.plan, np.ones(1)), rtol=2e-3)


def test_one_spike_does_not_move_the_forecast(ladder: Ladder, law: ScheduleAwareLaw):
    *others, last = ladder.rungs
    curve = last.curves[0]
    loss = curve.loss.copy()
    loss[30] *= 1.5
    spiked = Rung(name=last.name, plan=last.plan, curves=(LossCurve(step=curve.step, tokens=curve.tokens, loss=loss),))
    found = ScheduleAwareLaw.fit_with(Ladder(rungs=(*others, spiked)), law.memory)
    np.testing.assert_allclose(found.loss(last.plan, np.ones(1)), law.loss(last.plan, np.ones(1)), rtol=1e-3)


@pytest.mark.parametrize("memory", MEMORIES)
def test_jacobian_agrees_with_finite_differences(memory):
    theta = TRUE.theta[: 9 + MEMORY_PARAMETERS[memory]]
    plan = run("x", 3e8, 6e9, SHAPES[0]).plan
    points = place_points([plan], [np.linspace(0.05, 1.0, 7)])
    _, jacobian = evaluate(theta, points, memory)
    for i in range(len(theta)):
        step = np.zeros(len(theta))
        step[i] = 1e-6
        above, below = (evaluate(theta + sign * step, points, memory)[0] for sign in (1, -1))
        np.testing.assert_allclose(jacobian[:, i], (above - below) / 2e-6, rtol=2e-5, atol=1e-8)


def test_saved_parameters_rebuild_the_law_exactly(law: ScheduleAwareLaw, ladder: Ladder):
    again = ScheduleAwareLaw.from_params(json.loads(json.dumps(law.to_params())))
    g = np.linspace(0.05, 1, 50)
    plan = ladder.rungs[0].plan
    assert np.array_equal(again.loss(plan, g), law.loss(plan, g))
    assert again.to_params() == law.to_params()


def test_damaged_parameters_are_refused(law: ScheduleAwareLaw):
    good = law.to_params()
    for change in ({"memory": "none"}, {"alpha": "x"}, {"alpha": 9.0}, {"more": 1.0}, {"scores_percent": {"x": 1}}):
        with pytest.raises(TrajectoryGuardError):
            ScheduleAwareLaw.from_params({**good, **change})
    with pytest.raises(TrajectoryGuardError, match="has the parameters"):
        ScheduleAwareLaw.from_params({k: v for k, v in good.items() if k != "beta"})


def test_one_rung_is_refused_and_so_are_rungs_of_different_data_phases(ladder: Ladder):
    with pytest.raises(TrajectoryGuardError, match="at least two rungs"):
        ScheduleAwareLaw.fit(Ladder(rungs=ladder.rungs[:1]))
    phased = [run(f"p{g}", 1e8, 2e9, SHAPES[0], data_phases=(g,)) for g in (0.5, 0.8)]
    with pytest.raises(TrajectoryGuardError, match="data phases"):
        ScheduleAwareLaw.fit(Ladder(rungs=tuple(phased)))


def test_rungs_whose_logs_end_before_the_law_begins_do_not_count(ladder: Ladder):
    short = [run(f"s{i}", 1e8 * i, 2e9, SHAPES[0], upto=0.04) for i in (1, 2)]
    with pytest.raises(TrajectoryGuardError, match="got 1 of 3"):
        ScheduleAwareLaw.fit(Ladder(rungs=(*short, ladder.rungs[0])))


def test_two_processes_give_byte_identical_parameters():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import json, test_schedule as t\n"
        "fit = t.ScheduleAwareLaw.fit(t.Ladder(rungs=t.made_ladder(noise=0.002).rungs[:6]))\n"
        "print(json.dumps(fit.to_params()))"
    )
    root = Path(__file__).resolve().parents[2]
    first, second = (
        subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=True).stdout for _ in range(2)
    )
    assert first == second and b"beta" in first


def errors(law: ScheduleAwareLaw, target: Rung) -> np.ndarray:
    g, loss = shared_ladders.evaluated(target)
    return 100 * np.abs(loss / law.loss(target.plan, g) - 1)


def test_olmo_up_to_760m_forecasts_the_1b_runs(shared_data: Path):
    case = next(h for h in shared_ladders.holdouts(shared_data) if h.family == "olmo")
    law = ScheduleAwareLaw.fit(Ladder(rungs=tuple(case.fit)))
    found = {target.name: errors(law, target) for target in case.targets}
    cosine = [e for name, e in found.items() if "const" not in name and "decay" not in name]
    assert np.mean([e.mean() for e in found.values()]) <= 0.5 and max(e.max() for e in found.values()) <= 1.5
    assert np.mean([e.mean() for e in cosine]) <= 0.3 and max(e.max() for e in cosine) <= 1.4


@pytest.mark.parametrize("size", ["25M", "100M"])
def test_mpl_three_schedules_forecast_the_six_others(shared_data: Path, size: str):
    runs = {name: made for name, made in shared_ladders.mpl(shared_data).items() if f"_{size}_" in name}
    known = [f"mpl_{size}_{kind}" for kind in ("cosine_24000", "constant_24000", "wsdcon_9")]
    law = ScheduleAwareLaw.fit(Ladder(rungs=tuple(runs[name] for name in known)))
    found = [errors(law, made) for name, made in runs.items() if name not in known]
    assert len(found) == 6
    assert np.mean([e.mean() for e in found]) <= 0.2 and max(e.max() for e in found) <= 1.0
