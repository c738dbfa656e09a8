"""What the guard costs in a real training loop, and whether it makes the host wait for the device.

    python tests/benchmarks/overhead.py                  # CPU: a 2 ms step under Lightning, 5,000 steps each way
    python tests/benchmarks/overhead.py --device cuda    # GPU: plain loop, and host synchronisations counted

Steps without and with the guard are interleaved in blocks, so that a busy machine slows both alike. The forecast is
met exactly by construction, so no event is open. One line of JSON at the end.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from trajectory_guard.forecast import Forecast
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.intake import LossIntake
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan
from trajectory_guard.sinks.tensorboard import TensorBoardSink

BLOCK = 50


def forecast(total_steps: int) -> Forecast:
    """A constant forecast of 2 nats."""
    plan = RunPlan(
        total_steps=total_steps, tokens_per_step=65536, active_params=1e6, schedule=LRSchedule(shape="constant")
    )
    return Forecast(plan, progress=[0.0, 1.0], loss=[2.0, 2.0], half_widths={0.8: 0.01, 0.95: 0.02})


def lightning_cost(steps: int, step_s: float) -> dict[str, float]:
    """CPU time, all threads, of interleaved blocks of a Trainer's steps, the callback's hooks on and off."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import TensorBoardLogger
    from trajectory_guard.integrations.lightning import TrajectoryGuardCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(2.0))
            self.noise = torch.Generator().manual_seed(0)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            end = time.process_time() + step_s
            while time.process_time() < end:  # Busy, as a real step is; sleeping would hide the cost.
                pass
            return self.weight + 0.02 * torch.randn((), generator=self.noise)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    class Alternate(TrajectoryGuardCallback):
        spent = ([], [])  # Seconds of each block, off and on.
        began = 0.0

        def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
            if trainer.global_step % BLOCK == 0:
                self.began = time.process_time()

        def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
            on = (trainer.global_step - 1) // BLOCK % 2
            if on:
                super().on_train_batch_end(trainer, *args)
            if trainer.global_step % BLOCK == 0:
                self.spent[on].append(time.process_time() - self.began)

    with tempfile.TemporaryDirectory() as folder:
        watch = Alternate(forecast(2 * steps), console=False)
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=2 * steps,
            max_epochs=-1,
            callbacks=[watch],
            logger=TensorBoardLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(range(2 * steps)))
    off, on = watch.spent
    return {
        "step_without_ms": 1e3 * sum(off) / len(off) / BLOCK,
        "step_with_ms": 1e3 * sum(on) / len(on) / BLOCK,
        "rise_percent": 100.0 * (sum(on) / sum(off) - 1.0),
        "rise_percent_of_medians": 100.0 * (statistics.median(on) / statistics.median(off) - 1.0),
    }


def loop_cost(steps: int, device: str) -> dict[str, float]:
    """Time per step of a plain loop: bare, with the guard, and with `loss.item()`; and host waits of the guard."""
    torch.manual_seed(0)
    width = 4096 if device == "cuda" else 256
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(8)]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(1024 if device == "cuda" else 32, width, device=device)
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        guard = TrajectoryGuard(forecast(10 * steps), sinks=[TensorBoardSink(folder)])
        watch = LossIntake(guard)

        def train(step: int, after: Callable[[int, torch.Tensor], object]) -> None:
            loss = model(x).square().mean() * 0.0 + 2.0
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after(step, loss)

        ways = {
            "bare": lambda step, loss: None,
            "guard": lambda step, loss: watch.observe(step, loss),
            "item": lambda step, loss: loss.item(),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        step = 0
        for block in range(2 + steps // BLOCK):
            for name, after in ways.items():
                _synchronize(device)
                began = time.perf_counter()
                for _ in range(BLOCK):
                    step += 1
                    train(step, after)
                _synchronize(device)
                if block >= 2:  # Warm.
                    seconds[name].append(time.perf_counter() - began)
        for name, times in seconds.items():
            result[f"{name}_ms"] = 1e3 * statistics.median(times) / BLOCK
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(100):
                    step += 1
                    train(step, ways["guard"])
            torch.cuda.set_sync_debug_mode("default")
            result["host_syncs_in_100_steps"] = sum("synchroniz" in str(w.message) for w in caught)
        watch.close()
    result["guard_rise_percent"] = 100.0 * (result["guard_ms"] / result["bare_ms"] - 1.0)
    return result


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--step-ms", type=float, default=2.0, help="length of a step under Lightning")
    arguments = parser.parse_args()
    found: dict[str, object] = {"device": arguments.device, "torch": torch.__version__}
    if arguments.device == "cuda":
        found["card"] = torch.cuda.get_device_name()
    else:
        found["lightning"] = lightning_cost(arguments.steps, arguments.step_ms / 1e3)
    found["loop"] = loop_cost(min(arguments.steps, 300), arguments.device)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
