"""TensorBoard event directories: their scalars, as torch, TensorFlow and JAX loggers write them."""

import math
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from trajectory_guard.errors import FileFormatError, MissingExtraError
from trajectory_guard.logs.records import DamagedRecord, records
from trajectory_guard.logs.table import MAX_LOG_BYTES, LogTable, TableBuilder

__all__ = ["ScalarEvent", "event_files", "events_from", "read_tensorboard"]


class ScalarEvent(NamedTuple):
    """One scalar of an event file, or (tag None) a restart mark: earlier events of this step and later are void."""

    wall_time: float
    step: int
    tag: str | None
    value: float
    offset: int


def read_tensorboard(path: Path) -> LogTable:
    """Read every scalar of an event directory, the files in the order of their names, which is that of their times.

    A `purge_step` of a resumed writer voids what was logged from that step on. A file whose writer was killed counts up
    to its last whole event; one damaged in the middle counts up to there and is named.

    Args:
        path: a directory that holds event files, or one event file.

    Raises:
        FileFormatError: no event files, none with a scalar, or too large.
        MissingExtraError: tensorboard is not installed.
    """
    source = str(path)
    files = event_files(path) if path.is_dir() else [path]
    if not files:
        raise FileFormatError(f"{source}: holds no TensorBoard event files (events.out.tfevents.*)")
    builder = TableBuilder(source)
    size = sum(file.stat().st_size for file in files)
    if size > MAX_LOG_BYTES:
        raise FileFormatError(f"{source}: {size} bytes of events, more than the limit of {MAX_LOG_BYTES}")
    for file in files:
        last: tuple[int, float] | None = None
        cells: list[tuple[str, float]] = []
        try:
            for event in events_from(file):
                if event.tag is None:
                    builder.purges.append((builder.n_rows + bool(cells), float(event.step)))
                    continue
                if cells and (last != (event.step, event.wall_time) or any(tag == event.tag for tag, _ in cells)):
                    builder.add([("step", float(last[0] if last else 0)), *cells])
                    cells = []
                last = (event.step, event.wall_time)
                cells.append(("tag:step" if event.tag == "step" else event.tag, event.value))
        except DamagedRecord as error:
            if builder.n_rows == 0 and not cells:
                raise FileFormatError(str(error)) from error
            builder.notes.append(f"{error}; read up to there")
        except OSError as error:
            raise FileFormatError(f"{file}: cannot be read: {error.strerror or error}") from error
        if cells and last is not None:
            builder.add([("step", float(last[0])), *cells])
    if builder.n_rows == 0:
        raise FileFormatError(f"{source}: its event files hold no scalars")
    return builder.table()


def event_files(folder: Path) -> list[Path]:
    """Return the event files that stand in a folder, oldest first (their names begin with their time)."""
    return sorted(file for file in folder.iterdir() if ".tfevents." in file.name and file.is_file())


def events_from(path: Path, offset: int = 0) -> Iterator[ScalarEvent]:
    """Yield the scalars of one event file from a byte offset on.

    Raises:
        DamagedRecord: the file is no event file from some byte on.
        MissingExtraError: tensorboard is not installed.
    """
    event_type, error_type = _event_class()
    for data, after in records(path, offset):
        event = event_type()
        try:
            event.ParseFromString(data)
        except error_type as error:
            raise DamagedRecord(path, offset) from error
        offset = after
        if event.HasField("session_log") and event.session_log.status == 1 and event.step > 0:  # START
            yield ScalarEvent(event.wall_time, event.step, None, math.nan, after)
        for value in event.summary.value if event.HasField("summary") else ():
            scalar = _scalar(value)
            if scalar is not None and value.tag:
                yield ScalarEvent(event.wall_time, event.step, value.tag, scalar, after)


def _scalar(value: Any) -> float | None:
    """Return the number of a summary value: a `simple_value`, or a tensor of one float32 or float64."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or any(dim.size != 1 for dim in value.tensor.tensor_shape.dim):
        return None
    tensor = value.tensor
    layout, field = {1: ("<f", tensor.float_val), 2: ("<d", tensor.double_val)}.get(tensor.dtype, (None, ()))
    if layout is None:
        return None
    if len(field) == 1:
        return float(field[0])
    if len(tensor.tensor_content) == struct.calcsize(layout):
        return float(struct.unpack(layout, tensor.tensor_content)[0])
    return None


def _event_class() -> tuple[Any, type[Exception]]:
    try:
        # The class is generated at import, out of sight of type checkers.
        event = import_module("tensorboard.compat.proto.event_pb2").Event
        error = import_module("google.protobuf.message").DecodeError
    except ImportError as missing:
        raise MissingExtraError("tensorboard", "torch") from missing
    return event, error
