"""The registry: one way to run the same small training in every framework, watched or not.

As a script it runs adapters on several gloo ranks: python tests/integrations/adapters.py WORLD_SIZE FOLDER [NAME...]
"""

import json
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from trajectory_guard.detect.events import Verdict
from trajectory_guard.forecast import Forecast
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan
from trajectory_guard.report import ReportSink

STEPS = 30


@dataclass(kw_only=True)
class Job:
    """One run: what the frameworks have in common."""

    folder: Path
    watched: bool = True
    accumulation: int = 2
    stop_after: int = STEPS
    nan_at: int = 0
    fails_at: int = 0
    actions: dict = field(default_factory=dict)
    report: Path | None = None
    channels: Callable[[], dict] | None = None
    resume: bool = False
    save_at: int = 0
    state: dict | None = None

    rank: int = 0
    ranks: int = 1
    bad_rank: int = 0

    @property
    def asked(self) -> dict:
        """What the adapters' configuration is given."""
        return {"actions": self.actions, "report_path": self.report, "channels": self.channels}

    def micro_batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the micro-batch of this index, 0-based over the whole run, of this rank."""
        if self.fails_at and index // self.accumulation + 1 == self.fails_at:
            raise ArithmeticError("the data cannot be read")
        generator = torch.Generator().manual_seed(1000 * index + self.rank)
        x = torch.randn(8, 3, generator=generator)
        y = x.sum(dim=1, keepdim=True) + torch.randn(8, 1, generator=generator)
        if self.nan_at and index // self.accumulation + 1 == self.nan_at and self.rank == self.bad_rank:
            y = y * float("nan")
        return x, y


@dataclass
class Outcome:
    """What a run did."""

    verdicts: list[Verdict]
    losses: list[float]
    weights: list[torch.Tensor]
    guard: TrajectoryGuard | None
    state: dict | None
    steps: int


def make_forecast() -> Forecast:
    plan = RunPlan(total_steps=STEPS, tokens_per_step=64, active_params=1000, schedule=LRSchedule(shape="constant"))
    return Forecast(plan, progress=[0.0, 1.0], loss=[3.0, 1.0], half_widths={0.8: 0.2, 0.95: 0.4})


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = torch.nn.Linear(3, 1)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = ((self.layer(x) - y) ** 2).mean()
        self.losses.append(float(loss.detach()))
        return loss


def recorded(guard: TrajectoryGuard) -> list[Verdict]:
    """Keep every verdict that a guard gives from now on."""
    verdicts: list[Verdict] = []
    observe = guard.observe

    def keep(*args, **keywords):
        verdicts.append(observe(*args, **keywords))
        return verdicts[-1]

    guard.observe = keep  # type: ignore[method-assign]
    return verdicts


def outcome(model: Line, guard: TrajectoryGuard | None, verdicts: list, steps: int, state: dict | None) -> Outcome:
    weights = [p.detach().clone() for p in model.parameters()]
    return Outcome(verdicts, model.losses, weights, guard, state, steps)


def run_raw(job: Job) -> Outcome:
    """A plain loop; under several ranks, DistributedDataParallel."""
    model = Line()
    return _loop(job, model, torch.nn.parallel.DistributedDataParallel(model) if job.ranks > 1 else model)


def run_fsdp2(job: Job) -> Outcome:
    """A plain loop with sharded weights; only for several ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Line()
    fully_shard(model, mesh=init_device_mesh("cpu", (job.ranks,)))
    return _loop(job, model, model)


