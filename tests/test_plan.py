import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajectory_guard.errors import FileFormatError, TrajectoryGuardError
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan
from trajectory_guard.recipe import Recipe

FIELDS = {
    "total_steps": 100,
    "tokens_per_step": 10,
    "active_params": 50.0,
    "schedule": LRSchedule(shape="cosine", warmup=0.1),
}


def make(**fields) -> RunPlan:
    return RunPlan(**{**FIELDS, **fields})


ramps = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 1000)), min_size=1, max_size=5).map(
    lambda phases: tuple((1 if i == 0 else 40 * i + a, b) for i, (a, b) in enumerate(phases))
)


@given(ramp=ramps, extra=st.integers(0, 50))
def test_tokens_are_the_sum_of_the_batches_and_step_at_inverts_progress(ramp, extra):
    total = ramp[-1][0] + extra
    plan = make(total_steps=total, tokens_per_step=ramp)
    sizes = [next(size for first, size in reversed(ramp) if first <= s) for s in range(1, total + 1)]
    np.testing.assert_array_equal(plan.tokens(np.arange(1, total + 1)), np.cumsum(sizes))
    assert plan.total_tokens == sum(sizes)
    steps = np.arange(total + 1)
    np.testing.assert_allclose(plan.step_at(plan.progress(steps)), steps, atol=1e-6)


def test_progress_runs_from_0_to_1_and_beyond_as_planned():
    plan = make(tokens_per_step=((1, 10), (51, 30)))
    assert (plan.progress(0), plan.progress(100), plan.progress(50)) == (0.0, 1.0, 0.25)
    assert plan.progress(101) > 1.0


def test_flops_follow_the_convention():
    assert make().total_flops == 6 * 50.0 * 1000
    counted = make(flops_per_token=400.0, flops_convention="per-token-including-lm-head")
    assert counted.total_flops == 400_000
    with pytest.raises(TrajectoryGuardError, match="needs flops_per_token"):
        make(flops_convention="per-token-including-lm-head")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"total_steps": 0}, "total_steps must be a positive integer up to 2.53, got 0"),
        ({"total_steps": 1.5}, "total_steps"),
        ({"total_steps": True}, "total_steps"),
        ({"tokens_per_step": -1}, "tokens_per_step"),
        ({"tokens_per_step": 2.0}, "tokens_per_step must be an int or"),
        ({"tokens_per_step": ()}, "start at step 1"),
        ({"tokens_per_step": ((2, 5),)}, r"start at step 1.*\[2\]"),
        ({"tokens_per_step": ((1, 5), (1, 6))}, "rise strictly"),
        ({"tokens_per_step": ((1, 5), (101, 6))}, "after total_steps = 100"),
        ({"tokens_per_step": ((1, 5, 6),)}, "tokens_per_step must be"),
        ({"active_params": 0}, "active_params must be a positive finite number"),
        ({"active_params": float("nan")}, "active_params"),
        ({"active_params": "7B"}, "active_params"),
        ({"total_params": -1.0}, "total_params"),
        ({"flops_convention": "8ND"}, "flops_convention must be one of"),
        ({"split": "test"}, "split must be one of"),
        ({"metric": ""}, "metric must be a name"),
        ({"schedule": "cosine"}, "schedule must be an LRSchedule"),
        ({"recipe": {}}, "recipe must be a Recipe"),
    ],
)
def test_bad_values_are_refused_naming_field_and_value(fields, words):
    with pytest.raises(TrajectoryGuardError, match=words):
        make(**fields)


def test_a_saved_plan_loads_equal(tmp_path):
    plan = make(
        tokens_per_step=((1, 10), (51, 30)),
        total_params=1e3,
        split="validation",
        recipe=Recipe(tokenizer="byte", data_phases=(0.5,), software={"python": "3.11"}),
    )
    plan.save(tmp_path / "plan.json")
    assert RunPlan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"surprise": 1}, r"unknown here: \['surprise'\]"),
        ({"total_steps": None}, "total_steps"),
        ({"schedule": "cosine"}, "`schedule` must be an object"),
        ({"schedule": {"shape": "saw"}}, "schedule shape"),
        ({"schedule": {}}, "needs `shape`"),
        ({"recipe": {"vocab_size": "many"}}, "`vocab_size` has the wrong type"),
        ({"recipe": {"tokeniser": "a"}}, r"unknown recipe fields \['tokeniser'\]"),
        ({"recipe": 3}, "`recipe` must be an object"),
        ({"tokens_per_step": [[1]]}, "tokens_per_step"),
        ({"tokens_per_step": [1, 2]}, "tokens_per_step|iterable"),
        ({"tokens_per_step": "ten"}, "tokens_per_step"),
        ({"version": 2}, "newer than 1"),
        ({"version": "1"}, "expected an integer"),
        ({"format": "trajectory-guard-fit"}, "expected 'trajectory-guard-plan'"),
    ],
)
def test_a_damaged_plan_file_is_refused(tmp_path, change, words):
    path = tmp_path / "plan.json"
    make().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FileFormatError, match=words):
        RunPlan.load(path)


def test_a_plan_without_a_required_field_is_refused(tmp_path):
    make().save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    del content["active_params"]
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(FileFormatError, match=r"missing: \['active_params'\]"):
        RunPlan.load(tmp_path / "plan.json")


def test_batch_schedules_of_one_rule_agree_at_different_sizes():
    small = make(tokens_per_step=((1, 10), (51, 20)))
    large = make(tokens_per_step=((1, 100), (51, 200)))
    assert small.identity()["batch_schedule"] == large.identity()["batch_schedule"] == [[0.0, 1.0], [0.333, 2.0]]
