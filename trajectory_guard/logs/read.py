"""read_log: any log the readers understand, as one loss curve, with the story of what was done to it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.conventions import LossUnit, Split
from trajectory_guard.curve import LossCurve
from trajectory_guard.errors import FileFormatError, TrajectoryGuardError
from trajectory_guard.logs import stitch as st
from trajectory_guard.logs.columns import find_lr, find_metric, find_tokens
from trajectory_guard.logs.formats import read_table
from trajectory_guard.logs.interpret import in_nats, steps_of_tokens, stitch_notes, tokens_of
from trajectory_guard.logs.select import axis_column, channels_at, dense, joined, one_run
from trajectory_guard.logs.table import MAX_COUNT, LogTable
from trajectory_guard.plan import RunPlan

__all__ = ["LogRead", "LogRow", "read_log"]

Axis = Literal["auto", "step", "tokens"]

ROWS = 4096
"""Rows turned into Python numbers at a time."""


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
        column: name of the loss in the log.
        autocorrelation: lag-1 autocorrelation of the loss around its smooth course; above 0.3 the log is smoothed.
    """

    curve: LossCurve
    step: NDArray[np.int64]
    loss: NDArray[np.float64]
    tokens: NDArray[np.float64]
    channels: Mapping[str, NDArray[np.float64]]
    notes: tuple[str, ...]
    unit: LossUnit
    column: str
    autocorrelation: float | None = None

    def rows(self, *, with_channels: bool = True) -> Iterator[LogRow]:
        """Yield every logged loss in order, non-finite ones included, each with its channels if they are wanted."""
        names = list(self.channels) if with_channels else []
        for start in range(0, len(self.step), ROWS):
            block = slice(start, start + ROWS)
            columns = [self.channels[name][block].tolist() for name in names]
            for index, (step, loss, tokens) in enumerate(
                zip(self.step[block].tolist(), self.loss[block].tolist(), self.tokens[block].tolist(), strict=True)
            ):
                values = zip(names, [column[index] for column in columns], strict=True) if names else ()
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
    table = one_run(table, run, split)

    names = list(table.columns)
    loss_name = find_metric(names, metric, split, split_column="split" in table.labels)
    if loss_name is None:
        raise FileFormatError(
            f"{table.source}: no {split} {metric!r} among its columns {names[:20]}; name one as metric="
        )
    if loss_name != metric:
        notes.append(f"{split} {metric} read from column {loss_name!r}")
    axis_name, counts_tokens = axis_column(table, names, axis, loss_name)
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
        step = steps_of_tokens(x, plan, table.source, notes)
    else:
        step = np.round(x)
        if np.any(step != x):
            raise FileFormatError(f"{table.source}: {axis_name} holds {x[step != x][0]}, expected whole steps")
    purges = tuple((int(np.searchsorted(rows, row)), s) for row, s in table.purges)
    parts = st.stitch(step, purges)
    notes += stitch_notes(parts)
    kept = parts.rows
    step, loss = step[kept].astype(np.int64), loss[kept]
    tokens = None if tokens is None else tokens[kept]
    channels = channels_at(table, x_rows, x_values, rows, parts, {axis_name, loss_name, tokens_name})

    if not counts_tokens:
        at_zero = float(tokens[0]) if tokens is not None and step[0] == 0 and np.isfinite(tokens[0]) else None
        offset = st.numbering_offset(step, split=split, tokens_at_zero=at_zero) if step_offset is None else step_offset
        if offset:
            notes.append(f"steps counted from {1 - offset} in the log: {offset} added to each")
            step = step + offset
            if step[0] < 0:
                raise FileFormatError(f"{table.source}: step_offset {offset} makes step {step[0]} of the first one")
    loss, unit_found = in_nats(loss, step, unit, plan, split, notes)
    tokens = tokens_of(step, tokens, plan, table.source, notes)
    return _finish(table, step, loss, tokens, channels, plan, split, unit_found, loss_name, notes)


def _finish(
    table: LogTable,
    step: NDArray[np.int64],
    loss: NDArray[np.float64],
    tokens: NDArray[np.float64],
    channels: dict[str, NDArray[np.float64]],
    plan: RunPlan | None,
    split: Split,
    unit: LossUnit,
    column: str,
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
        column=column,
        autocorrelation=autocorrelation,
    )