def _loop(job: Job, model: Line, net: torch.nn.Module) -> Outcome:
    from trajectory_guard.intake import LossIntake

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch, verdicts, first = None, [], 1
    if job.watched:
        sinks = [ReportSink(job.report)] if job.report else []
        guard = TrajectoryGuard(make_forecast(), actions=job.actions, sinks=sinks)
        watch = LossIntake(guard, average_ranks=job.ranks > 1, channels=job.channels)
        verdicts = recorded(watch.guard)
    if job.resume:
        saved = torch.load(job.folder / "raw.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        first = saved["step"] + 1
        if watch:
            watch.load_state_dict(saved["guard"])
    elif job.state is not None and watch:
        watch.load_state_dict(job.state)
    step = first - 1
    with watch or nullcontext():
        for step in range(first, job.stop_after + 1):
            for micro in range(job.accumulation):
                loss = net(*job.micro_batch((step - 1) * job.accumulation + micro))
                (loss / job.accumulation).backward()
                if watch:
                    watch.add(loss)
            optimizer.step()
            optimizer.zero_grad()
            if watch:
                watch.end_step(step)
                if watch.should_stop:
                    break
            if step == job.save_at:
                content = {"model": model.state_dict(), "step": step, "guard": watch.state_dict() if watch else None}
                torch.save(content, job.folder / "raw.pt")
        state = watch.state_dict() if watch else None
    return outcome(model, watch.guard if watch else None, verdicts, step, state)


def run_lightning(job: Job) -> Outcome:
    """A Trainer; under several ranks, its DDP strategy."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from trajectory_guard.integrations.lightning import TrajectoryGuardCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Line()

        def training_step(self, batch, batch_idx):
            return self.model(*job.micro_batch(self.trainer.fit_loop.total_batch_idx))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Keep(TrajectoryGuardCallback):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            self.verdicts = recorded(self.guard)

        def on_train_end(self, trainer, pl_module):
            self.final = self.state_dict()
            super().on_train_end(trainer, pl_module)

    watch = None
    if job.watched:
        watch = Keep(make_forecast(), **job.asked, console=False)
    if watch is not None and job.state is not None:
        watch.load_state_dict(job.state)
    saves = ModelCheckpoint(job.folder, every_n_train_steps=job.save_at or 10**6, filename="{step}", save_top_k=-1)
    # Epochs of 10 steps: Lightning takes data up again at the end of an epoch only.
    loader = torch.utils.data.DataLoader(range(10 * job.accumulation))
    trainer = pl.Trainer(
        default_root_dir=job.folder,
        accelerator="cpu",
        devices=job.ranks,
        strategy="ddp" if job.ranks > 1 else "auto",
        max_steps=job.stop_after,
        max_epochs=-1,
        accumulate_grad_batches=job.accumulation,
        use_distributed_sampler=False,
        callbacks=[saves, *([watch] if watch else [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, loader, ckpt_path=str(job.folder / f"step={job.save_at}.ckpt") if job.resume else None)
    if watch is None:
        return outcome(module.model, None, [], trainer.global_step, None)
    return outcome(module.model, watch.guard, watch.verdicts, trainer.global_step, watch.final)


def run_fabric(job: Job) -> Outcome:
    """A Fabric loop."""
    from lightning.fabric import Fabric
    from trajectory_guard.integrations.fabric import GuardConfig, watch_fabric

    fabric = Fabric(accelerator="cpu", devices=job.ranks, strategy="ddp" if job.ranks > 1 else "auto")
    fabric.launch()
    line = Line()
    model, optimizer = fabric.setup(line, torch.optim.SGD(line.parameters(), lr=0.01))
    watch, verdicts = None, []
    if job.watched:
        config = GuardConfig(make_forecast(), **job.asked, console=False)
        watch = watch_fabric(fabric, config, accumulation=job.accumulation)
        verdicts = recorded(watch.guard)
        if job.state is not None:
            watch.load_state_dict(job.state)
    content = {"model": model, "step": 0, **({"guard": watch} if watch else {})}
    if job.resume:
        fabric.load(job.folder / "fabric.ckpt", content)
    step = 0
    with watch or nullcontext():
        for step in range(int(content["step"]) + 1, job.stop_after + 1):
            for micro in range(job.accumulation):
                with fabric.no_backward_sync(model, enabled=micro + 1 < job.accumulation):
                    loss = model(*job.micro_batch((step - 1) * job.accumulation + micro))
                    fabric.backward(loss / job.accumulation)
                if watch:
                    watch.add(loss)
            optimizer.step()
            optimizer.zero_grad()
            if watch:
                watch.end_step(step)
                if watch.should_stop:
                    break
            if step == job.save_at:
                fabric.save(job.folder / "fabric.ckpt", {**content, "step": step})
        state = watch.state_dict() if watch else None
    return outcome(line, watch.guard if watch else None, verdicts, step, state)


def run_accelerate(job: Job) -> Outcome:
    """An Accelerator's loop."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from trajectory_guard.integrations.accelerate import AcceleratorWatch, GuardConfig

    AcceleratorState._reset_state(reset_partial_state=job.ranks == 1)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.accumulation)
    line = Line()
    model, optimizer = accelerator.prepare(line, torch.optim.SGD(line.parameters(), lr=0.01))
    watch, verdicts = None, []
    if job.watched:
        config = GuardConfig(make_forecast(), **job.asked, console=False)
        watch = AcceleratorWatch(accelerator, config)
        verdicts = recorded(watch.guard)
        if job.state is not None:
            watch.load_state_dict(job.state)
    first = 0
    if job.resume:
        accelerator.load_state(str(job.folder / "accelerate"))
        first = job.save_at
    steps = first
    with watch or nullcontext():
        for index in range(first * job.accumulation, job.stop_after * job.accumulation):
            with accelerator.accumulate(model):
                loss = model(*job.micro_batch(index))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if watch:
                watch.observe(loss)
            steps = (index + 1) // job.accumulation
            if watch and watch.should_stop:
                break
            if accelerator.sync_gradients and steps == job.save_at and not job.resume:
                accelerator.save_state(str(job.folder / "accelerate"))
        state = watch.state_dict() if watch else None
    return outcome(line, watch.guard if watch else None, verdicts, steps, state)


