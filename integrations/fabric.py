"""Fabric: an intake for a loop written with Lightning Fabric.

    watch = watch_fabric(fabric, "fit.json", "plan.json")
    for step in range(1, steps + 1):
        for batch in micro_batches:
            watch.add(loss.detach())              # the undivided loss of a micro-batch
        optimizer.step()
        watch.end_step(step)                      # on every rank
        if watch.should_stop:                     # the same on every rank
            break
    watch.close()

`fabric.save(path, {"model": model, "guard": watch})` and `fabric.load` keep its state. *Step*: the loop's own, 1-based.
*Loss*: whatever is added, averaged over micro-batches, then ranks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trajectory_guard.actions import Action
from trajectory_guard.adapt import FitSource, GuardConfig, PlanSource
from trajectory_guard.intake import LossIntake
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.sinks.base import Sink

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = ["watch_fabric"]


def watch_fabric(
    fabric: "Fabric",
    fit: FitSource,
    plan: PlanSource = None,
    *,
    total_steps: int | None = None,
    tokens_per_step: int | None = None,
    active_params: float | None = None,
    schedule: LRSchedule | None = None,
    accumulation: int = 1,
    actions: Mapping[str, Action | Sequence[Action]] | None = None,
    log_every_n_steps: int = 50,
    events_path: str | Path | None = None,
    console: bool = True,
    name: str = "guard",
    override_recipe: bool = False,
    sinks: Sequence[Sink] = (),
) -> LossIntake:
    """Return an intake that averages over Fabric's ranks and logs through its loggers.

    Args:
        fabric: the launched Fabric.
        fit: file of a fit, a `DelphiFit`, or a finished `Forecast`.
        plan: file of a plan or a `RunPlan`; else `total_steps`, `tokens_per_step` and `active_params` are needed.
        total_steps: optimizer updates of the loop.
        tokens_per_step: training tokens of one optimizer update, over all micro-batches and ranks.
        active_params: parameters used by one token, counted as the ladder's were.
        schedule: learning rate over its peak along progress; by default assumed to be the fit's.
        accumulation: micro-batches per update, to be printed.
        actions: severity or kind of event -> action, as `TrajectoryGuard` takes them.
        log_every_n_steps: steps between logged verdicts; every step is checked.
        events_path: file of the event log, JSON lines; None for no file.
        console: print to the console.
        name: first part of every tag.
        override_recipe: accept a plan whose recipe makes the comparison meaningless.
        sinks: further sinks, used on the global zero rank.

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
        log_every_n_steps=log_every_n_steps,
        events_path=events_path,
        console=console,
        name=name,
        override_recipe=override_recipe,
    )
    loggers: Any = fabric.loggers
    return config.open(
        total_steps=total_steps,
        accumulation=accumulation,
        world_size=fabric.world_size,
        main_process=fabric.is_global_zero,
        loss_scaler=getattr(fabric, "_precision", None) is not None and fabric._precision.precision == "16-mixed",
        loggers=loggers,
        sinks=sinks,
    )
