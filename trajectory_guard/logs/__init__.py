"""Readers of training logs. Each turns one kind of file into a LossCurve and says what it did."""

from trajectory_guard.logs.follow import LogFollower
from trajectory_guard.logs.read import LogRead, LogRow, read_log
from trajectory_guard.logs.schedule import schedule_from_lr

__all__ = ["LogFollower", "LogRead", "LogRow", "read_log", "schedule_from_lr"]
