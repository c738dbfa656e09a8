"""CSV logs: a header, then one row per log call; also the exports of W&B charts and tables."""

import csv
import itertools
from array import array
from collections.abc import Iterator
from pathlib import Path

from trajectory_guard.errors import FileFormatError
from trajectory_guard.logs.columns import find_step, find_tokens
from trajectory_guard.logs.table import LogTable, TableBuilder, number, read_lines

__all__ = ["read_csv", "split_header"]

LABELS = ("run", "split")
"""Columns kept as text: which run a row belongs to, and which split its loss was measured on."""

MAX_RAGGED = 0.1
"""Largest part of rows with a wrong number of cells that is still taken for a log with torn lines."""


def read_csv(path: Path, *, run: str | None = None) -> LogTable:
    """Read a CSV log.

    The delimiter (comma, semicolon or tab) is the one the header uses most. A header written again by a restarted run
    replaces the one before. Rows with a wrong number of cells, as a killed run leaves them, are left out and counted.
    In a W&B chart export (columns `<run> - <metric>`) the run's name is taken off, and `__MIN` and `__MAX` columns go.

    Args:
        path: file, plain or gzip.
        run: which run of a W&B chart export to take, when it holds several.

    Raises:
        FileFormatError: no header, no step or token column, too many torn rows, or not a CSV text at all.
    """
    source = str(path)
    builder = TableBuilder(source)
    lines = read_lines(path)
    first = next((line for line in lines if line.strip()), None)
    if first is None:
        raise FileFormatError(f"{source}: empty; expected a CSV header with a step column")
    delimiter = max(",\t;", key=first.count)
    ends_open = False

    def watched() -> Iterator[str]:
        nonlocal ends_open
        for line in itertools.chain([first], lines):
            ends_open = not line.endswith(("\n", "\r"))
            yield line

    header: list[str | None] = []
    axes: set[str] = set()
    columns: list[tuple[int, str, array[int], array[float]]] = []
    labels: list[tuple[int, str]] = []
    torn = 0
    last_bad: dict[str, tuple[str, str]] = {}
    try:
        reader = csv.reader(watched(), delimiter=delimiter, skipinitialspace=True)
        for cells in reader:
            if not cells or (len(cells) == 1 and not cells[0].strip()):
                continue
            if not header or not axes.isdisjoint(cells):
                header = split_header(cells, source, run, builder.notes, again=bool(header))
                named = [name for name in header if name is not None]
                axes = {name for name in (find_step(named), find_tokens(named)) if name is not None}
                labels = [(index, name) for index, name in enumerate(header) if name in LABELS]
                columns = [
                    (index, name, *builder.column(name))
                    for index, name in enumerate(header)
                    if name is not None and name not in LABELS
                ]
                continue
            if len(cells) != len(header):
                torn += 1
                continue
            if last_bad:
                builder.bad = {**last_bad, **builder.bad}
                last_bad = {}
            row = builder.n_rows
            for index, name, rows, values in columns:
                cell = cells[index]
                try:
                    value = float(cell) if "_" not in cell else number(cell)
                except ValueError:
                    try:
                        value = number(cell)
                    except ValueError:
                        if name not in builder.bad:
                            last_bad[name] = (f"line {reader.line_num}", cell)
                        continue
                if value is not None:
                    rows.append(row)
                    values.append(value)
            builder.close_row({name: cells[index].strip() for index, name in labels}, cells=len(columns))
    except csv.Error as error:
        raise FileFormatError(f"{source}: not a CSV log ({error})") from error
    if last_bad and not ends_open:
        builder.bad = {**last_bad, **builder.bad}
    elif last_bad:
        builder.notes.append("the last line is cut off; its unreadable cells are left out")
    if torn > max(2, MAX_RAGGED * builder.n_rows) or (torn and not builder.n_rows):
        raise FileFormatError(
            f"{source}: {torn} of {torn + builder.n_rows} rows do not have the {len(header)} cells of their header; "
            "is it a CSV file?"
        )
    if torn:
        builder.notes.append(f"{torn} torn rows (a wrong number of cells) left out")
    return builder.table()


def split_header(
    cells: list[str], source: str, run: str | None, notes: list[str], *, again: bool = False
) -> list[str | None]:
    """Return the column names of a header, None for each column to leave out.

    Raises:
        FileFormatError: the line holds numbers only, or the columns belong to several runs and `run` names none.
    """
    names: list[str | None] = [cell.strip() or None for cell in cells]
    if all(name is None or _is_number(name) for name in names):
        raise FileFormatError(
            f"{source}: its first line {', '.join(cells)[:60]!r} is not a header; name the columns, such as step,loss"
        )
    if again:
        notes.append("a header in the middle, as a restarted run writes it, replaces the one before")
    found = [name for name in names if name is not None]
    prefixed = [name for name in found if " - " in name]
    if prefixed and len(prefixed) >= len(found) - 1:
        runs = list(dict.fromkeys(name.rsplit(" - ", 1)[0] for name in prefixed))
        if run is None and len(runs) > 1:
            raise FileFormatError(f"{source}: holds the runs {runs[:8]}; choose one with run=")
        chosen = runs[0] if run is None else run
        if chosen not in runs:
            raise FileFormatError(f"{source}: has no run {chosen!r}; it holds {runs[:8]}")
        notes.append(f"read as a W&B chart export of run {chosen!r}")
        for index, name in enumerate(names):
            if name is not None and " - " in name:
                owner, column = name.rsplit(" - ", 1)
                names[index] = column if owner == chosen and not column.endswith(("__MIN", "__MAX")) else None
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name is not None and name in seen:
            notes.append(f"column {name!r} stands twice; the first is taken")
            names[index] = None
        elif name is not None:
            seen.add(name)
    return names


def _is_number(text: str) -> bool:
    try:
        return number(text) is not None
    except ValueError:
        return False
