"""schedule_from_lr: the shape that was configured comes back."""

import numpy as np
import pytest

from trajectory_guard.curve import LossCurve
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.logs import schedule_from_lr
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan


def logged(schedule: LRSchedule, *, every: int = 10, total: int = 2000, end: int = 2000, shift: int = 0) -> LossCurve:
    step = np.arange(every, end + 1, every)
    lr = 6e-4 * schedule.ratio((step + shift) / total)
    return LossCurve(step=step, tokens=step * 64.0, loss=np.ones(step.size), lr=lr)


def plan(schedule: LRSchedule) -> RunPlan:
    return RunPlan(total_steps=2000, tokens_per_step=64, active_params=1e6, schedule=schedule)


@pytest.mark.parametrize("shift", [0, -1])
@pytest.mark.parametrize(
    "schedule",
    [
        LRSchedule(shape="constant"),
        LRSchedule(shape="constant", warmup=0.05),
        LRSchedule(shape="linear", warmup=0.02, final=0.1),
        LRSchedule(shape="cosine", warmup=0.05, final=0.1),
        LRSchedule(shape="wsd", warmup=0.02, decay_start=0.8),
        LRSchedule(shape="wsd", warmup=0.02, decay_start=0.75, decay_shape="1-sqrt"),
        LRSchedule(shape="wsd", warmup=0.02, decay_start=0.8, decay_shape="exponential", final=0.01),
        LRSchedule(shape="steps", warmup=0.02, points=((0.6, 0.316), (0.9, 0.1))),
    ],
    ids=lambda value: value.describe() if isinstance(value, LRSchedule) else str(value),
)
def test_named_shapes_are_recognised(schedule: LRSchedule, shift: int) -> None:
    found = schedule_from_lr(logged(schedule, shift=shift), plan(schedule))
    assert found.shape == schedule.shape
    # A staircase is exact up to where the log can place its edges.
    g = np.linspace(0.06, 1.0, 500)
    off = np.abs(found.ratio(g) - schedule.ratio(g)) > 0.011
    assert off.mean() < (0.02 if schedule.shape == "steps" else 1e-9)


def test_other_shapes_become_a_table() -> None:
    schedule = LRSchedule(shape="table", points=((0.0, 0.0), (0.1, 1.0), (0.4, 0.3), (0.5, 0.9), (1.0, 0.2)))
    found = schedule_from_lr(logged(schedule, every=1), plan(schedule))
    assert found.shape == "table" and len(found.points) <= 1000
    g = np.linspace(0.0, 1.0, 500)
    assert np.max(np.abs(found.ratio(g) - schedule.ratio(g))) < 0.01
    assert found.warmup == pytest.approx(0.1, abs=0.01)


def test_log_that_ends_early_is_not_extrapolated() -> None:
    schedule = LRSchedule(shape="wsd", warmup=0.02, decay_start=0.8)
    assert schedule_from_lr(logged(schedule, end=1200), plan(schedule)).shape == "table"


def test_missing_or_zero_learning_rates_are_refused() -> None:
    schedule = LRSchedule(shape="constant")
    curve = logged(schedule)
    with pytest.raises(TrajectoryGuardError, match="no learning rate"):
        schedule_from_lr(LossCurve(step=curve.step, tokens=curve.tokens, loss=curve.loss), plan(schedule))
    with pytest.raises(TrajectoryGuardError, match="not all 0"):
        schedule_from_lr(
            LossCurve(step=curve.step, tokens=curve.tokens, loss=curve.loss, lr=0 * curve.loss), plan(schedule)
        )
