"""read_log: any log the readers understand, as one loss curve, with the story of what was done to it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.conventions import LossUnit, Split, to_nats
from trajectory_guard.curve import LossCurve
from trajectory_guard.errors import FileFormatError, TrajectoryGuardError
from trajectory_guard.logs import stitch as st
from trajectory_guard.logs.columns import find_lr, find_metric, find_step, find_tokens
from trajectory_guard.logs.formats import read_table
from trajectory_guard.logs.table import MAX_COUNT, Column, LogTable
from trajectory_guard.plan import RunPlan

__all__ = ["LogRead", "LogRow", "read_log"]

Axis = Literal["auto", "step", "tokens"]


class LogRow(NamedTuple):
    """One logged loss: completed updates, loss in nats (it may be NaN), tokens consumed if known, other scalars."""

    step: int
    loss: float
    tokens: float | None
    channels: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class LogRead:
    """What a log says about one run.

    Args:
        curve: the finite losses.
        step: (n,) completed updates of every logged loss, non-finite ones included, strictly rising.
        loss: (n,) loss in nats, NaN or infinite where it was logged so.
        tokens: (n,) training tokens consumed.
        channels: name -> (n,) the log's other numbers at these steps, NaN where there is none.
        notes: what was done, one sentence each.
        unit: unit the log was in.
        autocorrelation: lag-1 autocorrelation of the loss around its smooth course; above 0.3 the log is smoothed.
    """

    curve: LossCurve
    step: NDArray[np.int64]
    loss: NDArray[np.float64]
    tokens: NDArray[np.float64]
    channels: Mapping[str, NDArray[np.float64]]
    notes: tuple[str, ...]
    unit: LossUnit
    autocorrelation: float | None = None

    def rows(self) -> Iterator[LogRow]:
        """Yield every logged loss in order, non-finite ones included, each with the channels it has."""
        names = list(self.channels)
        table = np.column_stack([self.channels[name] for name in names]) if names else np.zeros((len(self.step), 0))
        for index, (step, loss, tokens) in enumerate(
            zip(self.step.tolist(), self.loss.tolist(), self.tokens.tolist(), strict=True)
        ):
            values = zip(names, table[index].tolist(), strict=True)
            yield LogRow(step, loss, tokens, {name: value for name, value in values if value == value})


def read_log(
    path: str | Path | Sequence[str | Path],
    *,
    plan: RunPlan | None = None,
    metric: str = "loss",
    split: Split | None = None,
    unit: LossUnit | Literal["auto"] = "auto",
    axis: Axis = "auto",
    run: str | None = None,
    step_offset: int | None = None,
) -> LogRead:
    """Read the log of one run: CSV, JSONL, W&B CSV export, TensorBoard events, or a Trainer's `trainer_state.json`.

    Restarted and forked runs are stitched (`stitch.stitch`), units converted, steps counted from 1, and every such act
    is told in `notes`.

    Args:
        path: a file (plain or gzip), a folder of event files or checkpoints; several are read as attempts of one run,
            the latest last.
        plan: gives tokens where the log has none, tokens per point, the vocabulary for the unit check, and the split.
        metric: name of the loss; `"loss"` also finds the usual names (`train/loss`, `val_loss`, ...).
        split: `"train"` or `"validation"`; by default the plan's, else `"train"`.
        unit: unit of the logged loss; `"auto"` means nats, unless the first loss shows bits or perplexity against the
            plan's vocabulary size.
        axis: `"step"` or `"tokens"` names what the log counts; `"auto"` takes steps where it has them.
        run: which run to take from a log of several.
        step_offset: added to each logged step; by default found out (`stitch.numbering_offset`).

    Raises:
        FileFormatError: not a log that can be read, or not without the plan, run or metric that the message names.
        TrajectoryGuardError: an argument is not one of its choices.
        MissingExtraError: an event folder, and tensorboard is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "log.csv"
        >>> _ = path.write_text("step,tokens,lr,loss\\n1,8,0.1,3.5\\n2,16,0.1,3.25\\n3,24,0.1,3.0\\n2,16,0.1,3.0\\n")
        >>> log = read_log(path)
        >>> log.curve.step.tolist(), log.curve.loss.tolist()
        ([1, 2], [3.5, 3.0])
        >>> log.notes[-1]
        'restarted at step 2 after step 3; 2 superseded rows dropped'
    """
    split = (plan.split if plan is not None else "train") if split is None else split
    for name, value, allowed in (
        ("split", split, get_args(Split)),
        ("unit", unit, ("auto", *get_args(LossUnit))),
        ("axis", axis, get_args(Axis)),
    ):
        if value not in allowed:
            raise TrajectoryGuardError(f"{name} must be one of {allowed}, got {value!r}")
    paths = [Path(path)] if isinstance(path, (str, Path)) else [Path(p) for p in path]
    if not paths:
        raise TrajectoryGuardError("read_log needs at least one path, got none")
    tables = [read_table(p, run=run) for p in paths]
    table = tables[0] if len(tables) == 1 else joined(tables)
    notes = list(dict.fromkeys(table.notes))
    table = _one_run(table, run, split)

    names = list(table.columns)
    loss_name = find_metric(names, metric, split, split_column="split" in table.labels)
    if loss_name is None:
        raise FileFormatError(
            f"{table.source}: no {split} {metric!r} among its columns {names[:20]}; name one as metric="
        )
    if loss_name != metric:
        notes.append(f"{split} {metric} read from column {loss_name!r}")
    axis_name, counts_tokens = _axis(table, names, axis, loss_name)
    for name in (axis_name, loss_name):
        if name in table.bad:
            where, text = table.bad[name]
            raise FileFormatError(f"{table.source}: {where}: {name} is {text[:40]!r}, expected a number")

    # One row per logged loss, in the order written.
    x_rows, x_values = table.columns[axis_name]
    losses = table.columns[loss_name]
    rows, at, of = np.intersect1d(losses.rows, x_rows, assume_unique=True, return_indices=True)
    if rows.size == 0:
        raise FileFormatError(f"{table.source}: no row has both {axis_name!r} and {loss_name!r}")
    x, loss = x_values[of], losses.values[at]
    if np.any(~np.isfinite(x) | (x < 0) | (x > MAX_COUNT)):
        bad = x[~np.isfinite(x) | (x < 0) | (x > MAX_COUNT)][0]
        raise FileFormatError(f"{table.source}: {axis_name} holds {bad}, expected counts from 0 to 2^53")
    tokens_name = axis_name if counts_tokens else find_tokens(names)
    tokens = None if tokens_name is None else dense(table.columns[tokens_name], rows)
    if counts_tokens:
        step = _steps_of_tokens(x, plan, table.source, notes)
    else:
        step = np.round(x)
        if np.any(step != x):
            raise FileFormatError(f"{table.source}: {axis_name} holds {x[step != x][0]}, expected whole steps")
    purges = tuple((int(np.searchsorted(rows, row)), s) for row, s in table.purges)
    parts = st.stitch(step, purges)
    notes += _stitch_notes(parts)
    kept = parts.rows
    step, loss = step[kept].astype(np.int64), loss[kept]
    tokens = None if tokens is None else tokens[kept]
    channels = _channels(table, x_rows, x_values, rows, parts, {axis_name, loss_name, tokens_name})

    if not counts_tokens:
        at_zero = float(tokens[0]) if tokens is not None and step[0] == 0 and np.isfinite(tokens[0]) else None
        offset = st.numbering_offset(step, split=split, tokens_at_zero=at_zero) if step_offset is None else step_offset
        if offset:
            notes.append(f"steps counted from {1 - offset} in the log: {offset} added to each")
            step = step + offset
            if step[0] < 0:
                raise FileFormatError(f"{table.source}: step_offset {offset} makes step {step[0]} of the first one")
    loss, unit_found = _in_nats(loss, step, unit, plan, split, notes)
    tokens = _tokens(step, tokens, plan, table.source, notes)
    return _finish(table, step, loss, tokens, channels, plan, split, unit_found, notes)


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


def _one_run(table: LogTable, run: str | None, split: Split) -> LogTable:
    """Keep the rows of one run and one split where the log tells them apart."""
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


def _axis(table: LogTable, names: list[str], axis: Axis, loss_name: str) -> tuple[str, bool]:
    """Return the column of the horizontal axis and whether it counts tokens."""
    step_name, tokens_name = find_step(names), find_tokens(names)
    if axis == "tokens":
        # A logger whose step is a token count has no other axis.
        name = tokens_name or step_name
    else:
        name = step_name or (tokens_name if axis == "auto" else None)
    if name is None or name == loss_name:
        raise FileFormatError(f"{table.source}: no column counts steps or tokens; its columns are {names[:20]}")
    return name, name == tokens_name or axis == "tokens"


def _steps_of_tokens(
    tokens: NDArray[np.float64], plan: RunPlan | None, source: str, notes: list[str]
) -> NDArray[np.float64]:
    if plan is None:
        raise FileFormatError(f"{source}: counts tokens and no steps; pass a plan, which says how many a step takes")
    notes.append("steps derived from tokens through the plan's batch schedule")
    return np.round(st.steps_at_tokens(tokens, plan))


def _stitch_notes(parts: st.Stitched) -> list[str]:
    notes = []
    if parts.resorted:
        notes.append("rows were not in the order of their steps: sorted")
    if parts.restarts:
        before, after = parts.restarts[-1]
        once = "restarted" if len(parts.restarts) == 1 else f"restarted {len(parts.restarts)} times, last"
        notes.append(f"{once} at step {after:.0f} after step {before:.0f}; {parts.superseded} superseded rows dropped")
    elif parts.superseded:
        notes.append(f"{parts.superseded} rows dropped that the logger declared void on a resume")
    if parts.duplicates:
        notes.append(f"{parts.duplicates} duplicate rows of a step dropped, the last kept")
    return notes


def _channels(
    table: LogTable,
    x_rows: NDArray[np.int64],
    x_values: NDArray[np.float64],
    rows: NDArray[np.int64],
    parts: st.Stitched,
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


def _in_nats(
    loss: NDArray[np.float64],
    step: NDArray[np.int64],
    unit: LossUnit | Literal["auto"],
    plan: RunPlan | None,
    split: Split,
    notes: list[str],
) -> tuple[NDArray[np.float64], LossUnit]:
    """Convert to nats, and compare the first loss with ln V where the log begins at the beginning."""
    vocab = None if plan is None else plan.recipe.vocab_size
    seen = None
    # An untrained model's loss lies at ln V for the first few updates only.
    if vocab is not None and step[0] <= (1 if split == "train" else 0):
        seen = st.first_loss_unit(float(loss[0]), vocab)
    chosen: LossUnit = (seen or "nats") if unit == "auto" else unit
    if unit == "auto" and chosen != "nats":
        notes.append(
            f"the first loss, {loss[0]:.4g}, is {chosen} for a vocabulary of {vocab} (ln V = {np.log(vocab):.4g}), "
            f"though nothing says so: read as {chosen} and converted to nats"
        )
    elif unit != "auto" and seen is not None and seen != unit:
        notes.append(
            f"the first loss, {loss[0]:.4g}, looks like {seen} for a vocabulary of {vocab} "
            f"(ln V = {np.log(vocab):.4g}), but unit={unit!r} was given: check it"
        )
    elif chosen != "nats":
        notes.append(f"converted from {chosen} to nats")
    return to_nats(loss, chosen), chosen


def _tokens(
    step: NDArray[np.int64],
    tokens: NDArray[np.float64] | None,
    plan: RunPlan | None,
    source: str,
    notes: list[str],
) -> NDArray[np.float64]:
    """Return the log's own tokens where they are usable, else the plan's."""
    problem = None
    if tokens is None:
        problem = "tokens are not logged"
    elif not np.all(np.isfinite(tokens)):
        problem = "tokens are not logged at every step"
    elif np.any(tokens < 0) or np.any(tokens > MAX_COUNT) or np.any(np.diff(tokens) <= 0):
        problem = "the logged tokens do not rise with the step"
    if problem is None and tokens is not None:
        if plan is not None:
            planned = plan.tokens(step)
            off = np.abs(tokens - planned) / np.maximum(planned, plan.batch_phases[0][1])
            # A counter read one step early or late is no disagreement about the batch size.
            late = np.abs(tokens - planned) > 1.01 * (planned - plan.tokens(step - 1))
            if np.any(late & (off > 0.01)):
                worst = int(np.argmax(np.where(late, off, 0)))
                notes.append(
                    f"logged tokens differ from the plan's, most at step {step[worst]}: {tokens[worst]:.6g} against "
                    f"{planned[worst]:.6g}; the logged ones are kept"
                )
        return tokens
    if plan is None:
        raise FileFormatError(f"{source}: {problem}; pass a plan, which says how many tokens a step takes")
    notes.append(f"{problem}: taken from the plan")
    return plan.tokens(step)


def _finish(
    table: LogTable,
    step: NDArray[np.int64],
    loss: NDArray[np.float64],
    tokens: NDArray[np.float64],
    channels: dict[str, NDArray[np.float64]],
    plan: RunPlan | None,
    split: Split,
    unit: LossUnit,
    notes: list[str],
) -> LogRead:
    """Drop what no curve can hold, check what is left, and say so."""
    usable = np.isfinite(loss) & (loss > 0)
    if not usable.any():
        raise FileFormatError(f"{table.source}: none of its {loss.size} losses is a finite positive number")
    if not usable.all():
        first = int(np.flatnonzero(~usable)[0])
        notes.append(
            f"{int(np.sum(~usable))} losses that are not finite and positive left out of the curve, "
            f"first {loss[first]} at step {step[first]}"
        )
    gap = st.largest_gap(step[usable])
    if gap is not None:
        notes.append(f"no loss between step {gap[0]} and {gap[1]}")
    autocorrelation = st.residual_autocorrelation(loss[usable]) if split == "train" else None
    smoothed = autocorrelation is not None and autocorrelation > st.SMOOTHED_AUTOCORRELATION
    if smoothed:
        notes.append(
            f"the loss looks smoothed before it was logged (or its data unshuffled): neighbours correlate by "
            f"{autocorrelation:.2f}; its scatter understates the noise, log the raw loss where you can"
        )
    per_point = None
    if plan is not None and split == "train" and not smoothed and np.all(step[usable] >= 1):
        per_point = st.tokens_per_point(step[usable], plan, window_mean=table.window_mean)
    lr_name = find_lr(channels)
    lr = None
    if lr_name is not None:
        known = np.isfinite(channels[lr_name])
        if known[usable].all():
            lr = channels[lr_name][usable]
        elif known.sum() >= 2:
            notes.append(f"learning rate logged at {known.sum()} of {known.size} points: interpolated between them")
            lr = np.interp(step[usable], step[known], channels[lr_name][known])
    curve = LossCurve(step=step[usable], tokens=tokens[usable], loss=loss[usable], lr=lr, tokens_per_point=per_point)
    return LogRead(
        curve=curve,
        step=step,
        loss=loss,
        tokens=tokens,
        channels=channels,
        notes=tuple(notes),
        unit=unit,
        autocorrelation=autocorrelation,
    )
