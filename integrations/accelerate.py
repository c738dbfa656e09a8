"""Accelerate: an intake for a loop written with an Accelerator.

    watch = AcceleratorWatch(accelerator, GuardConfig("fit.json", "plan.json", report_path="report.html"))
    with watch:                                       # judges the last steps and writes the report, at a failure too
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            watch.observe(loss)                       # after every micro-batch, on every rank
            if watch.should_stop:                     # the same on every rank
                break

`accelerator.save_state` and `load_state` keep its state. *Step*: the micro-batches where `accelerator.sync_gradients`
is true, counted from 1. *Loss*: the user's, which `accelerator.backward` divides only for itself.
"""

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from trajectory_guard.adapt import GuardConfig
from trajectory_guard.detect.events import Verdict
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.intake import Scalar

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["AcceleratorWatch", "GuardConfig"]


class AcceleratorWatch:
    """Watches the loop of an Accelerator, and registers itself for its checkpoints.

    Args:
        accelerator: the Accelerator.
        config: the guard.
        total_steps: optimizer updates of the loop, needed without a plan.

    Raises:
        TrajectoryGuardError: there is neither a plan nor `total_steps`, or the recipe is another.
    """

    def __init__(self, accelerator: "Accelerator", config: GuardConfig, *, total_steps: int | None = None) -> None:
        self._accelerator = accelerator
        self.intake = config.open(
            total_steps=total_steps,
            accumulation=accelerator.gradient_accumulation_steps,
            world_size=accelerator.num_processes,
            main_process=accelerator.is_main_process,
            loss_scaler=accelerator.mixed_precision == "fp16",
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.intake.__exit__(kind, error, at)