def run_transformers(job: Job) -> Outcome:
    """A Transformers Trainer."""
    from accelerate.state import AcceleratorState, GradientState
    from trajectory_guard.integrations.transformers import GuardConfig, watch_trainer
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=job.ranks == 1)
    GradientState._reset_state()

    class Model(Line):
        def forward(self, x, y):  # type: ignore[override]
            return {"loss": super().forward(x, y)}

    rows = STEPS * job.accumulation * 8

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return rows * job.ranks

        def __getitem__(self, index):
            # The Trainer deals whole batches to ranks in turn.
            batch, row = divmod(index, 8)
            x, y = job.micro_batch(batch // job.ranks)
            return {"x": x[row], "y": y[row]}

    class InOrder(Trainer):
        def _get_train_sampler(self, *args, **keywords):
            return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    arguments = TrainingArguments(
        output_dir=str(job.folder),
        max_steps=job.stop_after,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=job.accumulation,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        save_strategy="steps" if job.save_at else "no",
        save_steps=job.save_at or 500,
        logging_steps=1000,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        restore_callback_states_from_checkpoint=job.resume,
    )
    model = Model()
    trainer = InOrder(model, arguments, train_dataset=Data())
    watch = None
    if job.watched:
        config = GuardConfig(make_forecast(), **job.asked, console=False)
        watch = watch_trainer(trainer, config)
        opened = watch._open

        def open_and_keep():
            opened()
            if job.state is not None:
                watch.intake.load_state_dict(job.state)
            watch.kept = recorded(watch.intake.guard)

        watch._open = open_and_keep
    trainer.train(resume_from_checkpoint=str(job.folder / f"checkpoint-{job.save_at}") if job.resume else None)
    if watch is None:
        return outcome(model, None, [], trainer.state.global_step, None)
    state = watch.intake.state_dict()
    return outcome(model, watch.intake.guard, watch.kept, trainer.state.global_step, state)


ADAPTERS: dict[str, Callable[[Job], Outcome]] = {
    "raw": run_raw,
    "lightning": run_lightning,
    "fabric": run_fabric,
    "accelerate": run_accelerate,
    "transformers": run_transformers,
}


def scenarios(folder: Path, rank: int, ranks: int) -> Iterator[Job]:
    """What ranks are put through: all is well; one rank's data is NaN once and the guard stops."""
    yield Job(folder=folder, rank=rank, ranks=ranks, stop_after=8)
    yield Job(
        folder=folder, rank=rank, ranks=ranks, stop_after=8, nan_at=5, bad_rank=ranks - 1, actions={"critical": "stop"}
    )


def rank_main(rank: int, ranks: int, port: int, folder: Path, name: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        NODE_RANK="0",
        ACCELERATE_USE_CPU="true",
    )
    if name in ("raw", "fsdp2"):
        torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    collectives = 0
    all_reduce = torch.distributed.all_reduce

    def counted(*args, **keywords):
        nonlocal collectives
        collectives += 1
        return all_reduce(*args, **keywords)

    torch.distributed.all_reduce = counted
    rows = []
    for job in scenarios(folder, rank, ranks):
        result = {**ADAPTERS, "fsdp2": run_fsdp2}[name](job)
        rows.append(
            {
                "losses": [repr(v.loss) for v in result.verdicts],
                "own": result.losses,
                "steps": result.steps,
                "collectives": collectives,
                "events": [event.sentence for event in result.guard.events] if result.guard else [],
            }
        )
    (folder / f"{name}-{rank}.json").write_text(json.dumps(rows))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def main() -> None:
    ranks, folder, names = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or list(ADAPTERS)
    # Imported once here; the forked ranks have them.
    import accelerate  # noqa: F401
    import lightning.pytorch  # noqa: F401
    import transformers  # noqa: F401
    from transformers import Trainer  # noqa: F401

    for name in names:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        torch.multiprocessing.start_processes(
            rank_main, args=(ranks, port, folder, name), nprocs=ranks, start_method="fork"
        )


if __name__ == "__main__":
    main()
