"""Sink: the protocol of every place that verdicts and events are written to, and the fuse around one."""

import logging
from typing import Protocol

from trajectory_guard.detect.events import Event, Verdict
from trajectory_guard.forecast import Forecast

__all__ = ["FusedSink", "Sink"]

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Where a guard writes. Every method may be slow or fail; the guard survives both."""

    def start(self, forecast: Forecast, *, resumed_step: int | None) -> None:
        """Begin a run or go on with one: `resumed_step` is the last step judged before a resume, else None."""

    def verdict(self, verdict: Verdict) -> None:
        """Take one verdict that is due for logging."""

    def event(self, event: Event, *, step: int) -> None:
        """Take an event that was opened, updated or closed at `step`."""

    def flush(self) -> None:
        """Bring to disk or server what is buffered."""

    def close(self) -> None:
        """Flush and release; called once at the end."""


class FusedSink:
    """A sink that is switched off at its first failure, which is reported once: monitoring never harms the run."""

    def __init__(self, sink: Sink) -> None:
        self.sink: Sink | None = sink

    def start(self, forecast: Forecast, *, resumed_step: int | None) -> None:
        """See `Sink.start`."""
        self._call("start", forecast, resumed_step=resumed_step)

    def verdict(self, verdict: Verdict) -> None:
        """See `Sink.verdict`."""
        self._call("verdict", verdict)

    def event(self, event: Event, *, step: int) -> None:
        """See `Sink.event`."""
        self._call("event", event, step=step)

    def flush(self) -> None:
        """See `Sink.flush`."""
        self._call("flush")

    def close(self) -> None:
        """See `Sink.close`."""
        self._call("close")
        self.sink = None

    def _call(self, method: str, *args: object, **keywords: object) -> None:
        if self.sink is None:
            return
        try:
            getattr(self.sink, method)(*args, **keywords)
        except Exception as error:
            name = type(self.sink).__name__
            self.sink = None
            # Logged, not warned: under `-W error` a warning would raise into the training loop.
            logger.error(
                "%s failed in %s() and is switched off; training goes on without it", name, method, exc_info=error
            )
