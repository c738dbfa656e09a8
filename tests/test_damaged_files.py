"""Whatever happens to a file of ours, reading it ends in a valid object or in our own error."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trajectory_guard.detect.events import Severity
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.fit import fit_ladder, load_fit
from trajectory_guard.forecast import Forecast
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.manifest import read_manifest
from trajectory_guard.plan import RunPlan
from trajectory_guard.recipe import Recipe

FITS = sorted((Path(__file__).resolve().parent.parent / "examples" / "fits").glob("*.json"))

JUNK = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        3,
        1e308,
        -1e308,
        1e-320,
        2**70,
        "",
        "x",
        "1",
        [],
        [[]],
        [1],
        [None],
        {},
        {"a": 1},
        [[1, 2], [3]],
    ]
)
RELAXED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def places(content: Any, path: tuple = ()) -> list[tuple]:
    """Every place in a JSON value; of a long list only the first entries."""
    found = [path]
    items = (
        content.items() if isinstance(content, dict) else enumerate(content[:2]) if isinstance(content, list) else ()
    )
    for key, item in items:
        found += places(item, (*path, key))
    return found


def replaced(content: Any, path: tuple, value: Any) -> Any:
    copy = json.loads(json.dumps(content))
    if not path:
        return value
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copy


def removed(content: Any, path: tuple) -> Any:
    copy = json.loads(json.dumps(content))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if path:
        del inner[path[-1]]
    return copy


@pytest.mark.parametrize("name", [path.name for path in FITS])
@RELAXED
@given(data=st.data())
def test_a_fit_with_one_wrong_value_loads_or_says_why(tmp_path, name, data):
    content = json.loads(next(path for path in FITS if path.name == name).read_text())
    where = data.draw(st.sampled_from(places(content)))
    changed = removed(content, where) if data.draw(st.booleans()) else replaced(content, where, data.draw(JUNK))
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(changed))
    try:
        fit = load_fit(path)
        plan = fit.rungs[-1].plan if fit.rungs else None
        if plan is not None:
            with np.errstate(all="ignore"):
                fit.forecast(plan, override_recipe=True)
    except TrajectoryGuardError:
        pass


@pytest.fixture(scope="module")
def fit_with_channels(channel_ladder):
    return fit_ladder(channel_ladder, "matched-progress").to_dict()


@RELAXED
@given(data=st.data())
def test_a_fit_with_one_wrong_value_among_its_channels_loads_or_says_why(tmp_path, fit_with_channels, data):
    where = data.draw(st.sampled_from(places(fit_with_channels["channels"], ("channels",))))
    out = data.draw(st.booleans())
    changed = removed(fit_with_channels, where) if out else replaced(fit_with_channels, where, data.draw(JUNK))
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(changed))
    try:
        fit = load_fit(path)
        courses = fit.forecast(fit.rungs[-1].plan).channels
        assert all(np.all(np.isfinite(course.value)) for course in courses.values())
        assert json.loads(json.dumps(fit.to_dict(), allow_nan=False)) == fit.to_dict()
    except TrajectoryGuardError:
        pass


@RELAXED
@given(data=st.data())
def test_a_plan_with_one_wrong_value_loads_or_says_why(tmp_path, data):
    schedule = LRSchedule(shape="wsd", warmup=0.1, decay_start=0.8)
    recipe = Recipe(tokenizer="a", vocab_size=3, data_phases=(0.5,), software={"python": "3"})
    plan = RunPlan(total_steps=9, tokens_per_step=((1, 2), (5, 4)), active_params=5, schedule=schedule, recipe=recipe)
    path = tmp_path / "plan.json"
    plan.save(path)
    content = json.loads(path.read_text())
    where = data.draw(st.sampled_from(places(content)))
    path.write_text(json.dumps(replaced(content, where, data.draw(JUNK))))
    try:
        read = RunPlan.load(path)
        assert np.isfinite(read.total_flops) and read.identity()
    except TrajectoryGuardError:
        pass


MANIFEST = """
[recipe]
tokenizer = "a"
vocab_size = 3
[plan]
total_steps = 10
schedule = { shape = "linear", warmup = 0.1 }
[read]
unit = "nats"
channels = ["norm"]
[[rung]]
name = "a"
active_params = 100
tokens_per_step = 5
log = "a.csv"
[[rung]]
name = "b"
active_params = 200
tokens_per_step = 10
log = ["b.csv"]
"""
TOML_JUNK = [
    "",
    "0",
    "-1",
    "1.5",
    "inf",
    "nan",
    '"x"',
    "true",
    "[]",
    "[1]",
    '["a.csv", 3]',
    "{}",
    "{ shape = 1 }",
    "1979-05-27",
]


@RELAXED
@given(line=st.integers(0, MANIFEST.count("\n") - 1), junk=st.sampled_from(TOML_JUNK), whole=st.booleans())
def test_a_manifest_with_one_wrong_line_reads_or_says_why(tmp_path, line, junk, whole):
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text(
            "step,loss,norm\n" + "".join(f"{s},{3 - 0.1 * s},1\n" for s in range(1, 11))
        )
    lines = MANIFEST.splitlines()
    key = lines[line].split("=")[0]
    lines[line] = junk if whole else f"{key}= {junk}"
    (tmp_path / "m.toml").write_text("\n".join(lines))
    try:
        read_manifest(tmp_path / "m.toml")
    except TrajectoryGuardError as error:
        assert "m.toml" in str(error)


@pytest.fixture(scope="module")
def guard_state() -> dict[str, Any]:
    """The state of a guard in the middle of a run with a NaN, a jump and a channel, as it went through JSON."""
    guard = silent_guard()
    for step in range(1, 701):
        loss = float("nan") if step == 30 else 2.0 + 0.01 * (step % 7) + 0.3 * (step > 650)
        guard.observe(step, loss, channels={"grad_norm": 1.0 + 0.1 * (step % 5)})
    assert guard.open_events
    return json.loads(json.dumps(guard.state_dict(), allow_nan=False))


def silent_guard() -> TrajectoryGuard:
    plan = RunPlan(total_steps=900, tokens_per_step=64, active_params=1e4, schedule=LRSchedule(shape="linear"))
    forecast = Forecast(plan, progress=[0.02, 1.0], loss=[2.1, 2.0], half_widths={0.8: 0.05, 0.95: 0.1})
    return TrajectoryGuard(forecast, actions={severity: () for severity in Severity})


@RELAXED
@given(data=st.data())
def test_a_guard_state_with_one_wrong_value_goes_on_or_says_why(guard_state, data):
    where = data.draw(st.sampled_from(places(guard_state)))
    changed = removed(guard_state, where) if data.draw(st.booleans()) else replaced(guard_state, where, data.draw(JUNK))
    guard = silent_guard()
    # What a detector cannot use switches it off, with a message; what the guard itself cannot use is refused.
    try:
        guard.load_state_dict(changed)
        with np.errstate(all="ignore"):
            for step in (701, 702, 705, 640):
                assert guard.observe(step, 2.0, channels={"grad_norm": 1.0}).step == step
            guard.state_dict()
    except TrajectoryGuardError:
        pass
