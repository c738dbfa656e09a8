"""LogTable: the numbers of a log in the order they were written, before anything is decided about them."""

import gzip
import zlib
from array import array
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.errors import FileFormatError

__all__ = ["Column", "LogTable", "TableBuilder", "number", "read_lines"]

MAX_LOG_BYTES = 2 * 2**30
"""Largest log read, after decompression: ten columns of 1e7 steps."""

MAX_LINE_BYTES = 2**20
"""Longest line read: a step with 20,000 channels."""

MAX_COLUMNS = 20_000
"""Most columns kept from one log: per-layer statistics of a large model."""

MAX_CELLS = 10**8
"""Most numbers kept from one log: 1.6 GB in memory."""

MAX_COUNT = 2.0**53
"""Largest step or token count: float64 holds every integer up to it."""

MISSING = frozenset({"", "none", "null", "n/a", "na", "-"})
"""Texts that say that a cell holds nothing. `nan` is not among them: it is a value, and a bad sign."""


class Column(NamedTuple):
    """The cells of one column that hold something: `rows` are row numbers of the table, rising."""

    rows: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class LogTable:
    """What one reader found.

    Args:
        source: path, for messages.
        n_rows: rows in the order they were written.
        columns: numbers by column name; a cell that holds nothing is left out.
        labels: text of the columns `run` and `split` where the log has them, one per row.
        bad: column name -> (where, text) of the first cell that is neither a number nor empty.
        purges: (row, step): a logger said at this row that earlier rows of this step and later ones do not count.
        notes: what the reader did, in words.
        window_mean: each loss is the mean since the one before it, not that of its own step.
    """

    source: str
    n_rows: int
    columns: Mapping[str, Column]
    labels: Mapping[str, list[str]] = field(default_factory=dict)
    bad: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    purges: tuple[tuple[int, float], ...] = ()
    notes: tuple[str, ...] = ()
    window_mean: bool = False


class TableBuilder:
    """Collects the rows of a log, within the limits on its size."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.n_rows = 0
        self.bad: dict[str, tuple[str, str]] = {}
        self.notes: list[str] = []
        self.purges: list[tuple[int, float]] = []
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._labels: dict[str, list[str]] = {}
        self._cells = 0

    def column(self, name: str) -> "tuple[array[int], array[float]]":
        """Return the row numbers and values collected for a column, to append to."""
        column = self._columns.get(name)
        if column is None:
            if len(self._columns) >= MAX_COLUMNS:
                raise FileFormatError(f"{self.source}: more than {MAX_COLUMNS} columns; export only those needed")
            column = self._columns[name] = (array("q"), array("d"))
        return column

    def add(self, cells: Iterable[tuple[str, float]], labels: Mapping[str, str] | None = None) -> None:
        """Append one row of (column name, value) pairs."""
        for name, value in cells:
            rows, values = self.column(name)
            rows.append(self.n_rows)
            values.append(value)
            self._cells += 1
        self.close_row(labels)

    def close_row(self, labels: Mapping[str, str] | None = None, *, cells: int = 0) -> None:
        """End a row of which `cells` numbers were appended to their columns directly."""
        self._cells += cells
        if self._cells > MAX_CELLS:
            raise FileFormatError(f"{self.source}: more than {MAX_CELLS} numbers; export only the columns needed")
        for name, text in (labels or {}).items():
            known = self._labels.setdefault(name, [])
            known.extend([""] * (self.n_rows - len(known)))
            known.append(text)
        self.n_rows += 1

    def table(self, *, window_mean: bool = False) -> LogTable:
        """Return what was collected."""
        return LogTable(
            source=self.source,
            n_rows=self.n_rows,
            columns={
                name: Column(np.frombuffer(rows, dtype=np.int64), np.frombuffer(values, dtype=np.float64))
                for name, (rows, values) in self._columns.items()
                if rows
            },
            labels={name: text + [""] * (self.n_rows - len(text)) for name, text in self._labels.items()},
            bad=dict(self.bad),
            purges=tuple(self.purges),
            notes=tuple(self.notes),
            window_mean=window_mean,
        )


def number(text: str) -> float | None:
    """Return the number a cell holds, or None for an empty one.

    Raises:
        ValueError: it is neither.

    Example:
        >>> number("1e-3"), number(" n/a "), number("NaN")
        (0.001, None, nan)
    """
    try:
        value = float(text)
    except ValueError:
        stripped = text.strip().lower()
        if stripped in MISSING:
            return None
        raise
    if "_" in text:  # float() takes 1_000; a log that writes it means something else.
        raise ValueError(text)
    return value


def read_lines(path: Path) -> Generator[str, None, None]:
    """Yield the lines of a UTF-8 text file, plain or gzip, with their line ends.

    Raises:
        FileFormatError: the file is missing, is no UTF-8 text, is a damaged gzip, or exceeds a size limit.
    """
    try:
        with open(path, "rb") as plain:
            packed = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            if packed:
                with gzip.open(plain, "rb") as file:
                    yield from _decoded(file, path)
            else:
                yield from _decoded(plain, path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileFormatError(f"{path}: damaged or cut-off gzip ({error}); copy the file again") from error
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: no such log") from error
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read as a log: {error.strerror or error}") from error


def _decoded(file: IO[bytes] | gzip.GzipFile, path: Path) -> Iterator[str]:
    total = 0
    for index in range(MAX_LOG_BYTES):
        line = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        total += len(line)
        if len(line) > MAX_LINE_BYTES:
            raise FileFormatError(
                f"{path}: line {index + 1} is longer than {MAX_LINE_BYTES} bytes; is it a log of one row a line?"
            )
        if total > MAX_LOG_BYTES:
            raise FileFormatError(f"{path}: more than {MAX_LOG_BYTES} bytes of text; export only the columns needed")
        try:
            yield line.decode("utf-8-sig" if index == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise FileFormatError(f"{path}: line {index + 1} is not UTF-8 text ({error.reason})") from error
