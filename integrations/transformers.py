"""Transformers: a Trainer watched at every optimizer step.

    trainer = Trainer(model, args, train_dataset=...)
    guard = watch_trainer(trainer, "fit.json", "plan.json")
    trainer.train()

A callback alone never sees a step's loss: `on_log` gets a mean over `logging_steps`, in which a NaN is logged as 0 by
default (`logging_nan_inf_filter`). So `Trainer.training_step` is wrapped. *Step*: `state.global_step` in `on_step_end`,
1-based. *Loss*: what `training_step` returns is already divided by the window's micro-batches (or its tokens), so they
are added up, then averaged over ranks. The state goes into `trainer_state.json` of every checkpoint and is found there
on resume, whatever `restore_callback_states_from_checkpoint` says.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trajectory_guard.actions import Action
from trajectory_guard.adapt import FitSource, GuardConfig, PlanSource
from trajectory_guard.errors import MissingExtraError
from trajectory_guard.intake import LossIntake, Scalar
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.sinks.base import Sink

try:
    from transformers.trainer_callback import ExportableState, TrainerCallback
except ImportError as error:
    raise MissingExtraError("transformers", "transformers") from error

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["TrainerWatch", "watch_trainer"]


class TrainerWatch:
    """The guard of one Trainer; `intake` is there from the first training step on."""

    def __init__(self, trainer: "Trainer", config: GuardConfig, sinks: Sequence[Sink]) -> None:
        self.config = config
        self.intake: LossIntake | None = None
        self._trainer, self._sinks = trainer, sinks
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
            sinks=self._sinks,
        )
        # Looked up anew: restoring callback states replaces the callback by another instance.
        live = next(c for c in trainer.callback_handler.callbacks if isinstance(c, _GuardCallback))
        live.watches[self.config.name] = self
        # A checkpoint made without the guard has no entry, and the Trainer expects one when it saves.
        states: Any = state.stateful_callbacks
        found = states.setdefault("_GuardCallback", {})
        saved = found.get("attributes", {}).get("saved", {}).get(self.config.name)
        self._sum = 0.0
        if saved is not None and state.global_step:
            self.intake.load_state_dict(saved)
            self.intake.guard.note_checkpoint(self.intake.step)
            self._say(f"state of step {self.intake.step:,} restored from the checkpoint")
        elif state.global_step:
            self._say(f"WARNING: the checkpoint has no state of {self.config.name!r}; the guard starts anew")

    def _say(self, sentence: str) -> None:
        self.config.say(sentence, main_process=self._trainer.state.is_world_process_zero)


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


def watch_trainer(
    trainer: "Trainer",
    fit: FitSource,
    plan: PlanSource = None,
    *,
    tokens_per_step: int | None = None,
    active_params: float | None = None,
    schedule: LRSchedule | None = None,
    actions: Mapping[str, Action | Sequence[Action]] | None = None,
    log_every_n_steps: int | None = None,
    events_path: str | Path | None = None,
    console: bool = True,
    name: str = "guard",
    override_recipe: bool = False,
    sinks: Sequence[Sink] = (),
) -> TrainerWatch:
    """Watch every optimizer step of a Trainer; call it before `train`.

    Args:
        trainer: the Trainer.
        fit: file of a fit, a `DelphiFit`, or a finished `Forecast`.
        plan: file of a plan or a `RunPlan`; without one the horizon is the Trainer's, and `tokens_per_step` and
            `active_params` are needed.
        tokens_per_step: training tokens of one optimizer update, over all micro-batches and ranks.
        active_params: parameters used by one token, counted as the ladder's were.
        schedule: learning rate over its peak along progress; by default assumed to be the fit's.
        actions: severity or kind of event -> action, as `TrajectoryGuard` takes them.
        log_every_n_steps: steps between logged verdicts, by default the Trainer's `logging_steps`.
        events_path: file of the event log, JSON lines; None for no file.
        console: print to the console.
        name: first part of every tag and key of the state: several guards of one Trainer need several names.
        override_recipe: accept a plan whose recipe makes the comparison meaningless.
        sinks: further sinks, such as `TensorBoardSink(folder)` or `WandbSink()`, used on the main process.

    Returns:
        The watch; its `intake.guard` is the guard.

    Raises:
        TrajectoryGuardError: numbers are missing or contradict each other; a file cannot be read.
    """
    config = GuardConfig(
        fit=fit,
        plan=plan,
        tokens_per_step=tokens_per_step,
        active_params=active_params,
        schedule=schedule,
        actions=actions,
        log_every_n_steps=log_every_n_steps or max(1, int(trainer.args.logging_steps)),
        events_path=events_path,
        console=console,
        name=name,
        override_recipe=override_recipe,
    )
    if not any(isinstance(callback, _GuardCallback) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(_GuardCallback())
    return TrainerWatch(trainer, config, sinks)
