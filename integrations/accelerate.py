"""Accelerate: an intake for a loop written with an Accelerator.

    watch = AcceleratorWatch(accelerator, "fit.json", "plan.json")
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        watch.observe(loss)                       # after every micro-batch, on every rank
        if watch.should_stop:                     # the same on every rank
            break
    watch.close()

`accelerator.save_state` and `load_state` keep its state. *Step*: the micro-batches where `accelerator.sync_gradients`
is true, counted from 1. *Loss*: the user's, which `accelerator.backward` divides only for itself.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trajectory_guard.actions import Action
from trajectory_guard.adapt import FitSource, GuardConfig, PlanSource
from trajectory_guard.detect.events import Verdict
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.intake import Scalar
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.sinks.base import Sink

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["AcceleratorWatch"]


class AcceleratorWatch:
    """Watches the loop of an Accelerator, and registers itself for its checkpoints.

    Args:
        accelerator: the Accelerator.
        fit: file of a fit, a `DelphiFit`, or a finished `Forecast`.
        plan: file of a plan or a `RunPlan`; else `total_steps`, `tokens_per_step` and `active_params` are needed.
        total_steps: optimizer updates of the loop.
        tokens_per_step: training tokens of one optimizer update, over all micro-batches and ranks.
        active_params: parameters used by one token, counted as the ladder's were.
        schedule: learning rate over its peak along progress; by default assumed to be the fit's.
        actions: severity or kind of event -> action, as `TrajectoryGuard` takes them.
        log_every_n_steps: steps between logged verdicts; every step is checked.
        events_path: file of the event log, JSON lines; None for no file.
        console: print to the console.
        name: first part of every tag.
        override_recipe: accept a plan whose recipe makes the comparison meaningless.
        sinks: further sinks, used on the main process.

    Raises:
        TrajectoryGuardError: numbers are missing or contradict each other; a file cannot be read.
    """

    def __init__(
        self,
        accelerator: "Accelerator",
        fit: FitSource,
        plan: PlanSource = None,
        *,
        total_steps: int | None = None,
        tokens_per_step: int | None = None,
        active_params: float | None = None,
        schedule: LRSchedule | None = None,
        actions: Mapping[str, Action | Sequence[Action]] | None = None,
        log_every_n_steps: int = 50,
        events_path: str | Path | None = None,
        console: bool = True,
        name: str = "guard",
        override_recipe: bool = False,
        sinks: Sequence[Sink] = (),
    ) -> None:
        config = GuardConfig(
            fit=fit,
            plan=plan,
            tokens_per_step=tokens_per_step,
            active_params=active_params,
            schedule=schedule,
            actions=actions,
            log_every_n_steps=log_every_n_steps,
            events_path=events_path,
            console=console,
            name=name,
            override_recipe=override_recipe,
        )
        self._accelerator = accelerator
        self.intake = config.open(
            total_steps=total_steps,
            accumulation=accelerator.gradient_accumulation_steps,
            world_size=accelerator.num_processes,
            main_process=accelerator.is_main_process,
            loss_scaler=accelerator.mixed_precision == "fp16",
            sinks=sinks,
        )
        accelerator.register_for_checkpointing(self)

    @property
    def guard(self) -> TrajectoryGuard:
        """The guard that judges."""
        return self.intake.guard

    @property
    def should_stop(self) -> bool:
        """True when the guard asks for the run to stop; the same on every rank."""
        return self.intake.should_stop

    def observe(self, loss: Scalar, *, tokens: Scalar | None = None) -> tuple[Verdict, ...]:
        """Take the undivided loss of a micro-batch; where gradients were synchronised, end the step.

        Args:
            loss: scalar on any device, in nats per token.
            tokens: predicted tokens of this micro-batch.

        Returns:
            The verdicts that became due.
        """
        self.intake.add(loss, tokens=tokens)
        return self.intake.end_step() if self._accelerator.sync_gradients else ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state; `accelerator.save_state` calls this."""
        if self.intake.step:
            self.guard.note_checkpoint(self.intake.step)
        return self.intake.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; `accelerator.load_state` calls this."""
        self.intake.load_state_dict(state)

    def close(self) -> None:
        """Judge what is on its way and close the sinks."""
        self.intake.close()
