"""`trainer_state.json` of a Hugging Face Trainer: its `log_history`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trajectory_guard.errors import FileFormatError
from trajectory_guard.logs.jsonl import add_entry, parse_json
from trajectory_guard.logs.table import LogTable, TableBuilder, read_lines

__all__ = ["read_trainer_state"]


def read_trainer_state(path: Path) -> LogTable:
    """Read the log history in a `trainer_state.json`, or in the newest checkpoint of a folder of checkpoints.

    The Trainer's logged `loss` is the mean since the log before it. With its default `logging_nan_inf_filter` a step
    whose loss is NaN counts as 0: a logged loss of exactly 0 is read as NaN.

    Raises:
        FileFormatError: not such a file.
    """
    file = newest_state(path) if path.is_dir() else path
    if file is None:
        raise FileFormatError(f"{path}: no trainer_state.json in it or in its checkpoint folders")
    try:
        content = parse_json("".join(read_lines(file)))
    except FileFormatError:
        raise
    except ValueError as error:
        raise FileFormatError(f"{file}: not valid JSON, cut off or damaged ({error})") from error
    return table_of_state(content, str(file))


def table_of_state(content: Any, source: str) -> LogTable:
    """Return the table of a parsed trainer state."""
    history = content.get("log_history") if isinstance(content, dict) else None
    if not isinstance(history, list) or not history:
        raise FileFormatError(f"{source}: has no `log_history` with entries; is it a trainer_state.json?")
    builder = TableBuilder(source)
    zeros = 0
    for index, entry in enumerate(history):
        if not isinstance(entry, Mapping):
            raise FileFormatError(f"{source}: log_history[{index}] is not an object")
        if entry.get("loss") == 0.0 and not isinstance(entry["loss"], bool):
            entry = {**entry, "loss": float("nan")}
            zeros += 1
        add_entry(builder, entry, f"log_history[{index}]")
    interval = content.get("logging_steps")
    every = f" ({interval} steps)" if isinstance(interval, int) else ""
    if interval != 1:
        builder.notes.append(f"each training loss is the mean since the log before it{every}, at the last of its steps")
    if zeros:
        builder.notes.append(
            f"{zeros} losses of exactly 0 read as NaN, which the Trainer's logging_nan_inf_filter hides"
        )
    return builder.table(window_mean=interval != 1)


def newest_state(folder: Path) -> Path | None:
    """Return the folder's own `trainer_state.json`, else that of its checkpoint with the highest step."""
    if (folder / "trainer_state.json").is_file():
        return folder / "trainer_state.json"
    numbered = []
    for state in folder.glob("checkpoint-*/trainer_state.json"):
        digits = state.parent.name.removeprefix("checkpoint-")
        if digits.isascii() and digits.isdigit():
            numbered.append((int(digits), state))
    return max(numbered)[1] if numbered else None
