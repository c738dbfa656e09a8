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
