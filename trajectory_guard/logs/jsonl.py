"""JSON Lines logs: one object a line, as W&B histories and most home-made loggers write them."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trajectory_guard.errors import FileFormatError
from trajectory_guard.logs.table import LogTable, TableBuilder, number, read_lines

__all__ = ["numbers_of", "parse_json", "read_jsonl"]

LABELS = ("run", "split")

MAX_DEPTH = 8
"""Deepest nesting of objects that is followed for names such as `train/optim/lr`."""


def read_jsonl(path: Path) -> LogTable:
    """Read a JSON Lines log; nested objects become names with slashes, what is no number is left out.

    A last line without its end, as a killed run leaves it, is left out; any other damaged line is an error.

    Raises:
        FileFormatError: a line is not a JSON object, or a size limit is exceeded.
    """
    source = str(path)
    builder = TableBuilder(source)
    pending: FileFormatError | None = None
    for index, line in enumerate(read_lines(path)):
        if pending is not None:
            raise pending
        if not line.strip():
            continue
        where = f"line {index + 1}"
        try:
            content = parse_json(line)
            if not isinstance(content, dict):
                raise ValueError(f"a JSON {type(content).__name__}, not an object")
        except ValueError as error:
            pending = FileFormatError(f"{source}: {where} is no log entry ({error}); expected one JSON object a line")
            if line.endswith("\n"):
                raise pending from error
            continue
        add_entry(builder, content, where)
    if pending is not None:
        if builder.n_rows == 0:
            raise pending
        builder.notes.append("the last line is cut off: left out")
    if builder.n_rows == 0:
        raise FileFormatError(f"{source}: empty; expected one JSON object a line")
    return builder.table()


def add_entry(builder: TableBuilder, content: Mapping[str, Any], where: str) -> None:
    """Append one logged object to a table."""
    labels = {name: content[name] for name in LABELS if isinstance(content.get(name), str)}
    cells: list[tuple[str, float]] = []
    for name, value in flattened(content):
        try:
            cell = _to_number(value)
        except ValueError:
            if name not in LABELS:
                builder.bad.setdefault(name, (where, str(value)[:80]))
            continue
        if cell is not None:
            cells.append((name, cell))
    builder.add(cells, labels)


def numbers_of(content: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of one logged object, nested names joined by slashes.

    Example:
        >>> numbers_of({"step": 3, "train": {"loss": 2.5, "note": "warm"}, "lr": "NaN"})
        {'step': 3.0, 'train/loss': 2.5, 'lr': nan}
    """
    found = {}
    for name, value in flattened(content):
        try:
            cell = _to_number(value)
        except ValueError:
            continue
        if cell is not None:
            found[name] = cell
    return found


def parse_json(text: str) -> Any:
    """Parse JSON from a stranger: every failure is a ValueError.

    Raises:
        ValueError: not JSON, nested too deep, or a number too long.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def flattened(content: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of an object and of the objects in it; lists are left out."""
    for key, value in content.items():
        name = prefix + key
        if isinstance(value, dict):
            if depth < MAX_DEPTH:
                yield from flattened(value, name + "/", depth + 1)
        elif not isinstance(value, list):
            yield name, value


def _to_number(value: Any) -> float | None:
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return number(value)
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
