"""Choosing from a table: one run, one split, the axis, and the other columns at the losses that count."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.conventions import Split
from trajectory_guard.errors import FileFormatError
from trajectory_guard.logs.columns import find_step, find_tokens
from trajectory_guard.logs.stitch import Stitched
from trajectory_guard.logs.table import Column, LogTable

__all__ = ["axis_column", "channels_at", "dense", "joined", "one_run"]


def joined(tables: Sequence[LogTable]) -> LogTable:
    """Append the tables of several attempts, in order."""
    columns: dict[str, tuple[list[NDArray[np.int64]], list[NDArray[np.float64]]]] = {}
    labels: dict[str, list[str]] = {}
    purges: list[tuple[int, float]] = []
    start = 0
    for table in tables:
        for name, (rows, values) in table.columns.items():
            into = columns.setdefault(name, ([], []))
            into[0].append(rows + start)
            into[1].append(values)
        for name, text in table.labels.items():
            known = labels.setdefault(name, [])
            known += [""] * (start - len(known)) + text
        purges += [(row + start, step) for row, step in table.purges]
        start += table.n_rows
    return LogTable(
        source=" + ".join(table.source for table in tables),
        n_rows=start,
        columns={name: Column(np.concatenate(r), np.concatenate(v)) for name, (r, v) in columns.items()},
        labels={name: text + [""] * (start - len(text)) for name, text in labels.items()},
        bad={name: bad for table in tables for name, bad in table.bad.items()},
        purges=tuple(purges),
        notes=tuple(note for table in tables for note in table.notes),
        window_mean=any(table.window_mean for table in tables),
    )


def dense(column: Column, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the values of a column at some rows, NaN where it has none."""
    at = np.searchsorted(column.rows, rows)
    at = np.minimum(at, max(0, column.rows.size - 1))
    return np.where(column.rows[at] == rows, column.values[at], np.nan)


def one_run(table: LogTable, run: str | None, split: Split) -> LogTable:
    """Keep the rows of one run and one split where the log tells them apart.

    Raises:
        FileFormatError: it holds several runs and none is chosen, or not the run or split asked for.
    """
    mask = np.ones(table.n_rows, dtype=bool)
    if "run" in table.labels:
        labels = np.asarray(table.labels["run"])
        runs = list(dict.fromkeys(labels.tolist()))
        if run is None and len(runs) > 1:
            raise FileFormatError(f"{table.source}: holds {len(runs)} runs, such as {runs[:5]}; choose one with run=")
        if run is not None and run not in runs:
            raise FileFormatError(f"{table.source}: has no run {run!r}; it holds {runs[:5]} ({len(runs)} in all)")
        mask &= labels == (runs[0] if run is None else run)
    if "split" in table.labels:
        starts = ("train",) if split == "train" else ("val", "eval", "dev")
        mask &= np.array([text.lower().startswith(starts) for text in table.labels["split"]], dtype=bool)
        if not mask.any():
            raise FileFormatError(f"{table.source}: no row of split {split!r} in its column `split`")
    if mask.all():
        return table
    columns = {}
    for name, (rows, values) in table.columns.items():
        if np.any(mask[rows]):
            columns[name] = Column(rows[mask[rows]], values[mask[rows]])
    return LogTable(
        source=table.source,
        n_rows=table.n_rows,
        columns=columns,
        labels=table.labels,
        bad=table.bad,
        purges=table.purges,
        window_mean=table.window_mean,
    )


def axis_column(table: LogTable, names: list[str], axis: str, loss_name: str) -> tuple[str, bool]:
    """Return the column of the horizontal axis and whether it counts tokens.

    Raises:
        FileFormatError: the log has none.
    """
    step_name, tokens_name = find_step(names), find_tokens(names)
    steps_first = step_name or (tokens_name if axis == "auto" else None)
    # A logger whose step is a token count has no other axis.
    name = (tokens_name or step_name) if axis == "tokens" else steps_first
    if name is None or name == loss_name:
        raise FileFormatError(f"{table.source}: no column counts steps or tokens; its columns are {names[:20]}")
    return name, name == tokens_name or axis == "tokens"


def channels_at(
    table: LogTable,
    x_rows: NDArray[np.int64],
    x_values: NDArray[np.float64],
    rows: NDArray[np.int64],
    parts: Stitched,
    taken: set[str | None],
) -> dict[str, NDArray[np.float64]]:
    """Return the other columns at the kept losses, also where they were logged in other rows of the same step."""
    x_at_loss = x_values[np.searchsorted(x_rows, rows)]
    kept_x, kept_attempt = x_at_loss[parts.rows], parts.attempt[parts.rows]
    starts = rows[np.flatnonzero(np.diff(parts.attempt)) + 1]
    channels = {}
    for name, column in table.columns.items():
        if name in taken:
            continue
        at = np.searchsorted(x_rows, column.rows)
        has_x = x_rows[np.minimum(at, x_rows.size - 1)] == column.rows
        x, values = x_values[at[has_x]], column.values[has_x]
        attempt = np.searchsorted(starts, column.rows[has_x], side="right")
        index = np.minimum(np.searchsorted(kept_x, x), kept_x.size - 1)
        same = (kept_x[index] == x) & (kept_attempt[index] == attempt)
        filled = np.full(kept_x.size, np.nan)
        filled[index[same]] = values[same]
        if np.any(np.isfinite(filled)):
            channels[name] = filled
    return channels
