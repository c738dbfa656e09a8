"""Sink: the protocol of every place that verdicts and events are written to, and the fuse around one."""

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from trajectory_guard.detect.events import Event, Verdict
from trajectory_guard.forecast import Forecast
from trajectory_guard.standing import Standing

__all__ = ["FusedSink", "Sink"]

logger = logging.getLogger(__name__)

SLOW_CALL_S = 10.0
"""A call that took longer is the last of its sink. A chosen number: far over what a call takes (a TensorBoard flush
.1 ms, measured), far under what other ranks wait for this one (30 minutes by default in torch.distributed)."""


class Sink(Protocol):
    """Where a guard writes. Every method may be slow or fail; the guard survives both.

    A sink may have more: `reopen(events)`, called after `start` at a resume with the events kept so far;
    `standing(standing)`, called before `verdict` with what is known beside it; and an attribute `every_step`, true
    when it takes every verdict and not only those due for logging.
    """

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
    """A sink that is switched off at its first failure, which is reported once: monitoring never harms the run.

    A call that blocks cannot be broken off in its thread without leaving the sink's files and locks as they happen to
    be. It is waited for, then the sink is switched off if the call took longer than `slow_call_s`: a server that hangs
    costs the run one such wait, not one a step. `start` and `close`, which happen once, may take their time.

    Args:
        sink: the sink.
        slow_call_s: longest call in seconds after which the sink stays on.
    """

    def __init__(self, sink: Sink, *, slow_call_s: float = SLOW_CALL_S) -> None:
        self.sink: Sink | None = sink
        self.slow_call_s = slow_call_s

    def start(self, forecast: Forecast, *, resumed_step: int | None) -> None:
        """See `Sink.start`."""
        self._call("start", forecast, resumed_step=resumed_step)

    def reopen(self, events: Sequence[Event]) -> None:
        """Tell a sink that has a `reopen` which events are known at a resume: they are not news."""
        if hasattr(self.sink, "reopen"):
            self._call("reopen", events)

    @property
    def every_step(self) -> bool:
        """Whether the sink takes every verdict."""
        return bool(getattr(self.sink, "every_step", False))

    def standing(self, standing: Standing) -> None:
        """Tell a sink that has a `standing` how the run stands at the verdict that follows."""
        if hasattr(self.sink, "standing"):
            self._call("standing", standing)

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
        name = type(self.sink).__name__
        began = time.monotonic()
        try:
            getattr(self.sink, method)(*args, **keywords)
        except Exception as error:
            self.sink = None
            # Logged, not warned: under `-W error` a warning would raise into the training loop.
            logger.error(
                "%s failed in %s() and is switched off; training goes on without it", name, method, exc_info=error
            )
            return
        took_s = time.monotonic() - began
        # These two happen once, and may log in to a server or wait for an upload.
        if took_s > self.slow_call_s and method not in ("start", "close"):
            self.sink = None
            logger.error(
                "%s took %.1f s in %s(), over %g s, and is switched off; training goes on without it",
                name,
                took_s,
                method,
                self.slow_call_s,
            )
