"""The laws by name, imported when asked for."""

import importlib
import importlib.util

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.laws.base import Law

__all__ = ["ALONG_TRAINING", "get_law", "law_names"]

_MODULES = {
    "matched-progress": "trajectory_guard.laws.progress",
    "schedule-aware": "trajectory_guard.laws.schedule",
    "collapse": "trajectory_guard.laws.collapse",
    "terminal": "trajectory_guard.laws.terminal",
}

ALONG_TRAINING = ("matched-progress", "schedule-aware", "collapse")
"""Laws that forecast every progress and stand in the choice by back-test; `terminal` knows only the end."""


def law_names() -> tuple[str, ...]:
    """Return the names of all laws, the default first.

    Example:
        >>> law_names()[0]
        'matched-progress'
    """
    return tuple(name for name in _MODULES if _find(name) is not None)


def get_law(name: str) -> type[Law]:
    """Return the class of a law.

    Raises:
        TrajectoryGuardError: no law has that name.

    Example:
        >>> get_law("matched-progress").__name__
        'MatchedProgress'
    """
    found = _find(name) if name in _MODULES else None
    if found is None:
        raise TrajectoryGuardError(f"no law is called {name!r}; there are {list(law_names())}")
    return found


def _find(name: str) -> type[Law] | None:
    if importlib.util.find_spec(_MODULES[name]) is None:
        return None
    module = importlib.import_module(_MODULES[name])
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    return next((value for value in classes if getattr(value, "name", None) == name), None)
