"""What an example leaves at its end: the table, the events in words, and files for `trajectory-guard report`."""

from collections.abc import Sequence

from options import Setup
from table import compare

from trajectory_guard import TrajectoryGuard
from trajectory_guard.files import atomic_write

__all__ = ["tell"]


def tell(setup: Setup, losses: Sequence[float], guard: TrajectoryGuard) -> None:
    """Print forecast against observed loss and every event; write the run's losses and plan into its folder.

    Args:
        setup: the run.
        losses: loss in nats of steps 1, 2, ...; NaN where the run was not seen.
        guard: the guard that watched it.
    """
    print("\nForecast against observed loss, from this run:\n")
    print(compare(losses, guard.forecast).table)
    for event in guard.events:
        print(f"{event.severity.name}: {event.sentence}")
    setup.plan.save(setup.folder / "plan.json")
    with atomic_write(setup.folder / "losses.csv") as file:
        file.write("step,loss\n")
        seen = losses[: guard.last_step]
        file.writelines(f"{step},{loss:.6g}\n" for step, loss in enumerate(seen, start=1))
    folder = setup.folder
    print(
        f"\nOne page about this run: trajectory-guard report {setup.fit} {folder}/losses.csv "
        f"--plan {folder}/plan.json -o {folder}/report.html"
    )
