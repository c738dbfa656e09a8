"""Journal: the events of a run, each in its latest state, passed on to sinks and actions as they change."""

from collections.abc import Mapping, Sequence
from typing import Any

from trajectory_guard.actions import Actions
from trajectory_guard.detect.events import Event, Severity, Verdict
from trajectory_guard.errors import DivergenceError
from trajectory_guard.forecast import Forecast
from trajectory_guard.sinks.base import FusedSink, Sink
from trajectory_guard.standing import Standing

__all__ = ["Journal"]

KEPT = 100
"""Events kept in memory and state; the oldest closed ones go first, those that only inform before the others."""


class Journal:
    """Keeps events, hands them to sinks, takes their actions."""

    def __init__(self, sinks: Sequence[Sink], actions: Actions) -> None:
        self.sinks = [FusedSink(sink) for sink in sinks]
        self.actions = actions
        self.every_step = any(sink.every_step for sink in self.sinks)
        """Whether a sink takes every verdict."""
        self._events: dict[tuple[str, int], Event] = {}

    @property
    def events(self) -> tuple[Event, ...]:
        """The latest state of every event kept, in the order of their flags."""
        return tuple(self._events.values())

    def start(self, forecast: Forecast, resumed_step: int | None) -> None:
        """Begin or go on with a run in every sink."""
        for sink in self.sinks:
            sink.start(forecast, resumed_step=resumed_step)
            if resumed_step is not None:
                sink.reopen(self.events)

    def write(self, verdict: Verdict, standing: Standing, *, log: bool) -> DivergenceError | None:
        """Take a verdict: its events to memory and sinks, itself to the sinks if `log` or if it has events."""
        fresh = [event for event in verdict.events if self._keep(event)]
        for sink in self.sinks:
            for event in verdict.events:
                sink.event(event, step=verdict.step)
            if log or verdict.events or sink.every_step:
                sink.standing(standing)
                sink.verdict(verdict)
        if any(event.severity >= Severity.WARNING for event in fresh):
            self.flush()
        errors = [self.actions.take(event) for event in fresh]
        return next((error for error in errors if error), None)

    def flush(self) -> None:
        """Flush every sink."""
        for sink in self.sinks:
            sink.flush()

    def close(self) -> None:
        """Close every sink."""
        for sink in self.sinks:
            sink.close()

    def state(self) -> list[dict[str, Any]]:
        """Return the events as plain values."""
        return [event.to_dict() for event in self._events.values()]

    def load_state(self, content: Sequence[Mapping[str, Any]]) -> None:
        """Take over events that `state` returned."""
        events = [Event.from_dict(item) for item in content]
        self._events = {(event.kind, event.detected): event for event in events}

    def _keep(self, event: Event) -> bool:
        """Keep the event; return whether it asks for action: it is new, or its severity has risen."""
        key = (event.kind, event.detected)
        known = self._events.get(key)
        self._events[key] = event
        if len(self._events) > KEPT:
            closed = [k for k, e in self._events.items() if e.state == "closed" and k != key]
            minor = [k for k in closed if self._events[k].severity == Severity.INFO]
            for oldest in (minor or closed)[:1]:
                del self._events[oldest]
        return known is None or event.severity > known.severity
