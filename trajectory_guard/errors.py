"""The errors this library raises: each message says what was wrong, the value got, and what to do."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trajectory_guard.detect.events import Event

__all__ = ["DivergenceError", "FileFormatError", "MissingExtraError", "RecipeMismatchError", "TrajectoryGuardError"]


class TrajectoryGuardError(ValueError):
    """Base of every error that the library raises on purpose."""


class FileFormatError(TrajectoryGuardError):
    """A file of ours (fit, plan, manifest, events) or a log cannot be read as what it should be."""


class RecipeMismatchError(TrajectoryGuardError):
    """A plan's recipe makes the comparison with the fit's forecast meaningless."""


class MissingExtraError(TrajectoryGuardError, ImportError):
    """An optional package is not installed; the message carries the pip line that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f'{package} is not installed; run: pip install "trajectory-guard[{extra}]"')


class DivergenceError(TrajectoryGuardError):
    """A guard raised this because its `actions` say so; `event` is the event that asked for it."""

    def __init__(self, event: "Event") -> None:
        super().__init__(event.sentence)
        self.event = event
