"""JsonlSink and read_events: the event log, append-only, readable after any crash (docs/formats.md)."""

import json
import os
from pathlib import Path
from typing import Any

from trajectory_guard.detect.events import Event, Verdict
from trajectory_guard.errors import FileFormatError
from trajectory_guard.forecast import Forecast

__all__ = ["JsonlSink", "read_events"]

FORMAT = "trajectory-guard-events"
VERSION = 1


class JsonlSink:
    """Appends every event, when it opens, changes and closes, as one JSON line, flushed at once.

    Each start of a run appends a header line with the format and the `resumed_step`, null for a run from the start:
    what an earlier attempt wrote for later steps is void, which `read_events` knows. Nothing is ever rewritten.

    Args:
        path: the file; folders are made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: Any = None

    def start(self, forecast: Forecast, *, resumed_step: int | None) -> None:
        """Open the file and append the header, after ending a line that a crash has cut off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)
        if _is_torn(self.path):
            self._file.write(b"\n")
        check = forecast.check
        self._write(
            {
                "format": FORMAT,
                "version": VERSION,
                "resumed_step": resumed_step,
                "total_steps": forecast.plan.total_steps,
                "metric": forecast.plan.metric,
                "split": forecast.plan.split,
                "law": forecast.law,
                "recipe_overridden": list(check.errors) if check.overridden else [],
            }
        )

    def verdict(self, verdict: Verdict) -> None:
        """Verdicts are not written here."""

    def event(self, event: Event, *, step: int) -> None:
        """Append one line: the step at which it was said, and the event's fields; what is not finite is null."""
        self._write({"step": step, **event.to_dict()})

    def flush(self) -> None:
        """Bring the lines to disk."""
        if self._file is not None and self.path.is_file():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close the file."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None

    def _write(self, content: dict[str, Any]) -> None:
        if self._file is None:
            raise FileFormatError(f"{self.path}: the event log is not open; start it first")
        finite = {k: None if isinstance(v, float) and v - v != 0 else v for k, v in content.items()}
        try:
            self._file.write((json.dumps(finite, allow_nan=False, ensure_ascii=False) + "\n").encode())
        except OSError:  # A full disk: the sink is about to be switched off, and must not keep the file.
            self._file.close()
            self._file = None
            raise


def _is_torn(path: Path) -> bool:
    """True when the last line of a file has no end: a process died while writing it."""
    with path.open("rb") as file:
        if not path.is_file() or file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def read_events(path: str | Path) -> list[tuple[int, Event]]:
    """Read an event log: (step at which it was said, event) in order, without what a resume made void.

    A line that a crash cut off is skipped; it can only stand at the end of one attempt.

    Raises:
        FileFormatError: the file is missing, of another format or a newer version, or damaged elsewhere.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise FileFormatError(f"{path}: no event log can be read there: {error.strerror}") from error
    found: list[tuple[int, Event]] = []
    torn: int | None = None
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            content = None
        header = content if isinstance(content, dict) and "format" in content else None
        if torn is not None and header is None:
            raise FileFormatError(f"{path}: line {torn} is not valid JSON; restore the file or remove the line")
        if content is None and number > 1:
            torn = number
            continue
        torn = None
        if header is not None:
            resumed = _read_header(path, number, header)
            found = [(step, event) for step, event in found if resumed is not None and step <= resumed]
        elif number == 1 or not isinstance(content, dict):
            raise FileFormatError(f"{path}: line {number} is not a line of a {FORMAT}: {line[:80]!r}")
        else:
            found.append(_read_event(path, number, content))
    return found


def _read_header(path: str | Path, number: int, content: dict[str, Any]) -> int | None:
    version = content.get("version")
    if content["format"] != FORMAT or not isinstance(version, int) or version < 1:
        raise FileFormatError(f"{path}: line {number}: format {content['format']!r}, expected {FORMAT!r} version 1")
    if version > VERSION:
        raise FileFormatError(f"{path}: event log version {version} is newer than {VERSION}; upgrade trajectory-guard")
    resumed = content.get("resumed_step")
    if resumed is not None and not isinstance(resumed, int):
        raise FileFormatError(f"{path}: line {number}: resumed_step must be a step or null, got {resumed!r}")
    return resumed


def _read_event(path: str | Path, number: int, content: dict[str, Any]) -> tuple[int, Event]:
    step = content.pop("step", None)
    try:
        if not isinstance(step, int):
            raise ValueError(f"step must be an integer, got {step!r}")
        return step, Event.from_dict(content)
    except (ValueError, TypeError) as error:
        raise FileFormatError(f"{path}: line {number}: {error}") from error
