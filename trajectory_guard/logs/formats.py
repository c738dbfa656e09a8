"""Which reader a path is for."""

from pathlib import Path

from trajectory_guard.errors import FileFormatError
from trajectory_guard.logs.csv import read_csv
from trajectory_guard.logs.jsonl import parse_json, read_jsonl
from trajectory_guard.logs.table import LogTable, read_lines
from trajectory_guard.logs.tensorboard import event_files, read_tensorboard
from trajectory_guard.logs.trainer_state import newest_state, read_trainer_state, table_of_state

__all__ = ["read_table"]


def read_table(path: Path, *, run: str | None = None) -> LogTable:
    """Read a log with the reader that its name and first character ask for.

    A folder is read as event files, else as a Trainer's checkpoints, else by its `metrics.csv` (Lightning's CSVLogger).

    Raises:
        FileFormatError: nothing there that a reader understands.
    """
    if path.is_dir():
        if event_files(path):
            return read_tensorboard(path)
        if newest_state(path) is not None:
            return read_trainer_state(path)
        if (path / "metrics.csv").is_file():
            return read_csv(path / "metrics.csv", run=run)
        raise FileFormatError(
            f"{path}: this folder holds no event files, trainer_state.json or metrics.csv; name the log itself"
        )
    if ".tfevents." in path.name:
        if not path.is_file():
            raise FileFormatError(f"{path}: no such log")
        return read_tensorboard(path)
    lines = read_lines(path)
    first = next((line for line in lines if line.strip()), "")
    lines.close()
    if first.lstrip().startswith("["):
        raise FileFormatError(f"{path}: a JSON array; write one object a line (JSON Lines)")
    if not first.lstrip().startswith("{"):
        return read_csv(path, run=run)
    try:
        whole = parse_json(first)
    except ValueError:
        # The first line is no object of its own: one JSON document over many lines.
        return read_trainer_state(path)
    if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
        return table_of_state(whole, str(path))
    return read_jsonl(path)
