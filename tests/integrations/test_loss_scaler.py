"""Training under a real fp16 loss scaler on the CPU: what it skips is no alarm, a run of overflows is."""

import pytest

torch = pytest.importorskip("torch")

from trajectory_guard.detect.events import Severity  # noqa: E402
from trajectory_guard.forecast import Forecast  # noqa: E402
from trajectory_guard.guard import TrajectoryGuard  # noqa: E402
from trajectory_guard.intake import LossIntake  # noqa: E402
from trajectory_guard.lr_schedule import LRSchedule  # noqa: E402
from trajectory_guard.plan import RunPlan  # noqa: E402


def train(overflows: set[int], *, loss_scaler: bool = True, steps: int = 40) -> tuple[TrajectoryGuard, list[int], int]:
    """Train in float16; the forward of the steps in `overflows` exceeds its range.

    Returns the guard, the steps that the scaler skipped, and the last step.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert scaler.is_enabled()
    plan = RunPlan(total_steps=steps, tokens_per_step=64, active_params=5, schedule=LRSchedule(shape="constant"))
    forecast = Forecast(plan, progress=[0.0, 1.0], loss=[3.0, 1.0], half_widths={0.8: 0.2, 0.95: 0.4})
    skipped, step = [], 0
    guard = TrajectoryGuard(forecast, actions={"critical": "stop"}, loss_scaler=loss_scaler)
    with LossIntake(guard) as watch:
        for step in range(1, steps + 1):
            x = torch.randn(64, 4, generator=torch.Generator().manual_seed(step))
            y = x.sum(dim=1, keepdim=True)
            if step in overflows:
                x = x * 1e6
            before = model.weight.detach().clone()
            with torch.autocast("cpu", dtype=torch.float16):
                predicted = model(x)
            assert predicted.dtype == torch.float16
            loss = (predicted.float() - y).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if torch.equal(before, model.weight):
                skipped.append(step)
            watch.observe(step, loss)
            if watch.should_stop:
                break
    return guard, skipped, step


def test_a_skipped_step_is_a_note_and_the_run_goes_on():
    guard, skipped, last = train({12, 30})
    assert skipped == [12, 30]
    assert last == guard.last_step == 40
    assert {(event.kind, event.severity) for event in guard.events} == {("non_finite", Severity.INFO)}


def test_three_skips_in_a_row_are_critical():
    guard, skipped, last = train({12, 20, 21, 22, 23})
    assert skipped == [12, 20, 21, 22]
    assert last == 22
    assert max(event.severity for event in guard.events) == Severity.CRITICAL


def test_without_a_scaler_the_first_overflow_is_critical():
    _, _, last = train({12}, loss_scaler=False)
    assert last == 12
