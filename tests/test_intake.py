"""LossIntake: one observation per optimizer step, with the right mean, from any tensor."""

import math
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from trajectory_guard import intake as intake_module
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.forecast import Forecast
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.intake import LossIntake
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan


def make_guard(total_steps: int = 100, **keywords) -> TrajectoryGuard:
    plan = RunPlan(
        total_steps=total_steps, tokens_per_step=64, active_params=1000, schedule=LRSchedule(shape="constant")
    )
    table = Forecast(plan, progress=[0.0, 1.0], loss=[3.0, 2.0], half_widths={0.8: 0.02, 0.95: 0.04})
    return TrajectoryGuard(table, **keywords)


@pytest.fixture
def lagged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make CPU tensors take the path of a device without pinned copies: kept there, read `lag` steps later."""
    monkeypatch.setattr(intake_module, "_on_host", lambda value: False)


def test_a_loss_on_the_cpu_is_judged_at_once():
    verdict = LossIntake(make_guard()).observe(1, torch.tensor(2.5))
    assert verdict is not None and (verdict.step, verdict.loss) == (1, 2.5)


def test_micro_batches_are_averaged_by_their_tokens():
    watch = LossIntake(make_guard())
    watch.add(2.0, tokens=10)
    watch.add(torch.tensor(4.0), tokens=torch.tensor(30))
    (verdict,) = watch.end_step(1)
    assert verdict.loss == pytest.approx((2.0 * 10 + 4.0 * 30) / 40)


def test_a_source_of_channels_is_asked_once_a_step_and_named_ones_go_before_it():
    watch = LossIntake(make_guard(), channels=lambda: {"norm": torch.tensor(2.0), "load": 0.5})
    for step in range(1, 4):
        watch.observe(step, 2.5, channels={"norm": 4.0})
    channels = watch.guard._watcher.channels
    assert {name: channel.sample for name, channel in channels.items()} == {
        "norm": pytest.approx([math.log(4.0)] * 3),
        "load": pytest.approx([math.log(0.5)] * 3),
    }


def test_a_source_that_fails_raises_where_other_ranks_wait_for_its_numbers():
    def fails() -> dict[str, float]:
        raise ArithmeticError("no norm to be had")

    with pytest.raises(ArithmeticError, match="no norm"):
        LossIntake(make_guard(), average_ranks=True, channels=fails).observe(1, 2.5)


def test_micro_batches_without_tokens_weigh_the_same():
    watch = LossIntake(make_guard())
    for loss in (1.0, 2.0, 6.0):
        watch.add(torch.tensor(loss, dtype=torch.bfloat16))
    assert watch.end_step(1)[0].loss == 3.0


@pytest.mark.parametrize("path", ["host", "device"])
def test_an_empty_micro_batch_adds_nothing_even_when_its_mean_is_nan(path: str, request: pytest.FixtureRequest):
    if path == "device":
        request.getfixturevalue("lagged")
    watch = LossIntake(make_guard(), lag=1)
    watch.add(torch.tensor(2.0), tokens=torch.tensor(8))
    watch.add(torch.tensor(float("nan")), tokens=torch.tensor(0))
    verdicts = (*watch.end_step(1), *watch.drain())
    assert [v.loss for v in verdicts] == [2.0]


@pytest.mark.parametrize("tokens", [0, None])
def test_a_step_without_tokens_or_micro_batches_is_not_observed(tokens: int | None):
    watch = LossIntake(make_guard())
    if tokens is not None:
        watch.add(float("nan"), tokens=tokens)
    assert watch.end_step(1) == ()
    assert not watch.guard.events


def test_a_nan_with_tokens_reaches_the_guard():
    watch = LossIntake(make_guard())
    verdict = watch.observe(1, float("nan"), tokens=64)
    assert verdict is not None and math.isnan(verdict.loss)
    assert watch.guard.events


@pytest.mark.usefixtures("lagged")
@pytest.mark.parametrize("lag", [1, 2])
def test_a_device_loss_is_judged_exactly_lag_steps_later_and_drained_at_the_end(lag: int):
    watch = LossIntake(make_guard(), lag=lag)
    seen = [watch.observe(step, torch.tensor(2.0 + step / 8)) for step in range(1, 6)]
    assert [v.step if v else None for v in seen] == [None] * lag + list(range(1, 6 - lag))
    rest = watch.drain()
    assert [v.step for v in rest] == list(range(6 - lag, 6))
    assert rest[-1].loss == 2.0 + 5 / 8
    assert watch.drain() == ()


@pytest.mark.usefixtures("lagged")
def test_a_loss_overwritten_in_place_after_the_call_is_judged_as_it_was():
    watch = LossIntake(make_guard(), lag=1)
    loss = torch.tensor(2.5, dtype=torch.float64)
    watch.observe(1, loss)
    loss.fill_(9.0)
    assert watch.drain()[0].loss == 2.5


@pytest.mark.usefixtures("lagged")
def test_a_resumed_intake_goes_on_with_the_open_step_and_the_losses_not_yet_judged():
    losses = [2.0 + 0.01 * i for i in range(24)]

    def feed(watch: LossIntake, first: int, last: int) -> list:
        found = []
        for micro in range(first, last):
            watch.add(torch.tensor(losses[micro]), tokens=4)
            if micro % 3 == 2:
                found += watch.end_step(micro // 3 + 1)
        return found

    whole = LossIntake(make_guard())
    expected = [*feed(whole, 0, 24), *whole.drain()]
    first = LossIntake(make_guard())
    before = feed(first, 0, 13)
    second = LossIntake(make_guard())
    second.load_state_dict(first.state_dict())
    after = [*feed(second, 13, 24), *second.drain()]
    assert repr(before + after) == repr(expected)


def test_the_state_is_plain_and_loads_weights_only(tmp_path):
    watch = LossIntake(make_guard())
    watch.observe(1, 2.5)
    watch.add(2.25)
    torch.save(watch.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["window"] == [2.25, 1.0, False, 1]


def test_a_guards_own_state_is_taken_as_well():
    guard = make_guard()
    guard.observe(1, 2.5)
    watch = LossIntake(make_guard())
    watch.load_state_dict(guard.state_dict())
    assert watch.state_dict()["guard"] == guard.state_dict()


@pytest.mark.parametrize(
    ("loss", "tokens", "says"),
    [
        (torch.zeros(2), None, "must be a scalar"),
        ("2.5", None, "must be a number"),
        (None, None, "must be a number"),
        ([1.0, 2.0], None, "must be a number"),
        (2.5, -1, "count of at least 0"),
        (2.5, float("nan"), "count of at least 0"),
    ],
)
def test_bad_losses_and_tokens_are_named(loss, tokens, says: str):
    with pytest.raises(TrajectoryGuardError, match=says):
        LossIntake(make_guard()).add(loss, tokens=tokens)


def test_a_one_element_tensor_is_a_scalar():
    verdict = LossIntake(make_guard()).observe(1, torch.tensor([2.5], requires_grad=True))
    assert verdict is not None and verdict.loss == 2.5


def test_tokens_on_some_micro_batches_only_are_refused():
    watch = LossIntake(make_guard())
    watch.add(2.0, tokens=3)
    with pytest.raises(TrajectoryGuardError, match="some without"):
        watch.add(2.0)


def test_a_lag_below_one_is_refused():
    with pytest.raises(TrajectoryGuardError, match="lag"):
        LossIntake(make_guard(), lag=0)


def test_leaving_the_context_drains_also_on_an_exception(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(intake_module, "_on_host", lambda value: False)
    guard = make_guard()
    with pytest.raises(KeyboardInterrupt), LossIntake(guard) as watch:
        watch.observe(1, torch.tensor(float("nan")))
        assert not guard.events
        raise KeyboardInterrupt
    assert len(guard.events) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_losses_are_read_without_a_synchronisation():
    watch = LossIntake(make_guard(), lag=2)
    weight = torch.randn(256, 256, device="cuda")
    watch.observe(1, weight.sum() * 0 + 2.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(2, 20):
            watch.add((weight @ weight).sum() * 0 + 2.0, tokens=64)
            watch.end_step(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.drain()[-1].loss == 2.0


def _rank(rank: int, port: int, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    watch = LossIntake(make_guard(), average_ranks=True)
    # Unequal tokens; then an empty rank; then a NaN on one rank.
    steps = [((2.0, 10), (4.0, 30)), ((float("nan"), 0), (2.5, 8)), ((float("nan"), 4), (2.0, 4))]
    found = []
    for step, by_rank in enumerate(steps, start=1):
        loss, tokens = by_rank[rank]
        found.append(watch.observe(step, torch.tensor(loss), tokens=tokens, channels={"norm": float(rank)}))
    mesh = init_device_mesh("cpu", (2,))
    for step, placement in ((4, Replicate()), (5, Partial("avg"))):
        loss = DTensor.from_local(torch.tensor(2.0 + (rank if step == 5 else 0)), mesh, [placement])
        found.append(watch.observe(step, loss))
    (folder / str(rank)).write_text(" ".join(repr(v.loss) for v in found if v))
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_see_the_token_weighted_mean_of_both(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(_rank, args=(port, tmp_path), nprocs=2, start_method="fork")
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["3.5 2.5 nan 2.0 2.5"] * 2
