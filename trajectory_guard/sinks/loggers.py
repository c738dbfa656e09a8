"""LoggerSink: verdicts through any logger with `log_metrics(metrics, step)`, as those of Lightning and Fabric are."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from trajectory_guard.detect.events import Event, Verdict
from trajectory_guard.forecast import Forecast
from trajectory_guard.sinks.base import Sink
from trajectory_guard.sinks.scalars import FlagState, check_name, verdict_scalars
from trajectory_guard.sinks.tensorboard import TensorBoardSink
from trajectory_guard.standing import Standing

__all__ = ["LoggerSink", "logger_sinks"]


class MetricsLogger(Protocol):
    """What a framework's logger must have."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log scalars at a step."""

    def save(self) -> None:
        """Bring what is buffered to disk or server."""


class LoggerSink:
    """Logs the scalars of every due verdict, at its own 1-based step, through one logger.

    Args:
        logger: the logger; it is saved, never finished: it belongs to the framework.
        name: first part of every tag.
    """

    def __init__(self, logger: MetricsLogger, *, name: str = "guard") -> None:
        self.logger = logger
        self.name = check_name(name)
        self._flags = FlagState()
        self._standing: Standing | None = None

    def start(self, forecast: Forecast, *, resumed_step: int | None) -> None:
        """Log the forecast of the final loss."""
        last = forecast.plan.total_steps
        self.logger.log_metrics({f"{self.name}/final_forecast": forecast.loss(last)}, step=(resumed_step or 0) + 1)

    def reopen(self, events: Sequence[Event]) -> None:
        """Take the events that are known at a resume, for the flag."""
        self._flags.reopen(events)

    def standing(self, standing: Standing) -> None:
        """Keep how the run stands, for the verdict that follows."""
        self._standing = standing

    def verdict(self, verdict: Verdict) -> None:
        """Log every scalar of the verdict in one call."""
        scalars = verdict_scalars(verdict, flag=self._flags.at(verdict), name=self.name, standing=self._standing)
        self.logger.log_metrics(scalars, step=verdict.step)

    def event(self, event: Event, *, step: int) -> None:
        """Remember the event for the flag; loggers share no way to log text."""
        self._flags.take(event)

    def flush(self) -> None:
        """Save the logger."""
        self.logger.save()

    def close(self) -> None:
        """Save the logger."""
        self.logger.save()


def logger_sinks(loggers: Iterable[Any], *, name: str = "guard") -> list[Sink]:
    """Return one sink per logger of a framework: the full TensorBoard sink where it has torch's `SummaryWriter`."""
    return [
        TensorBoardSink(logger.experiment, name=name) if _writes_with_torch(logger) else LoggerSink(logger, name=name)
        for logger in loggers
    ]


def _writes_with_torch(logger: Any) -> bool:
    if type(logger).__name__ != "TensorBoardLogger":
        return False
    # The same logger may write through tensorboardX, which is another class.
    return type(logger.experiment).__module__.startswith("torch.utils.tensorboard")
