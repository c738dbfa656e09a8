"""Transformers: a Trainer watched at every optimizer step.

    trainer = Trainer(model, args, train_dataset=...)
    watch = watch_trainer(trainer, GuardConfig("fit.json", "plan.json", report_path="report.html"))
    trainer.train()

A callback alone never sees a step's loss: `on_log` gets a mean over `logging_steps`, in which a NaN is logged as 0 by
default (`logging_nan_inf_filter`). So `Trainer.training_step` is wrapped. *Step*: `state.global_step` in `on_step_end`,
1-based. *Loss*: what `training_step` returns is already divided by the window's micro-batches (or its tokens), so they
are added up, then averaged over ranks. The state goes into `trainer_state.json` of every checkpoint and is found there
on resume, whatever `restore_callback_states_from_checkpoint` says.
"""

import functools
from typing import TYPE_CHECKING, Any

from trajectory_guard.adapt import GuardConfig
from trajectory_guard.errors import MissingExtraError
from trajectory_guard.intake import LossIntake, Scalar

try:
    from transformers.trainer_callback import ExportableState, TrainerCallback
except ImportError as error:
    raise MissingExtraError("transformers", "transformers") from error

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["GuardConfig", "TrainerWatch", "watch_trainer"]


class TrainerWatch:
    """The guard of one Trainer; `intake` is there from the first training step on."""

    def __init__(self, trainer: "Trainer", config: GuardConfig) -> None:
        self.config = config
        self.intake: LossIntake | None = None
        self._trainer = trainer
        self._sum: Scalar = 0.0
        training_step, train = trainer.training_step, trainer.train

        @functools.wraps(training_step)
        def watched_step(*args: Any, **keywords: Any) -> Any:
            if self.intake is None:
                self._open()
            loss = training_step(*args, **keywords)
            self._sum = self._sum + loss.detach()
            return loss

        @functools.wraps(train)
        def watched_train(*args: Any, **keywords: Any) -> Any:
            # A Trainer has no hook for exceptions: without this the last steps would go unjudged.
            self.intake = None
            try:
                result = train(*args, **keywords)
            except BaseException as error:
                if self.intake is not None:
                    self.intake.__exit__(type(error), error, None)
                raise
            if self.intake is not None:
                self.intake.close()
            return result

        trainer.training_step, trainer.train = watched_step, watched_train

    def end_step(self, state: Any, control: Any) -> None:
        """Runs in `on_step_end` on every rank: the step's loss is complete."""
        if self.intake is None:
            return
        self.intake.add(self._sum)
        self._sum = 0.0
        self.intake.end_step(state.global_step)
        control.should_save |= self.intake.guard.checkpoint_requested
        control.should_training_stop |= self.intake.should_stop

    def _open(self) -> None:
        trainer, state = self._trainer, self._trainer.state
        self.intake = self.config.open(
            total_steps=state.max_steps,
            accumulation=trainer.args.gradient_accumulation_steps,
            world_size=trainer.args.world_size,
            main_process=state.is_world_process_zero,
            loss_scaler=bool(trainer.args.fp16),
            log_every_n_steps=max(1, int(trainer.args.logging_steps)),
        )
        # Looked up anew: restoring callback states replaces the callback by another instance.
        live = next(c for c in trainer.callback_handler.callbacks if isinstance(c, _GuardCallback))
        live.watches[self.config.name] = self
        # A checkpoint made without the guard has no entry, and the Trainer expects one when it saves.
        states: Any = state.stateful_callbacks
        found = states.setdefault("_GuardCallback", {})
        saved = found.get("attributes", {}).get("saved", {}).get(self.config.name)
        self._sum = 0.0
        saved = saved if state.global_step else None
        self.config.resume(self.intake, saved, step=state.global_step, main_process=state.is_world_process_zero)
        if saved is not None:
            self.intake.guard.note_checkpoint(self.intake.step)


class _GuardCallback(TrainerCallback, ExportableState):
    """Brings the hooks to the watches of a Trainer and their states into its checkpoints."""

    def __init__(self) -> None:
        self.watches: dict[str, TrainerWatch] = {}
        self.saved: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        saved = {name: w.intake.state_dict() for name, w in self.watches.items() if w.intake is not None}
        return {"args": {}, "attributes": {"saved": saved}}

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
        for watch in self.watches.values():
            watch.end_step(state, control)
        return control

    def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        for watch in self.watches.values():
            if watch.intake is not None:
                watch.intake.guard.note_checkpoint(state.global_step)


def watch_trainer(trainer: "Trainer", config: GuardConfig) -> TrainerWatch:
    """Watch every optimizer step of a Trainer; call it before `train`.

    Args:
        trainer: the Trainer; without a plan its horizon is the run's, without `log_every_n_steps` its `logging_steps`.
        config: the guard; several guards of one Trainer need several names.

    Returns:
        The watch; its `intake.guard` is the guard.
    """
    if not any(isinstance(callback, _GuardCallback) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(_GuardCallback())
    return TrainerWatch(trainer, config)
