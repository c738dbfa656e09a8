"""Lightning: a callback that watches a Trainer's run against its forecast.

    from trajectory_guard.integrations.lightning import TrajectoryGuardCallback
    trainer = L.Trainer(max_steps=2000, callbacks=[TrajectoryGuardCallback("fit.json", "plan.json")])

*Step*: `trainer.global_step` after the batch, 1-based there (`self.log`'s axis is 0-based); with manual optimization,
the number of batches in which an optimizer stepped. *Loss*: Lightning divides `training_step`'s `loss` by
`accumulate_grad_batches`, so it is multiplied back; the micro-batches seen are averaged, then the ranks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trajectory_guard.integrations.lightning_pin import pin_last_good

from trajectory_guard.actions import Action
from trajectory_guard.adapt import FitSource, GuardConfig, PlanSource
from trajectory_guard.errors import MissingExtraError, TrajectoryGuardError
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.intake import ChannelSource, LossIntake
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.sinks.base import Sink

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        Callback = object

__all__ = ["PLTrajectoryGuardCallback", "TrajectoryGuardCallback"]  # noqa: F822 (made in __getattr__)


class _GuardHooks:
    def __init__(
        self,
        fit: FitSource,
        plan: PlanSource = None,
        *,
        loss_key: str = "loss",
        tokens_key: str | None = None,
        tokens_per_step: int | None = None,
        active_params: float | None = None,
        schedule: LRSchedule | None = None,
        actions: Mapping[str, Action | Sequence[Action]] | None = None,
        log_every_n_steps: int | None = None,
        events_path: str | Path | None = None,
        report_path: str | Path | None = None,
        console: bool = True,
        name: str = "guard",
        override_recipe: bool = False,
        sinks: Sequence[Sink] = (),
        channels: ChannelSource = None,
    ) -> None:
        """Watch a Trainer's run against the forecast of its loss.

        Args:
            fit: file of a fit, a `DelphiFit`, or a finished `Forecast`.
            plan: file of a plan or a `RunPlan`. Without one the horizon is the Trainer's, and `tokens_per_step` and
                `active_params` are needed.
            loss_key: key of the loss in what `training_step` returns; name one to leave auxiliary losses out. With a
                validation fit, the metric that is logged in validation, judged at the end of every validation.
            tokens_key: key of the number of predicted tokens of a micro-batch; without it micro-batches weigh the same.
            tokens_per_step: training tokens of one optimizer update, over all micro-batches and ranks.
            active_params: parameters used by one token, counted as the ladder's were.
            schedule: learning rate over its peak along progress; by default assumed to be the fit's.
            actions: severity or kind of event -> `"log"`, `"warn"`, `"checkpoint"`, `"stop"`, `"raise"`, a callable
                taking the event, or several of these. By default nothing stops the run.
            log_every_n_steps: steps between logged verdicts, by default the Trainer's; every step is checked.
            events_path: file of the event log, JSON lines; None for no file.
            report_path: report of the run, `.html` or `.png`, written when it ends, is stopped or fails; None for none.
            console: print to the console.
            name: first part of every tag and of the state's key: several guards of one run need several names.
            override_recipe: accept a plan whose recipe makes the comparison meaningless; events then say so.
            sinks: further sinks beside the Trainer's loggers, used on the main process.
            channels: called at the end of every optimizer step for other scalars to watch, by name.

        Raises:
            MissingExtraError: Lightning is not installed, or for a report matplotlib.
            TrajectoryGuardError: numbers are missing or contradict each other; a file cannot be read.
        """
        if not hasattr(self, "on_fit_start"):
            raise MissingExtraError("lightning", "lightning")
        self.loss_key, self.tokens_key = loss_key, tokens_key
        self._config = GuardConfig(
            fit=fit,
            plan=plan,
            tokens_per_step=tokens_per_step,
            active_params=active_params,
            schedule=schedule,
            actions=actions,
            log_every_n_steps=log_every_n_steps,
            events_path=events_path,
            report_path=report_path,
            console=console,
            name=name,
            override_recipe=override_recipe,
            sinks=sinks,
            channels=channels,
        )
        self.guard: TrajectoryGuard | None = None
        self._intake: LossIntake | None = None
        self._restored: Mapping[str, Any] | None = None
        self._global_step = 0
        self._stopping = self._of_validation = False

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint; it holds the name, so that several guards keep apart."""
        return f"TrajectoryGuardCallback[{self._config.name}]"

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the step just ended, losses not yet judged included."""
        return {} if self._intake is None else self._intake.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until `on_train_start`, where the guard is built."""
        self._restored = state_dict or None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Runs when checkpoint and dataloaders are loaded, before the first batch: builds the guard."""
        self._global_step = trainer.global_step
        total = trainer.estimated_stepping_batches
        if not pl_module.automatic_optimization and len(trainer.optimizers) > 1:
            if self._config.plan is None and self._config.tokens_per_step is not None:
                raise TrajectoryGuardError("several manually stepped optimizers leave the horizon unclear; give a plan")
            total = None
        self._intake = self._config.open(
            total_steps=total,
            accumulation=trainer.accumulate_grad_batches,
            world_size=trainer.world_size,
            main_process=trainer.is_global_zero,
            loss_scaler=str(trainer.precision).startswith("16"),
            loggers=trainer.loggers,
            log_every_n_steps=trainer.log_every_n_steps,
        )
        self.guard, self._stopping = self._intake.guard, False
        self._of_validation = self.guard.forecast.plan.split == "validation"
        main_process = trainer.is_global_zero
        self._config.resume(self._intake, self._restored, step=trainer.global_step, main_process=main_process)
        self._restored = None
        pin_last_good(trainer, self.guard)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Runs after every micro-batch on every rank; an optimizer step has ended when `global_step` moved."""
        intake = self._intake
        if intake is None or self._of_validation:
            return
        # A training_step that returns None comes as None or as an empty dict.
        found = outputs if isinstance(outputs, Mapping) else {} if outputs is None else {"loss": outputs}
        automatic = pl_module.automatic_optimization
        if found:
            for key in (self.loss_key, self.tokens_key):
                if key is not None and key not in found:
                    raise TrajectoryGuardError(f"training_step returned {sorted(found)} without {key!r}")
            loss = found[self.loss_key]
            if automatic and self.loss_key == "loss" and trainer.accumulate_grad_batches != 1:
                loss = loss * trainer.accumulate_grad_batches
            intake.add(loss, tokens=None if self.tokens_key is None else found[self.tokens_key])
        step = trainer.global_step  # Looked up once: it is found through several properties.
        if step != self._global_step:
            self._global_step = step
            intake.end_step(step if automatic else None)
            self._act(trainer, intake)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Runs after every validation on every rank: a guard of a validation fit judges the metric `loss_key`."""
        if self._intake is None or trainer.sanity_checking or not self._of_validation:
            return
        if self.loss_key not in trainer.callback_metrics:
            raise TrajectoryGuardError(f"no metric {self.loss_key!r} among {sorted(trainer.callback_metrics)}")
        self._intake.add(trainer.callback_metrics[self.loss_key])
        self._intake.end_step(trainer.global_step)
        self._act(trainer, self._intake)

    def _act(self, trainer: Any, intake: LossIntake) -> None:
        """Do what the guard asks for, on every rank at the same step."""
        if intake.guard.checkpoint_requested:
            folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
            trainer.save_checkpoint(Path(folder) / f"{self._config.name.replace('/', '-')}-step={intake.step}.ckpt")
        if intake.should_stop and not self._stopping:
            self._stopping = trainer.should_stop = True
            if (trainer.min_steps or 0) > trainer.global_step or (trainer.min_epochs or 0) > trainer.current_epoch + 1:
                words = "the stop waits for the Trainer's min_steps or min_epochs; the action 'raise' does not"
                self._config.say(words, main_process=trainer.is_global_zero)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Runs for every checkpoint on every rank, before `state_dict`: an event may name it to roll back to."""
        if self._intake is not None and self._intake.step:
            self._intake.guard.note_checkpoint(self._intake.step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Runs after the last step: judges what is on its way and closes the sinks."""
        if self._intake is not None:
            self._intake.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Runs instead of `on_train_end`, after KeyboardInterrupt too: judges and flushes the same."""
        if self._intake is not None:
            self._intake.__exit__(type(exception), exception, None)


class TrajectoryGuardCallback(_GuardHooks, Callback):
    """The callback for `lightning.pytorch`; its arguments are those of `__init__`."""


def __getattr__(name: str) -> Any:
    """Make the callback for the `pytorch_lightning` package, whose Callback is another class, when it is asked for."""
    if name != "PLTrajectoryGuardCallback":
        raise AttributeError(name)
    try:
        from pytorch_lightning import Callback as PLCallback
    except ImportError as error:
        raise MissingExtraError("pytorch_lightning", "lightning") from error
    made = type(name, (_GuardHooks, PLCallback), {"__doc__": TrajectoryGuardCallback.__doc__, "__module__": __name__})
    globals()[name] = made
    return made
