"""TrajectoryGuardCallback in real Trainers."""

import dataclasses
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trajectory_guard.integrations.lightning import TrajectoryGuardCallback

from trajectory_guard.errors import DivergenceError, RecipeMismatchError, TrajectoryGuardError
from trajectory_guard.fit import DelphiFit, load_fit
from trajectory_guard.forecast import Forecast
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan
from trajectory_guard.sinks.jsonl import read_events
from trajectory_guard.sinks.tensorboard import TensorBoardSink

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.`.*"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


def make_forecast(total_steps: int = 40) -> Forecast:
    plan = RunPlan(
        total_steps=total_steps, tokens_per_step=64, active_params=1000, schedule=LRSchedule(shape="constant")
    )
    return Forecast(plan, progress=[0.0, 1.0], loss=[1.0, 1.0], half_widths={0.8: 0.2, 0.95: 0.4})


class Regression(L.LightningModule):
    """A line through noise; the loss of every micro-batch is kept, and the batch says how it should fail."""

    def __init__(self, returns: str = "tensor", nan_at: int = 0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = torch.nn.Linear(3, 1)
        self.returns = returns
        self.nan_at = nan_at
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int):
        x, y = batch[:, :3], batch[:, 3:]
        loss = ((self.layer(x) - y) ** 2).mean()
        if self.trainer.global_step + 1 == self.nan_at:
            loss = loss * float("nan")
        self.losses.append(float(loss.detach()))
        self.log("train_loss", loss)
        if self.returns == "tensor":
            return loss
        if self.returns == "auxiliary":
            return {"loss": loss + 5.0, "lm_loss": loss.detach(), "tokens": 1 + batch_idx % 3}
        return {"loss": loss}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows: int = 160, bad: tuple[int, ...] = ()) -> None:
        self.data = torch.randn(rows, 4, generator=torch.Generator().manual_seed(3))
        self.data[list(bad)] = float("nan")

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]


def loader(rows: int = 160, bad: tuple[int, ...] = (), batch: int = 4) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Rows(rows, bad), batch_size=batch)


class Watch(TrajectoryGuardCallback):
    """The callback, keeping every verdict that its guard gives."""

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        self.verdicts = []
        observe = self.guard.observe

        def kept(*args, **keywords):
            self.verdicts.append(observe(*args, **keywords))
            return self.verdicts[-1]

        self.guard.observe = kept


def trainer(folder: Path, *callbacks: Callback, **keywords) -> L.Trainer:
    defaults = {"max_steps": 40, "max_epochs": -1, "logger": False, "enable_checkpointing": False}
    return L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **keywords},
    )


def fit(folder: Path, watch: Callback | None, *, model: Regression | None = None, data=None, ckpt=None, **keywords):
    model = model or Regression()
    callbacks = [*keywords.pop("callbacks", []), *([watch] if watch else [])]
    runner = trainer(folder, *callbacks, **keywords)
    runner.fit(model, data or loader(), ckpt_path=ckpt)
    return model, runner


def test_losses_and_weights_are_bit_identical_with_and_without_the_guard(tmp_path: Path):
    plain, _ = fit(tmp_path, None, accumulate_grad_batches=2)
    watched, _ = fit(tmp_path, Watch(make_forecast()), accumulate_grad_batches=2, logger=CSVLogger(tmp_path))
    assert plain.losses == watched.losses
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("returns", ["tensor", "mapping"])
def test_steps_are_counted_from_1_and_losses_are_those_of_training_step(tmp_path: Path, returns: str):
    watch = Watch(make_forecast())
    model, _ = fit(tmp_path, watch, model=Regression(returns))
    assert [v.step for v in watch.verdicts] == list(range(1, 41))
    assert [v.loss for v in watch.verdicts] == pytest.approx(model.losses)


def test_accumulation_gives_the_mean_of_the_micro_batches_also_in_a_short_last_window(tmp_path: Path):
    watch = Watch(make_forecast())
    # 11 micro-batches an epoch: windows of 4, 4 and 3.
    model, _ = fit(tmp_path, watch, data=loader(44), accumulate_grad_batches=4, max_steps=7)
    windows = [slice(0, 4), slice(4, 8), slice(8, 11), slice(11, 15), slice(15, 19), slice(19, 22), slice(22, 26)]
    expected = [sum(model.losses[w]) / len(model.losses[w]) for w in windows]
    assert [v.loss for v in watch.verdicts] == pytest.approx(expected, rel=1e-6)


def test_an_accumulation_scheduler_is_followed(tmp_path: Path):
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    watch = Watch(make_forecast())
    scheduler = GradientAccumulationScheduler(scheduling={0: 1, 1: 2})
    model, _ = fit(tmp_path, watch, data=loader(16), max_epochs=2, max_steps=-1, callbacks=[scheduler])
    assert len(watch.verdicts) == 6
    tail = [(model.losses[4] + model.losses[5]) / 2, (model.losses[6] + model.losses[7]) / 2]
    assert [v.loss for v in watch.verdicts] == pytest.approx(model.losses[:4] + tail, rel=1e-6)


def test_a_named_loss_leaves_auxiliary_losses_out_and_tokens_weigh_micro_batches(tmp_path: Path):
    watch = Watch(make_forecast(), loss_key="lm_loss", tokens_key="tokens")
    model, _ = fit(tmp_path, watch, model=Regression("auxiliary"), accumulate_grad_batches=2, max_steps=3)
    losses, tokens = model.losses, [1 + i % 3 for i in range(6)]
    expected = [
        (losses[i] * tokens[i] + losses[i + 1] * tokens[i + 1]) / (tokens[i] + tokens[i + 1]) for i in (0, 2, 4)
    ]
    assert [v.loss for v in watch.verdicts] == pytest.approx(expected, rel=1e-6)


def test_a_key_that_training_step_does_not_return_is_named(tmp_path: Path):
    with pytest.raises(TrajectoryGuardError, match="without 'lm_loss'"):
        fit(tmp_path, Watch(make_forecast(), loss_key="lm_loss"))


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_step_that_returned_no_loss_is_not_observed_and_the_next_is_numbered_right(tmp_path: Path):
    class Skips(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 2 else loss

    watch = Watch(make_forecast())
    fit(tmp_path, watch, model=Skips(), max_steps=5)
    assert [v.step for v in watch.verdicts] == [1, 2, 4, 5]


def test_manual_optimization_with_two_optimizers_counts_one_step_a_batch(tmp_path: Path):
    class Manual(Regression):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            return {"loss": loss.detach()}

        def configure_optimizers(self):
            return [torch.optim.SGD([p], lr=0.01) for p in self.layer.parameters()]

    watch = Watch(make_forecast())
    model, runner = fit(tmp_path, watch, model=Manual(), max_steps=12)
    assert runner.global_step == 12
    assert [v.step for v in watch.verdicts] == list(range(1, 7))
    assert [v.loss for v in watch.verdicts] == pytest.approx(model.losses)


def small_fit() -> DelphiFit:
    return load_fit(ROOT / "examples" / "fits" / "moe_tiny.json")


def test_an_endless_run_without_a_plan_is_refused(tmp_path: Path):
    watch = TrajectoryGuardCallback(small_fit(), tokens_per_step=64, active_params=12)
    with pytest.raises(TrajectoryGuardError, match="no end"):
        fit(tmp_path, watch, max_steps=-1)


def test_without_a_plan_the_horizon_is_the_trainers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ratio = small_fit().recipe["tokens_per_active_param"]
    path = ROOT / "examples" / "fits" / "moe_tiny.json"
    watch = TrajectoryGuardCallback(path, tokens_per_step=64, active_params=64 * 40 / ratio)
    fit(tmp_path, watch, max_epochs=1, max_steps=-1)
    assert watch.guard.forecast.plan.total_steps == 40
    assert "assumed to be the fit's" in capsys.readouterr().out


def test_a_plan_of_another_recipe_is_refused_before_the_first_batch_unless_overridden(tmp_path: Path):
    model = Regression()
    given = {"tokens_per_step": 64, "active_params": 1e6}
    with pytest.raises(RecipeMismatchError, match="tokens_per_active_param"):
        fit(tmp_path, TrajectoryGuardCallback(small_fit(), **given), model=model)
    assert model.losses == []
    watch = TrajectoryGuardCallback(small_fit(), override_recipe=True, **given)
    fit(tmp_path, watch)
    assert watch.guard.forecast.check.overridden


def test_without_a_plan_tokens_and_parameters_are_required(tmp_path: Path):
    with pytest.raises(TrajectoryGuardError, match="tokens_per_step and active_params"):
        TrajectoryGuardCallback(tmp_path / "fit.json")


def test_what_was_inferred_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fit(tmp_path, Watch(make_forecast()), accumulate_grad_batches=2, max_steps=5)
    out = capsys.readouterr().out
    assert "40 steps, accumulation 2, world size 1, 64 tokens per step" in out
    assert "the trainer ends at step 5, the plan at 40" in out
    assert re.search(r"step +5/40|step +1/40", out)


def test_a_nan_stops_the_run_at_its_step_and_the_event_log_says_so(tmp_path: Path):
    watch = Watch(make_forecast(), actions={"critical": "stop"}, events_path=tmp_path / "events.jsonl")
    _, runner = fit(tmp_path, watch, data=loader(bad=(41,)))
    assert runner.global_step == 11
    assert next((step, e.kind) for step, e in read_events(tmp_path / "events.jsonl")) == (11, "non_finite")


def test_a_stop_that_min_steps_postpones_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    watch = Watch(make_forecast(), actions={"critical": "stop"})
    _, runner = fit(tmp_path, watch, data=loader(bad=(41,), batch=8), min_steps=20)
    assert runner.global_step == 20
    assert capsys.readouterr().out.count("waits for the Trainer's min_steps") == 1


def test_the_action_raise_ends_the_run_at_once_and_everything_is_written(tmp_path: Path):
    watch = Watch(make_forecast(), actions={"critical": "raise"}, events_path=tmp_path / "events.jsonl")
    with pytest.raises(DivergenceError):
        fit(tmp_path, watch, data=loader(bad=(41,)), min_steps=20)
    assert read_events(tmp_path / "events.jsonl")[0][0] == 11


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_drains_and_flushes(tmp_path: Path, error: type[BaseException]):
    class Breaks(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 7:
                raise error("stop")

    watch = Watch(make_forecast(), log_every_n_steps=1)
    logger = TensorBoardLogger(tmp_path)
    with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
        fit(tmp_path, watch, callbacks=[Breaks()], logger=logger)
        raise SystemExit  # Lightning may end quietly on a KeyboardInterrupt.
    assert [v.step for v in watch.verdicts] == list(range(1, 8))
    points = EventAccumulator(logger.log_dir, size_guidance={"scalars": 0}).Reload().Scalars("guard/loss")
    assert [p.step for p in points] == list(range(1, 8))


def test_every_logger_gets_the_guards_scalars_at_their_own_steps(tmp_path: Path):
    tensorboard, csv = TensorBoardLogger(tmp_path, name="tb"), CSVLogger(tmp_path, name="csv")
    watch = Watch(make_forecast(), log_every_n_steps=10)
    fit(tmp_path, watch, logger=[tensorboard, csv], log_every_n_steps=1)
    events = EventAccumulator(tensorboard.log_dir, size_guidance={"scalars": 0}).Reload()
    steps = [p.step for p in events.Scalars("guard/loss")]
    assert {10, 20, 30, 40} <= set(steps)
    assert [p.step for p in events.Scalars("guard_bands/upper")] == steps
    by_step = {v.step: v.loss for v in watch.verdicts}
    assert [p.value for p in events.Scalars("guard/loss")] == pytest.approx([by_step[s] for s in steps])
    assert (Path(tensorboard.log_dir) / "forecast_upper").is_dir()
    rows = (Path(csv.log_dir) / "metrics.csv").read_text().splitlines()
    assert "guard/loss" in rows[0] and len(rows) > 40


RESUMABLE = """
import os, signal, sys
from pathlib import Path
import torch
sys.path.insert(0, {tests!r})
from test_lightning import *

class Dies(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 29:
            os.kill(os.getpid(), signal.SIGKILL)

folder = Path({folder!r})
watch = Watch(make_forecast(), log_every_n_steps=1, events_path=folder / "events.jsonl")
saves = ModelCheckpoint(folder, every_n_train_steps=10, save_top_k=-1, filename="{{step}}")
fit(folder, watch, model=Regression(nan_at=25), callbacks=[saves, Dies()], data=loader(40, batch=2),
    enable_checkpointing=True, accumulate_grad_batches=2, logger=TensorBoardLogger(folder, version=0))
"""


def test_killed_and_resumed_the_later_verdicts_equal_those_of_an_uninterrupted_run(tmp_path: Path):
    script = textwrap.dedent(RESUMABLE.format(tests=str(Path(__file__).parent), folder=str(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -9, done.stderr
    time.sleep(1.1)  # TensorBoard orders event files by the second in their names.
    resumed = Watch(make_forecast(), log_every_n_steps=1, events_path=tmp_path / "events.jsonl")
    logger = TensorBoardLogger(tmp_path, version=0)
    # Epochs of 10 steps: Lightning goes on with the data where it was at the end of an epoch only.
    keywords = {"data": loader(40, batch=2), "accumulate_grad_batches": 2}
    keywords["enable_checkpointing"] = True

    def saves(folder: Path) -> list[Callback]:  # An event names the checkpoint to roll back to: both runs save.
        return [ModelCheckpoint(folder, every_n_train_steps=10, save_top_k=-1, filename="{step}")]

    resuming = {**keywords, "callbacks": saves(tmp_path), "logger": logger, "ckpt": str(tmp_path / "step=20.ckpt")}
    fit(tmp_path, resumed, model=Regression(nan_at=25), **resuming)
    whole = Watch(make_forecast(), log_every_n_steps=1, events_path=tmp_path / "whole.jsonl")
    keywords["callbacks"] = saves(tmp_path / "whole")
    fit(tmp_path / "whole", whole, model=Regression(nan_at=25), **keywords)
    assert [repr(v) for v in resumed.verdicts] == [repr(v) for v in whole.verdicts[20:]]
    assert any(v.events for v in resumed.verdicts)
    points = EventAccumulator(logger.log_dir, size_guidance={"scalars": 0}).Reload().Scalars("guard/loss")
    assert [p.step for p in points] == list(range(1, 41))
    log = [(s, e.kind, e.onset) for s, e in read_events(tmp_path / "events.jsonl")]
    assert log == [(s, e.kind, e.onset) for s, e in read_events(tmp_path / "whole.jsonl")]


def test_a_checkpoint_without_this_guards_state_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=10, save_top_k=-1, filename="{step}")
    fit(tmp_path, Watch(make_forecast()), callbacks=[saves], enable_checkpointing=True, max_steps=10)
    with pytest.warns(UserWarning, match="Watch|TrajectoryGuardCallback"):
        fit(tmp_path, Watch(make_forecast(), name="renamed"), ckpt=str(tmp_path / "step=10.ckpt"), max_steps=12)
    assert "no state of 'renamed'" in capsys.readouterr().out


def test_the_action_checkpoint_saves_one(tmp_path: Path):
    watch = Watch(make_forecast(), actions={"critical": "checkpoint"})
    fit(tmp_path, watch, data=loader(bad=(41,)), max_steps=12)
    assert (tmp_path / "guard-step=11.ckpt").is_file()
    assert not watch.guard.checkpoint_requested


def test_two_guards_of_one_run_keep_apart(tmp_path: Path):
    logger = TensorBoardLogger(tmp_path)
    pair = [Watch(make_forecast(), name=name, loss_key=key) for name, key in (("total", "loss"), ("lm", "lm_loss"))]
    saves = ModelCheckpoint(tmp_path, save_last=True)
    fit(
        tmp_path,
        None,
        model=Regression("auxiliary"),
        callbacks=[*pair, saves],
        logger=logger,
        enable_checkpointing=True,
        max_steps=10,
    )
    assert pair[0].verdicts[3].loss == pytest.approx(pair[1].verdicts[3].loss + 5.0)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    assert {f"TrajectoryGuardCallback[{name}]" for name in ("total", "lm")} <= set(saved)
    with pytest.raises(RuntimeError, match="state_key"):
        trainer(tmp_path, Watch(make_forecast()), Watch(make_forecast()))


def test_validation_losses_are_watched_by_their_own_guard_beside_the_training_guard(tmp_path: Path):
    class Validated(Regression):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", ((self.layer(batch[:, :3]) - batch[:, 3:]) ** 2).mean())

    plan = dataclasses.replace(make_forecast().plan, split="validation", metric="val_loss")
    table = Forecast(plan, progress=[0.0, 1.0], loss=[1.0, 1.0], half_widths={0.8: 0.2, 0.95: 0.4})
    train, val = Watch(make_forecast()), Watch(table, name="guard_val", loss_key="val_loss")
    seen = []

    class Sees(Callback):
        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                seen.append(float(trainer.callback_metrics["val_loss"]))

    runner = trainer(tmp_path, train, val, Sees(), val_check_interval=10)
    runner.fit(Validated(), loader(), loader(16))
    assert [v.step for v in train.verdicts] == list(range(1, 41))
    assert [v.step for v in val.verdicts] == [10, 20, 30, 40]
    assert [v.loss for v in val.verdicts] == pytest.approx(seen)


def test_the_checkpoint_to_roll_back_to_is_not_deleted(tmp_path: Path):
    keeps = {"every_n_train_steps": 50, "monitor": "step", "mode": "max", "save_top_k": 3, "filename": "{step}"}
    watch = Watch(make_forecast(400))
    fit(
        tmp_path,
        watch,
        model=Regression(nan_at=260),
        callbacks=[ModelCheckpoint(tmp_path, **keeps)],
        enable_checkpointing=True,
        max_steps=400,
    )
    kept = {int(path.stem.split("=")[1]) for path in tmp_path.glob("step=*.ckpt")}
    assert kept == {250, 300, 350, 400}


@pytest.mark.filterwarnings("ignore")  # Between Lightning and jsonargparse.
def test_lightning_cli_builds_the_callback_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setattr(sys, "argv", ["train.py"])

    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
        trainer:
          accelerator: cpu
          max_steps: 40
          logger: false
          callbacks:
            - class_path: trajectory_guard.integrations.lightning.TrajectoryGuardCallback
              init_args:
                fit: {ROOT}/examples/fits/moe_tiny.json
                tokens_per_step: 64
                active_params: 16
                schedule: {{shape: linear, warmup: 0.03}}
                actions: {{critical: [checkpoint, stop], warning: warn}}
                events_path: {tmp_path}/events.jsonl
                report_path: {tmp_path}/report.html
                sinks:
                  - class_path: trajectory_guard.sinks.tensorboard.TensorBoardSink
                    init_args: {{target: {tmp_path}/board, name: yaml}}
        """
    )
    given = {"args": ["--config", str(config)], "save_config_callback": None, "seed_everything_default": False}
    cli = LightningCLI(Regression, run=False, **given)
    (watch,) = [c for c in cli.trainer.callbacks if isinstance(c, TrajectoryGuardCallback)]
    assert watch._config.actions == {"critical": ["checkpoint", "stop"], "warning": "warn"}
    assert watch._config.schedule == LRSchedule(shape="linear", warmup=0.03)
    assert watch._config.report_path == f"{tmp_path}/report.html"
    assert [(type(sink), sink.name) for sink in watch._config.sinks] == [(TensorBoardSink, "yaml")]


def test_the_pytorch_lightning_package_works_as_well(tmp_path: Path):
    import pytorch_lightning
    from trajectory_guard.integrations.lightning import PLTrajectoryGuardCallback

    class Line(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            return ((self.layer(batch[:, :3]) - batch[:, 3:]) ** 2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    watch = PLTrajectoryGuardCallback(make_forecast())
    runner = pytorch_lightning.Trainer(
        default_root_dir=tmp_path,
        max_steps=5,
        accelerator="cpu",
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    runner.fit(Line(), loader())
    assert watch.guard.last_step == 5
