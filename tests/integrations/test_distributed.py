"""More ranks, sharded weights, a rank that dies: the guard decides the same everywhere and adds no hang."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["raw", "lightning", "fsdp2"])
def test_four_ranks_agree_and_make_the_same_collective_calls(name: str, tmp_path: Path):
    command = [sys.executable, "-W", "ignore", str(HERE / "adapters.py"), "4", str(tmp_path), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(4)]
    for other in ranks[1:]:
        for a, b in zip(ranks[0], other, strict=True):
            assert (a["losses"], a["steps"], a["events"]) == (b["losses"], b["steps"], b["events"])
            assert a["collectives"] == b["collectives"]
    # The last rank alone got the NaN.
    assert [rank[1]["steps"] for rank in ranks] == [5] * 4


DYING = """
import os, sys, torch
sys.path.insert(0, {root!r})
sys.path.insert(0, {here!r})
from adapters import Line, make_forecast, Job
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.intake import LossIntake
rank = int(sys.argv[1])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + sys.argv[2])
model = torch.nn.parallel.DistributedDataParallel(Line())
job = Job(folder=None, rank=rank)
with LossIntake(TrajectoryGuard(make_forecast()), average_ranks=True) as watch:
    for step in range(1, 31):
        if step == 5 and rank == 1:
            os._exit(9)
        loss = model(*job.micro_batch(step))
        {order}
"""


@pytest.mark.parametrize(
    "order",
    ["loss.backward(); watch.observe(step, loss)", "watch.observe(step, loss); loss.backward()"],
    ids=["the framework meets it first", "the guard meets it first"],
)
def test_a_dead_rank_ends_the_others_with_the_frameworks_own_error(order: str, tmp_path: Path):
    script = DYING.format(root=str(HERE.parents[1]), here=str(HERE), order=order)
    command = [sys.executable, "-W", "ignore", "-c", script]
    store = str(tmp_path / "store")
    ranks = [subprocess.Popen([*command, str(rank), store], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        _, survivor = ranks[0].communicate(timeout=240)
        ranks[1].communicate(timeout=60)
    finally:
        for process in ranks:
            process.kill()
    assert ranks[1].returncode == 9
    assert ranks[0].returncode == 1
    assert "backward" in survivor


TRAINING = """
import json, os, sys, time, torch
from pathlib import Path
sys.path.insert(0, {root!r})
sys.path.insert(0, {here!r})
from adapters import Line, make_forecast, Job
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.intake import LossIntake
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
resume, last, slow_s = sys.argv[4] == "resume", int(sys.argv[5]), float(sys.argv[6])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{{folder}}/store{{world}}")
line, first, rows = Line(), 1, []
guard = TrajectoryGuard(make_forecast(), actions={{"critical": "stop"}})
with LossIntake(guard, average_ranks=True) as watch:
    if resume:
        saved = torch.load(folder / "saved.pt", weights_only=True)
        line.load_state_dict(saved["model"])
        watch.load_state_dict(saved["guard"])
        first = watch.step + 1
    optimizer = torch.optim.SGD(line.parameters(), lr=0.01)
    model = torch.nn.parallel.DistributedDataParallel(line)
    # Two parts make a step, on one rank each or both on one.
    parts = [Job(folder=folder, accumulation=1, nan_at=16, bad_rank=1, rank=part) for part in range(rank, 2, world)]
    for step in range(first, last + 1):
        if rank == world - 1:
            time.sleep(slow_s * (step % 5 == 0))
        for part in parts:
            loss = model(*part.micro_batch(step - 1))
            (loss / len(parts)).backward()
            watch.add(loss, tokens=8)
        optimizer.step()
        optimizer.zero_grad()
        rows += [[verdict.step, repr(verdict.loss)] for verdict in watch.end_step(step)]
        if watch.should_stop:
            break
    if rank == 0 and not resume:
        torch.save({{"model": line.state_dict(), "guard": watch.state_dict()}}, folder / "saved.pt")
events = [[event.kind, event.detected] for event in guard.events]
Path(folder, f"{{'resumed' if resume else 'first'}}-{{rank}}.json").write_text(json.dumps([rows, events]))
torch.distributed.barrier()
os._exit(0)  # Not through gloo's destructors: now and then they abort while a peer ends.
"""


def train(folder: Path, world: int, *, last: int, resume: bool = False, slow_s: float = 0.0) -> list:
    """Run `TRAINING` on so many ranks; returns [[step, loss] of every verdict, events] of each rank."""
    folder.mkdir(exist_ok=True)
    script = TRAINING.format(root=str(HERE.parents[1]), here=str(HERE))
    word = "resume" if resume else "start"
    arguments = [str(world), str(folder), word, str(last), str(slow_s)]
    command = [sys.executable, "-W", "ignore", "-c", script]
    ranks = [
        subprocess.Popen([*command, str(rank), *arguments], stderr=subprocess.PIPE, text=True) for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=240)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * world, "\n".join(said)
    name = "resumed" if resume else "first"
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list:
    return train(tmp_path_factory.mktemp("whole"), 2, last=20)


def test_a_slow_rank_changes_no_verdict_and_both_stop_together(two_ranks: list, tmp_path: Path):
    assert two_ranks[0] == two_ranks[1]
    rows, events = two_ranks[0]
    assert [step for step, _ in rows] == list(range(1, 17))
    assert events == [["non_finite", 16]]
    assert train(tmp_path, 2, last=20, slow_s=1.0) == two_ranks


def test_a_run_of_two_ranks_goes_on_with_one(two_ranks: list, tmp_path: Path):
    (before, _), _ = train(tmp_path, 2, last=10)
    [(after, events)] = train(tmp_path, 1, last=20, resume=True)
    whole, whole_events = two_ranks[0]
    assert [step for step, _ in before + after] == [step for step, _ in whole]
    assert before == whole[:10]
    # The sum over two micro-batches is not in the order of the sum over two ranks.
    losses, expected = ([float(loss) for _, loss in rows] for rows in (after, whole[10:]))
    assert losses == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert events == whole_events
