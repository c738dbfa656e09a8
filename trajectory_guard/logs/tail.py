"""What was appended to a text log or an event directory since a position that survives in a file."""

import contextlib
import csv
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trajectory_guard.errors import FileFormatError
from trajectory_guard.logs.columns import find_step, find_tokens
from trajectory_guard.logs.csv import LABELS, split_header
from trajectory_guard.logs.jsonl import numbers_of, parse_json
from trajectory_guard.logs.records import DamagedRecord
from trajectory_guard.logs.table import MAX_LINE_BYTES, number
from trajectory_guard.logs.tensorboard import ScalarEvent, event_files, events_from

__all__ = ["EventTail", "TextTail"]

MAX_READ_BYTES = 16 * 2**20
"""Most bytes read at once: memory stays flat when a long log is caught up with."""

MAX_READ_EVENTS = 200_000
"""Most events read at once, for the same reason."""

DELIMITERS = ",\t;"
HEAD_BYTES, FOOT_BYTES = 256, 64
"""Bytes at the start of a file and before the position that tell whether it is still the file it was."""


class TextTail:
    """Complete lines appended to a CSV or JSONL file, parsed to name -> number.

    `busy` says that more can be read at once; after `read`, `take_rewritten()` tells whether its records come from the
    start of a file that took the place of the one read before, and `take_skipped()` counts lines that were no rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.busy = False
        self._inode: int | None = None
        self._position = 0
        self._print = ""
        self._json: bool | None = None
        self._header: list[str | None] | None = None
        self._delimiter = ","
        self._rewritten = False
        self._skipped = 0

    def read(self) -> list[dict[str, float]]:
        """Return the records of the lines completed since the last call.

        Raises:
            FileFormatError: a gzip file, or a line without end.
        """
        self.busy = False
        file, rotated = self._find()
        if file is None:
            return []
        try:
            with open(file, "rb") as stream:
                status = os.fstat(stream.fileno())
                if self._inode is None:
                    self._inode = status.st_ino
                elif status.st_size < self._position or self._fingerprint(stream) != self._print:
                    self._start_over(status.st_ino)
                stream.seek(self._position)
                chunk = stream.read(MAX_READ_BYTES)
                whole = len(chunk) if rotated and len(chunk) < MAX_READ_BYTES else chunk.rfind(b"\n") + 1
                if whole == 0 and len(chunk) > MAX_LINE_BYTES:
                    raise FileFormatError(f"{file}: no line end within {len(chunk)} bytes; is it a log?")
                if self._position == 0 and chunk.startswith(b"\x1f\x8b"):
                    raise FileFormatError(f"{file}: a gzip file does not grow line by line; use replay for it")
                self._position += whole
                self._print = self._fingerprint(stream)
        except OSError:
            return []
        if rotated and whole == 0:
            # The old file is read to its end: go on with the one that took its name, whose rows are all new.
            self._start_over(None)
            self._rewritten = False
            return self.read()
        self.busy = rotated or whole > 0
        return [record for line in chunk[:whole].splitlines() if (record := self._parse(line)) is not None]

    def take_rewritten(self) -> bool:
        """Tell once whether the last records come from the start of another file."""
        rewritten, self._rewritten = self._rewritten, False
        return rewritten

    def take_skipped(self) -> int:
        """Return the lines skipped since the last call."""
        skipped, self._skipped = self._skipped, 0
        return skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON values."""
        return {
            "kind": "text",
            "inode": self._inode,
            "position": self._position,
            "print": self._print,
            "json": self._json,
            "header": self._header,
            "delimiter": self._delimiter,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position.

        Raises:
            KeyError, TypeError, ValueError: the state is damaged.
        """
        inode, position, header = state["inode"], int(state["position"]), state["header"]
        if position < 0 or not (header is None or isinstance(header, list)):
            raise ValueError("position or header")
        if state["delimiter"] not in tuple(DELIMITERS):
            raise ValueError("delimiter")
        self._inode = None if inode is None else int(inode)
        self._position, self._print, self._json = position, str(state["print"]), state["json"]
        self._header = None if header is None else [None if name is None else str(name) for name in header]
        self._delimiter = state["delimiter"]

    def _find(self) -> tuple[Path | None, bool]:
        """Return the file that the position belongs to, and whether it was rotated away to another name."""
        try:
            current = self.path.stat().st_ino
        except OSError:
            current = None
        if self._inode is None or current == self._inode:
            return (None, False) if current is None else (self.path, False)
        with contextlib.suppress(OSError), os.scandir(self.path.parent) as entries:
            for entry in entries:
                if entry.name.startswith(self.path.name) and entry.inode() == self._inode and entry.is_file():
                    # Until the new file exists, the old one may still be written to.
                    return Path(entry.path), current is not None
        if current is None:
            return None, False
        self._start_over(current)
        return self.path, False

    def _start_over(self, inode: int | None) -> None:
        self._inode, self._position, self._print, self._json = inode, 0, "", None
        self._rewritten = True

    def _fingerprint(self, stream: Any) -> str:
        stream.seek(0)
        head = stream.read(min(HEAD_BYTES, self._position))
        stream.seek(max(0, self._position - FOOT_BYTES))
        foot = stream.read(min(FOOT_BYTES, self._position))
        return hashlib.sha256(head + b"|" + foot).hexdigest()[:32]

    def _parse(self, line: bytes) -> dict[str, float] | None:
        text = line.decode("utf-8-sig", errors="replace").strip("\x00")
        if not text.strip():
            return None
        if self._json is None:
            self._json = text.lstrip().startswith("{")
        try:
            record = self._parse_json(text) if self._json else self._parse_csv(text)
        except (ValueError, csv.Error, StopIteration):
            self._skipped += 1
            return None
        return record

    def _parse_json(self, text: str) -> dict[str, float]:
        content = parse_json(text)
        if not isinstance(content, dict):
            raise ValueError("not an object")
        return numbers_of(content)

    def _parse_csv(self, text: str) -> dict[str, float] | None:
        if self._header is None:
            self._delimiter = max(DELIMITERS, key=text.count)
        cells = next(csv.reader([text], delimiter=self._delimiter, skipinitialspace=True))
        named = [cell.strip() for cell in cells]
        if find_step(named) is not None or find_tokens(named) is not None or self._header is None:
            # A file continued after rotation may have no header: then the one before still holds.
            self._header = split_header(cells, str(self.path), None, [])
            return None
        if len(cells) != len(self._header):
            raise ValueError("torn line")
        record = {}
        for name, cell in zip(self._header, cells, strict=True):
            if name is None or name in LABELS:
                continue
            try:
                value = number(cell)
            except ValueError:
                continue
            if value is not None:
                record[name] = value
        return record


class EventTail:
    """Scalars appended to the event files of a directory, one record each; the interface is `TextTail`'s."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.busy = False
        self._offsets: dict[str, int] = {}
        self._damaged: set[tuple[str, int]] = set()
        self._skipped = 0
        self._rewritten = False

    def read(self) -> list[dict[str, float]]:
        """Return the scalars written since the last call, ordered by their wall time."""
        self.busy = False
        found: list[ScalarEvent] = []
        try:
            files = event_files(self.path)
        except OSError:
            return []
        self._offsets = {file.name: self._offsets.get(file.name, 0) for file in files}
        for file in files:
            name = file.name
            try:
                if file.stat().st_size < self._offsets[name]:
                    self._offsets[name] = 0
                    self._rewritten = True
                for event in events_from(file, self._offsets[name]):
                    if len(found) >= MAX_READ_EVENTS and event.offset != self._offsets[name]:
                        self.busy = True
                        break
                    self._offsets[name] = event.offset
                    if event.tag is not None:
                        found.append(event)
            except DamagedRecord:
                # Perhaps a hole that the file system fills later: try again at each call, count it once.
                where = (name, self._offsets[name])
                self._skipped += where not in self._damaged
                self._damaged.add(where)
            except OSError:
                continue
        found.sort(key=lambda event: event.wall_time)
        self.busy = self.busy or bool(found)
        return [
            {"step": float(event.step), "tag:step" if event.tag == "step" else str(event.tag): event.value}
            for event in found
        ]

    def take_rewritten(self) -> bool:
        """Tell once whether a file was written anew."""
        rewritten, self._rewritten = self._rewritten, False
        return rewritten

    def take_skipped(self) -> int:
        """Return the damaged places found since the last call."""
        skipped, self._skipped = self._skipped, 0
        return skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON values."""
        return {"kind": "events", "offsets": dict(self._offsets)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the state is damaged.
        """
        offsets = {str(name): int(offset) for name, offset in state["offsets"].items()}
        if any(offset < 0 for offset in offsets.values()):
            raise ValueError("offset")
        self._offsets = offsets
