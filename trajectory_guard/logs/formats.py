"""Which reader a path is for."""

from pathlib import Path

from trajectory_guard.logs.csv import read_csv
from trajectory_guard.logs.table import LogTable

__all__ = ["read_table"]


def read_table(path: Path, *, run: str | None = None) -> LogTable:
    """Read a log with the reader that its name and first bytes ask for."""
    return read_csv(path, run=run)
