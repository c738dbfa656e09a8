"""LogFollower: the new losses of a log that is still being written, across rotation, truncation and restarts."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trajectory_guard.conventions import LossUnit, Split, to_nats
from trajectory_guard.errors import FileFormatError, TrajectoryGuardError
from trajectory_guard.logs.columns import find_metric, find_step, find_tokens
from trajectory_guard.logs.read import LogRow
from trajectory_guard.logs.stitch import steps_at_tokens
from trajectory_guard.logs.table import MAX_COUNT
from trajectory_guard.logs.tail import EventTail, TextTail
from trajectory_guard.logs.tensorboard import event_files
from trajectory_guard.plan import RunPlan

__all__ = ["LogFollower"]

VERSION = 1

REMEMBERED = 64
"""Rows remembered to recognise a file that was written anew with the rows already seen."""


class LogFollower:
    """Follows a growing CSV or JSONL file or TensorBoard directory and hands out each logged loss once.

    `poll()` returns what was written since the last call. Handled without losing or repeating a row: a last line or
    event still being written; a file rotated away (its rest is read where it went to in the same folder); a file
    truncated or replaced by a new run; a file written anew with a longer header and the same rows; a log that does not
    exist yet; and the end of the follower itself, through `state_dict()`. Lines that are no rows are counted in
    `skipped`, never raised: a monitor outlives a torn line. A restarted run's steps come again, as they were written.

    Several log calls for one step (a loss, then a learning rate) make one row, so a row is handed out when the next
    step begins, or at the first poll that finds nothing new.

    Args:
        path: the file or directory; it may appear later. Gzip files do not grow and are refused.
        metric: name of the loss, as for `read_log`.
        split: `"train"` or `"validation"`.
        unit: unit of the logged loss.
        step_offset: added to each logged step; None adds 1 when the first training step seen is 0.
        plan: gives the steps of a log that counts only tokens.

    Raises:
        FileFormatError: a gzip file, or no line end in a megabyte.
        MissingExtraError: an event directory, and tensorboard is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "log.csv"
        >>> follower = LogFollower(path)
        >>> follower.poll()
        []
        >>> _ = path.write_text("step,loss\\n1,3.5\\n2,3.2")
        >>> follower.poll(), follower.poll()
        ([], [LogRow(step=1, loss=3.5, tokens=None, channels={})])
    """

    def __init__(
        self,
        path: str | Path,
        *,
        metric: str = "loss",
        split: Split = "train",
        unit: LossUnit = "nats",
        step_offset: int | None = None,
        plan: RunPlan | None = None,
    ) -> None:
        to_nats(1.0, unit)  # Refuses an unknown unit now, not at the first loss.
        self.path = Path(path)
        self.metric = metric
        self.split: Split = split
        self.unit: LossUnit = unit
        self.skipped = 0
        self.plan = plan
        self._offset = step_offset
        self._held: dict[str, float] | None = None
        self._recent: list[tuple[int, float]] = []
        self._tail: TextTail | EventTail | None = None
        self._restored: Mapping[str, Any] | None = None

    def poll(self) -> list[LogRow]:
        """Return the rows completed since the last call, in the order written; about 16 MiB of log at most."""
        tail = self._open()
        if tail is None:
            return []
        rows: list[LogRow] = []
        records = tail.read()
        if tail.take_rewritten():
            # What was handed out before may stand anywhere in the new file.
            while tail.busy and (more := tail.read()):
                records += more
            again = self._handed_out(records)
            if again:
                self._held, records = None, records[again:]
            else:
                self._release(rows)
        self.skipped += tail.take_skipped()
        for record in records:
            self._take(record, rows)
        if not records and not tail.busy:
            self._release(rows)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON values: what `load_state_dict` of a new follower continues from."""
        return {
            "version": VERSION,
            "offset": self._offset,
            "held": None if self._held is None else {name: _out(value) for name, value in self._held.items()},
            "recent": [[step, _out(loss)] for step, loss in self._recent],
            "skipped": self.skipped,
            "tail": self._restored if self._tail is None else self._tail.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the follower that wrote `state` stood.

        Raises:
            TrajectoryGuardError: the state is of a newer version or damaged.
        """
        if not isinstance(state, Mapping):
            raise TrajectoryGuardError(f"follower state must be an object, got {state!r:.80}; delete it to start over")
        if state.get("version") != VERSION:
            raise TrajectoryGuardError(
                f"follower state has version {state.get('version')!r}, expected {VERSION}; delete it to start over"
            )
        try:
            offset, held, tail = state["offset"], state["held"], state["tail"]
            self._offset = None if offset is None else int(offset)
            self._held = None if held is None else {str(name): _in(value) for name, value in held.items()}
            if self._held is not None and not _placed(self._held):
                raise ValueError("held")
            self._recent = [(int(step), _in(loss)) for step, loss in state["recent"]][-REMEMBERED:]
            self.skipped = int(state["skipped"])
            if tail is not None:
                tail = dict(tail)
                (EventTail if tail["kind"] == "events" else TextTail)(self.path).load_state_dict(tail)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise TrajectoryGuardError(f"follower state is damaged ({error!r}); delete it to start over") from error
        self._restored, self._tail = tail, None

    def _open(self) -> TextTail | EventTail | None:
        if self._tail is None:
            kind = None if self._restored is None else self._restored["kind"]
            if self.path.is_dir() and kind != "text":
                if kind is None and not event_files(self.path):
                    return None
                self._tail = EventTail(self.path)
            elif self.path.exists() and kind != "events":
                self._tail = TextTail(self.path)
            elif self._restored is not None and self.path.exists():
                raise FileFormatError(f"{self.path}: is no longer the {kind} log that the saved position belongs to")
            else:
                return None
            if self._restored is not None:
                self._tail.load_state_dict(self._restored)
                self._restored = None
        return self._tail

    def _handed_out(self, records: list[dict[str, float]]) -> int:
        """Count the records at the start of a file written anew that were handed out from the one before."""
        for index in range(len(records) - 1, -1, -1):
            row = self._row(records[index])
            if row is not None and any(_same(row, seen) for seen in self._recent):
                return index + 1
        return 0

    def _take(self, record: dict[str, float], rows: list[LogRow]) -> None:
        """Merge a record into the step being collected, or close that one first."""
        axis = _placed(record)
        if axis is None:
            self.skipped += 1
            return
        if self._held is not None:
            loss = find_metric(record, self.metric, self.split)
            if self._held.get(axis) != record[axis] or (loss is not None and loss in self._held):
                self._release(rows)
        if self._held is None:
            self._held = dict(record)
        else:
            self._held.update(record)

    def _release(self, rows: list[LogRow]) -> None:
        """Hand out the step collected, if it has a loss."""
        row = None if self._held is None else self._row(self._held)
        self._held = None
        if row is not None:
            rows.append(row)
            self._recent = [*self._recent[-REMEMBERED + 1 :], (row.step, row.loss)]

    def _row(self, record: dict[str, float]) -> LogRow | None:
        loss_name = find_metric(record, self.metric, self.split)
        step_name, tokens_name = find_step(record), find_tokens(record)
        if loss_name is None:
            return None
        if step_name is not None:
            logged = record[step_name]
            if self._offset is None:
                self._offset = int(logged == 0 and self.split == "train")
            step = round(logged) + self._offset
        elif self.plan is not None and tokens_name is not None:
            step = round(float(steps_at_tokens(record[tokens_name], self.plan)))
        else:
            return None
        taken = (loss_name, step_name, tokens_name)
        return LogRow(
            step=step,
            loss=float(to_nats(record[loss_name], self.unit)),
            tokens=None if tokens_name is None else record[tokens_name],
            channels={name: value for name, value in record.items() if name not in taken},
        )


def _placed(record: Mapping[str, float]) -> str | None:
    """The name under which a record says where it belongs, if what it says is possible."""
    axis = find_step(record) or find_tokens(record)
    return axis if axis is not None and 0 <= record[axis] <= MAX_COUNT else None


def _same(row: LogRow, seen: tuple[int, float]) -> bool:
    return row.step == seen[0] and (row.loss == seen[1] or (math.isnan(row.loss) and math.isnan(seen[1])))


def _out(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else repr(value)


def _in(value: float | str) -> float:
    return float(value)
