"""What an example leaves at its end: the table, the events in words, and files for `trajectory-guard report`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from options import Setup
from table import compare

from trajectory_guard import TrajectoryGuard, TrajectoryGuardError
from trajectory_guard.files import atomic_write
from trajectory_guard.picture import RunRecord, draw_run, save_picture

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
    seen = losses[: guard.last_step]
    setup.plan.save(setup.folder / "plan.json")
    with atomic_write(setup.folder / "losses.csv") as file:
        file.write("step,loss\n")
        file.writelines(f"{step},{loss:.6g}\n" for step, loss in enumerate(seen, start=1))
    record = RunRecord(step=np.arange(1, len(seen) + 1), loss=np.array(seen, dtype=float), events=guard.events)
    try:
        save_picture(draw_run(guard.forecast, record, title=setup.folder.name), setup.folder / "run.png")
    except TrajectoryGuardError as error:  # matplotlib is not installed, or no loss was finite.
        print(f"no picture: {error}")
    folder = setup.folder
    page = f"{folder}/report.html"
    if not Path(page).exists():
        page = f"trajectory-guard report {setup.fit} {folder}/losses.csv --plan {folder}/plan.json -o {page}"
    print(f"\nA picture of this run: {folder}/run.png; one page about it: {page}")
