"""Actions: what a guard does about an event; nothing stops a run unless it was configured to."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, cast, get_args

from trajectory_guard.detect.events import KINDS, Event, Severity
from trajectory_guard.errors import DivergenceError, TrajectoryGuardError

__all__ = ["Action", "Actions"]

logger = logging.getLogger("trajectory_guard")

Named = Literal["log", "warn", "checkpoint", "stop", "raise"]
Action = Named | Callable[[Event], object]
"""`"log"` and `"warn"` write to the logger `trajectory_guard`; `"checkpoint"` and `"stop"` ask the loop to save or to
stop; `"raise"` raises `DivergenceError`; a callable gets the event."""


class Actions:
    """Actions by severity or kind, and the requests they have made.

    An event's actions are those of its kind where given, else those of the highest configured severity that it
    reaches. By default INFO is logged and everything above warns.

    Args:
        actions: severity (or its name, or a kind of event) -> one action or several.

    Raises:
        TrajectoryGuardError: an unknown severity, kind or action.
    """

    def __init__(self, actions: Mapping[Severity | str, Action | Sequence[Action]] | None = None) -> None:
        self.stop = False
        self.checkpoint = False
        self._by_severity: dict[Severity, tuple[Action, ...]] = {Severity.INFO: ("log",), Severity.WARNING: ("warn",)}
        self._by_kind: dict[str, tuple[Action, ...]] = {}
        names = {severity.name.lower(): severity for severity in Severity}
        for key, given in (actions or {}).items():
            chosen = cast(tuple[Action, ...], (given,) if isinstance(given, str) or callable(given) else tuple(given))
            for action in chosen:
                if not callable(action) and action not in get_args(Named):
                    raise TrajectoryGuardError(
                        f"an action must be one of {get_args(Named)} or a callable taking the event, got {action!r}"
                    )
            if isinstance(key, Severity) or str(key).lower() in names:
                severity = key if isinstance(key, Severity) else names[str(key).lower()]
                self._by_severity[severity] = chosen
            elif str(key).partition("/")[0] in KINDS:
                self._by_kind[str(key)] = chosen
            else:
                raise TrajectoryGuardError(
                    f"actions are given by severity {sorted(names)} or by kind of event {list(KINDS)}, got {key!r}"
                )

    def of(self, event: Event) -> tuple[Action, ...]:
        """Return the actions that `event` asks for."""
        for kind in (event.kind, event.kind.partition("/")[0]):
            if kind in self._by_kind:
                return self._by_kind[kind]
        return self._by_severity[max(severity for severity in self._by_severity if severity <= event.severity)]

    def take(self, event: Event) -> DivergenceError | None:
        """Do what `event` asks for; return the error to raise, if it asks for that."""
        error = None
        for action in self.of(event):
            if action == "log":
                logger.info("%s", line(event))
            elif action == "warn":
                # Logged, not warned: under `-W error` a warning would raise into the training loop.
                logger.warning("%s", line(event))
            elif action == "checkpoint":
                self.checkpoint = True
            elif action == "stop":
                self.stop = True
            elif action == "raise":
                error = DivergenceError(event)
            elif callable(action):
                try:
                    action(event)
                except Exception as problem:
                    logger.error("the action %r failed on %s; training goes on", action, event.kind, exc_info=problem)
        return error


def line(event: Event) -> str:
    """Return an event as one line of a log."""
    return f"step {event.detected}: {event.severity.name} {event.kind}: {event.sentence}"
