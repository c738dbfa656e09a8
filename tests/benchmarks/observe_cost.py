"""What one `observe` costs, beside one `SummaryWriter.add_scalar`: python tests/benchmarks/observe_cost.py

Interleaved calls, every detector on, periodic work included, processor time of this process. Also: replay speed without
TensorBoard between the calls, growth of memory, and the size of the state.
"""

import argparse
import json
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trajectory_guard.forecast import Forecast
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan
from trajectory_guard.recipe import Recipe


def make_guard(steps: int) -> tuple[TrajectoryGuard, list[float]]:
    plan = RunPlan(
        total_steps=steps,
        tokens_per_step=524_288,
        active_params=1e8,
        schedule=LRSchedule(shape="cosine", warmup=0.01),
        recipe=Recipe(vocab_size=50304),
    )
    progress = np.linspace(0.001, 1.0, 2000)
    forecast = Forecast(plan, progress=progress, loss=2.5 + 0.8 * progress**-0.3, half_widths={0.8: 0.01, 0.95: 0.02})
    rng = np.random.default_rng(0)
    loss = np.nan_to_num(np.asarray(forecast.loss(np.arange(1, steps + 1))), nan=9.0)
    return TrajectoryGuard(forecast), (loss + 0.035 * rng.standard_t(4, steps) / 2**0.5).tolist()


CHUNK = 100
"""Calls of one kind in a row. TensorBoard writes in a thread of its own: flushing after each chunk charges that work to
add_scalar and not to the observe that happens to run beside it."""


def interleaved(steps: int) -> None:
    from torch.utils.tensorboard import SummaryWriter

    guard, losses = make_guard(steps)
    observe, scalar = [], []
    clock = time.perf_counter
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        for first in range(0, steps, CHUNK):
            chunk = losses[first : first + CHUNK]
            start = clock()
            for step, loss in enumerate(chunk, first + 1):
                guard.observe(step, loss, tokens=524_288)
            middle = clock()
            for step, loss in enumerate(chunk, first + 1):
                writer.add_scalar("loss", loss, step)
            writer.flush()
            observe.append((middle - start) / len(chunk))
            scalar.append((clock() - middle) / len(chunk))
    for name, cost in (("observe", np.array(observe) * 1e6), ("add_scalar", np.array(scalar) * 1e6)):
        print(f"{name:12s} mean {cost.mean():6.1f} us a call   median of chunks {np.median(cost):6.1f}")
    print(f"observe / add_scalar, means of {steps:,} calls each: {np.mean(observe) / np.mean(scalar):.3f}")


def alone(steps: int) -> None:
    guard, losses = make_guard(steps)
    start = time.process_time()
    for i, loss in enumerate(losses):
        guard.observe(i + 1, loss)
    seconds = time.process_time() - start
    print(f"observe alone: {seconds / steps * 1e6:.1f} us, {steps / seconds:,.0f} steps a second")
    print(f"state: {len(json.dumps(guard.state_dict(), allow_nan=False)) / 1000:.0f} kB as JSON")


def memory(steps: int) -> None:
    guard, losses = make_guard(steps)
    tracemalloc.start()
    for i, loss in enumerate(losses):
        guard.observe(i + 1, loss)
        if i + 1 in (steps // 10, steps):
            print(f"memory after {i + 1:,} steps: {tracemalloc.get_traced_memory()[0] / 1e6:.2f} MB")
    tracemalloc.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--memory-steps", type=int, default=0, help="1000000 for the flatness of memory (minutes)")
    arguments = parser.parse_args()
    alone(arguments.steps)
    interleaved(arguments.steps)
    if arguments.memory_steps:
        memory(arguments.memory_steps)
