"""Train the target under a Lightning Trainer, watched by a guard that loaded the committed fit.

python examples/train_lightning.py                       # healthy: one to four minutes
python examples/train_lightning.py --fault lr            # learning rate x 10 at half of training
tensorboard --logdir runs                                # tab "Custom Scalars": loss in its interval
"""

import logging
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from moe_lm import MoEConfig, MoELM
from options import ACTIONS, Setup, parse
from outcome import tell
from recipe import CLIP, CONTEXT, batches_of, optimizer_of
from trajectory_guard.integrations.lightning import TrajectoryGuardCallback

LOG_EVERY = 50


class MoEModule(L.LightningModule):
    """The model and its recipe; a batch is a function of the step, so a resumed run reads what it should."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        torch.manual_seed(setup.seed)
        self.setup_ = setup
        self.model = MoELM(MoEConfig(width=setup.run.width, context=CONTEXT))
        self.batches = batches_of(setup.run, corpus=setup.corpus, seed=setup.seed, fault=setup.fault)
        self.losses = torch.full((setup.run.steps,), float("nan"))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        step = self.global_step + 1
        self.setup_.fault.poison(self.model.head, step)
        loss = self.model.loss(*self.batches(step))
        self.losses[step - 1] = loss.detach()
        if step % LOG_EVERY == 0:
            self.log_dict(self.model.router_metrics())
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        optimizer, schedule = optimizer_of(self.model, self.setup_.run, self.setup_.fault)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(setup: Setup, *, watched: bool = True) -> tuple[MoEModule, TrajectoryGuardCallback | None]:
    """Run the Trainer to the last step, or to the guard's flag."""
    module = MoEModule(setup)
    guard = None
    if watched:
        guard = TrajectoryGuardCallback(
            setup.fit,
            setup.plan,
            actions=ACTIONS,
            log_every_n_steps=LOG_EVERY,
            events_path=setup.folder / "events.jsonl",
            report_path=setup.report,
            channels=module.model.expert_loads,
        )
    checkpoints = ModelCheckpoint(
        setup.folder / "checkpoints", every_n_train_steps=setup.checkpoint_every, save_last=True
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=setup.last_step,
        gradient_clip_val=CLIP,
        logger=TensorBoardLogger(setup.folder, name=None, version=""),
        log_every_n_steps=LOG_EVERY,
        callbacks=[checkpoints, *([guard] if guard else [])],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Only counts: the module makes the batch of a step from the step itself.
    trainer.fit(module, range(setup.run.steps), ckpt_path=setup.resume)
    return module, guard


def main() -> None:
    # What Lightning says about itself would hide what the guard says about the run.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    setup = parse(__doc__ or "", resumable=True)
    module, guard = train(setup)
    assert guard is not None and guard.guard is not None
    tell(setup, module.losses.tolist(), guard.guard)


if __name__ == "__main__":
    main()
