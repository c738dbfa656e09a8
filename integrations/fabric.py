"""Fabric: an intake for a loop written with Lightning Fabric.

    watch = watch_fabric(fabric, GuardConfig("fit.json", "plan.json", report_path="report.html"))
    with watch:                                   # judges the last steps and writes the report, at a failure too
        for step in range(1, steps + 1):
            for batch in micro_batches:
                watch.add(loss.detach())          # the undivided loss of a micro-batch
            optimizer.step()
            watch.end_step(step)                  # on every rank
            if watch.should_stop:                 # the same on every rank
                break

`fabric.save(path, {"model": model, "guard": watch})` and `fabric.load` keep its state. *Step*: the loop's own, 1-based.
*Loss*: whatever is added, averaged over micro-batches, then ranks.
"""

from typing import TYPE_CHECKING, Any

from trajectory_guard.adapt import GuardConfig
from trajectory_guard.intake import LossIntake

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = ["GuardConfig", "watch_fabric"]


def watch_fabric(
    fabric: "Fabric", config: GuardConfig, *, total_steps: int | None = None, accumulation: int = 1
) -> LossIntake:
    """Return an intake that averages over Fabric's ranks and logs through its loggers.

    Args:
        fabric: the launched Fabric.
        config: the guard.
        total_steps: optimizer updates of the loop, needed without a plan.
        accumulation: micro-batches per update, to be printed.

    Raises:
        TrajectoryGuardError: there is neither a plan nor `total_steps`, or the recipe is another.
    """
    loggers: Any = fabric.loggers
    precision = getattr(getattr(fabric, "_precision", None), "precision", "")
    return config.open(
        total_steps=total_steps,
        accumulation=accumulation,
        world_size=fabric.world_size,
        main_process=fabric.is_global_zero,
        loss_scaler=precision == "16-mixed",
        loggers=loggers,
    )
