"""Train the target under a Transformers Trainer, watched by a guard that loaded the committed fit.

python examples/train_hf.py                         # healthy: one to four minutes
python examples/train_hf.py --fault lr              # learning rate x 10 at half of training
"""

import warnings
from typing import Any

from corpus import Batches
from moe_lm import MoELM
from options import ACTIONS, Setup, parse
from outcome import tell
from recipe import CLIP, CONTEXT, Training
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from trajectory_guard.integrations.transformers import GuardConfig, watch_trainer
from transformers import Trainer, TrainingArguments

from trajectory_guard import TrajectoryGuard
from trajectory_guard.sinks.tensorboard import TensorBoardSink


class Sequences(Dataset[dict[str, Tensor]]):
    """The run's sequences one by one, in its order: a Trainer makes the batches itself."""

    def __init__(self, setup: Setup) -> None:
        batch, faulted = setup.run.batch, setup.fault.shuffled_from
        self.length = setup.run.steps * batch
        # The order of the batches is that of single sequences, which a batch size of 1 yields.
        self.sequence = Batches(
            setup.corpus,
            batch=1,
            context=CONTEXT,
            seed=setup.seed,
            shuffled_from=None if faulted is None else (faulted - 1) * batch + 1,
        )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, targets = self.sequence(index + 1)
        return {"inputs": inputs[0], "targets": targets[0]}


class Loss(nn.Module):
    """The model as a Trainer calls it: with the columns of the data, for a dict with the loss."""

    def __init__(self, model: MoELM) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": self.model.loss(inputs, targets)}


class MoETrainer(Trainer):
    """The recipe's loss on the recipe's sequences, in order."""

    def __init__(self, setup: Setup, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.setup = setup
        self.losses: list[float] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Tensor:
        self.setup.fault.poison(model.model.head, self.state.global_step + 1)
        loss = model(**inputs)["loss"]
        self.losses.append(loss.item())
        return loss

    def _get_train_sampler(self, *args: Any, **keywords: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


def train(setup: Setup) -> tuple[list[float], TrajectoryGuard]:
    """Run the Trainer to the last step, or to the guard's flag."""
    training = Training(setup.run, corpus=setup.corpus, seed=setup.seed, fault=setup.fault)
    trainer = MoETrainer(
        setup,
        model=Loss(training.model),
        args=TrainingArguments(
            output_dir=str(setup.folder),
            max_steps=setup.last_step,
            per_device_train_batch_size=setup.run.batch,
            max_grad_norm=CLIP,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        ),
        train_dataset=Sequences(setup),
        optimizers=(training.optimizer, training.schedule),
    )
    config = GuardConfig(
        setup.fit,
        setup.plan,
        actions=ACTIONS,
        log_every_n_steps=50,
        events_path=setup.folder / "events.jsonl",
        report_path=setup.report,
        sinks=[TensorBoardSink(setup.folder)],
        channels=training.model.expert_loads,
    )
    watch = watch_trainer(trainer, config)
    trainer.train()
    assert watch.intake is not None
    return trainer.losses, watch.intake.guard


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    setup = parse(__doc__ or "")
    tell(setup, *train(setup))


if __name__ == "__main__":
    main()
