"""Readers of training logs. Each turns one kind of file into a LossCurve and says what it did."""

from trajectory_guard.logs.read import LogRead, LogRow, read_log
from trajectory_guard.logs.schedule import schedule_from_lr

__all__ = ["LogRead", "LogRow", "read_log", "schedule_from_lr"]
