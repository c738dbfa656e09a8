"""The laws by name, imported when asked for."""

import importlib

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.laws.base import Law

__all__ = ["ALONG_TRAINING", "get_law", "law_names"]

_LAWS = {
    "matched-progress": ("trajectory_guard.laws.progress", "MatchedProgress"),
    "schedule-aware": ("trajectory_guard.laws.schedule", "ScheduleAwareLaw"),
    "collapse": ("trajectory_guard.laws.collapse", "CollapseLaw"),
    "terminal": ("trajectory_guard.laws.terminal", "TerminalFit"),
}

ALONG_TRAINING = ("matched-progress", "schedule-aware", "collapse")
"""Laws that forecast every progress and stand in the choice by back-test; `terminal` knows only the end."""


def law_names() -> tuple[str, ...]:
    """Return the names of all laws, the default first.

    Example:
        >>> law_names()
        ('matched-progress', 'schedule-aware', 'collapse', 'terminal')
    """
    return tuple(_LAWS)


def get_law(name: str) -> type[Law]:
    """Return the class of a law.

    Raises:
        TrajectoryGuardError: no law has that name.

    Example:
        >>> get_law("matched-progress").__name__
        'MatchedProgress'
    """
    if name not in _LAWS:
        raise TrajectoryGuardError(f"no law is called {name!r}; there are {list(_LAWS)}")
    module, law = _LAWS[name]
    return getattr(importlib.import_module(module), law)
