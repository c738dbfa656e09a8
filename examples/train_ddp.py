"""Train the target on two ranks with DistributedDataParallel, watched by a guard that loaded the committed fit.

python examples/train_ddp.py                        # healthy: two gloo ranks on the CPU, half of each batch on each
python examples/train_ddp.py --fault data           # bytes permuted from half of training on
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from moe_lm import MoELM
from options import ACTIONS, Setup, parse
from outcome import tell
from recipe import CLIP, Training
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trajectory_guard import TrajectoryGuard, load_fit
from trajectory_guard.intake import LossIntake
from trajectory_guard.sinks.console import ConsoleSink
from trajectory_guard.sinks.jsonl import JsonlSink
from trajectory_guard.sinks.tensorboard import TensorBoardSink

RANKS = 2


class Loss(nn.Module):
    """The model with its loss as `forward`, which is what DistributedDataParallel wraps."""

    def __init__(self, model: MoELM) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(inputs, targets)


def train(setup: Setup, rank: int) -> tuple[list[float], TrajectoryGuard]:
    """Train one rank's part of every batch to the last step, or to the guard's flag: all ranks stop together.

    The losses returned are those the guard judged, of the whole batch.
    """
    forecast = load_fit(setup.fit).forecast(setup.plan)
    # Every rank judges; one writes.
    sinks = []
    if rank == 0:
        sinks = [ConsoleSink(), TensorBoardSink(setup.folder), JsonlSink(setup.folder / "events.jsonl")]
    guard = TrajectoryGuard(forecast, actions=ACTIONS, sinks=sinks, log_every_n_steps=50)
    training = Training(setup.run, corpus=setup.corpus, seed=setup.seed, fault=setup.fault)
    model = DistributedDataParallel(Loss(training.model))
    losses = []
    with LossIntake(guard, average_ranks=True, channels=training.model.expert_loads) as watch:
        for step in range(1, setup.last_step + 1):
            setup.fault.poison(training.model.head, step)
            inputs, targets = (part.tensor_split(RANKS)[rank] for part in training.batches(step))
            loss = model(inputs, targets)
            training.optimizer.zero_grad()
            # The mean over ranks of these gradients is the whole batch's, of parts that are not equal too.
            (loss * (RANKS * len(inputs) / setup.run.batch)).backward()
            groups = training.optimizer.param_groups
            nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], CLIP)
            training.optimizer.step()
            training.schedule.step()
            verdict = watch.observe(step, loss, tokens=targets.numel())
            assert verdict is not None  # A loss on the CPU is judged at once.
            losses.append(verdict.loss)
            if watch.should_stop:
                break
    return losses, guard


def run_rank(rank: int, setup: Setup, store: str, threads: int) -> None:
    """One process: join the group, train, and let the first rank tell the outcome."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        losses, guard = train(setup, rank)
        if rank == 0:
            tell(setup, losses, guard)
    finally:
        dist.destroy_process_group()


def launch(setup: Setup) -> None:
    """Start the ranks and wait for them; the threads are shared between them."""
    threads = max(1, torch.get_num_threads() // RANKS)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        torch.multiprocessing.spawn(run_rank, args=(setup, store, threads), nprocs=RANKS)  # pyright: ignore


if __name__ == "__main__":
    launch(parse(__doc__ or ""))
