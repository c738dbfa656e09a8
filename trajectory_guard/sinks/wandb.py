"""WandbSink: verdicts on a step axis of their own in Weights & Biases, an alert for an event."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trajectory_guard.detect.events import Event, Severity, Verdict
from trajectory_guard.errors import MissingExtraError, TrajectoryGuardError
from trajectory_guard.forecast import Forecast
from trajectory_guard.sinks.scalars import FlagState, check_name, verdict_scalars
from trajectory_guard.standing import Standing

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

__all__ = ["WandbSink"]


class WandbSink:
    """Logs every due verdict to a W&B run.

    W&B drops points of an earlier step than the newest; a lagged verdict is one. The axis `<name>/step`, declared for
    all tags of the guard, avoids that.

    Args:
        run: the run; by default the one that `wandb.init` started. It is never finished here.
        name: first part of every tag.

    Raises:
        MissingExtraError: wandb is not installed.
        TrajectoryGuardError: no run is given and none was started.
    """

    def __init__(self, run: "Run | None" = None, *, name: str = "guard") -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("wandb", "wandb") from error
        found = run or wandb.run
        if found is None:
            raise TrajectoryGuardError("no W&B run is active; call wandb.init() first or give run=")
        self.run = found
        self.name = check_name(name)
        self._flags = FlagState()
        self._standing: Standing | None = None

    def start(self, forecast: Forecast, *, resumed_step: int | None) -> None:
        """Declare the step axis and put the forecast of the final loss into the run's summary."""
        self.run.define_metric(f"{self.name}/step", hidden=True)
        self.run.define_metric(f"{self.name}/*", step_metric=f"{self.name}/step")
        last = forecast.plan.total_steps
        lower, upper = forecast.interval(last, level=forecast.levels[-1])
        self.run.summary.update(
            {
                f"{self.name}/final_forecast": forecast.loss(last),
                f"{self.name}/final_lower": float(lower),
                f"{self.name}/final_upper": float(upper),
            }
        )

    def reopen(self, events: Sequence[Event]) -> None:
        """Take the events that are known at a resume, for the flag."""
        self._flags.reopen(events)

    def standing(self, standing: Standing) -> None:
        """Keep how the run stands, for the verdict that follows."""
        self._standing = standing

    def verdict(self, verdict: Verdict) -> None:
        """Log every scalar of the verdict in one call."""
        scalars = verdict_scalars(verdict, flag=self._flags.at(verdict), name=self.name, standing=self._standing)
        self.run.log({f"{self.name}/step": verdict.step, **scalars})

    def event(self, event: Event, *, step: int) -> None:
        """Send an alert for an open event of at least warning."""
        self._flags.take(event)
        if event.severity >= Severity.WARNING and event.state == "open":
            self.run.alert(title=f"{event.severity.name.lower()} at step {step}: {event.kind}", text=event.sentence)

    def flush(self) -> None:
        """W&B sends in the background; there is nothing to flush."""

    def close(self) -> None:
        """The run is not ours to finish."""
