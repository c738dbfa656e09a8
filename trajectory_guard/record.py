"""RecordSink: what a report shows of a run, kept while it goes on."""

from collections.abc import Sequence

import numpy as np

from trajectory_guard.course import Course
from trajectory_guard.detect.events import Event, Verdict
from trajectory_guard.forecast import Forecast
from trajectory_guard.picture import RunRecord
from trajectory_guard.standing import Standing

__all__ = ["KEPT_VERDICTS", "RecordSink"]

KEPT_VERDICTS = 4000
"""Verdicts kept of a run: five per pixel of the page."""


class RecordSink:
    """Keeps what a report shows: at most 4,000 verdicts, evenly spread, and the latest state of every event."""

    every_step = False

    def __init__(self) -> None:
        self._forecast: Forecast | None = None
        self._course: Course | None = None
        self._resumed: int | None = None
        self._verdicts: list[tuple[int, float, float, float]] = []
        self._every, self._seen = 1, 0
        self._events: dict[tuple[str, int], Event] = {}

    def start(self, forecast: Forecast, *, resumed_step: int | None) -> None:
        """Keep the forecast."""
        self._forecast, self._resumed = forecast, resumed_step

    def reopen(self, events: Sequence[Event]) -> None:
        """Take the events that are known at a resume."""
        self._events = {(event.kind, event.detected): event for event in events}

    def standing(self, standing: Standing) -> None:
        """Keep the course: it holds what was seen before a resume."""
        self._course = standing.course

    def verdict(self, verdict: Verdict) -> None:
        """Keep the verdict, or every second, fourth, ... one once there are many."""
        self._seen += 1
        if self._seen % self._every and not verdict.events:
            return
        while self._verdicts and self._verdicts[-1][0] >= verdict.step:  # The run went back.
            self._verdicts.pop()
        self._verdicts.append((verdict.step, verdict.loss, verdict.statistic, verdict.threshold))
        if len(self._verdicts) > KEPT_VERDICTS:
            self._verdicts, self._every = self._verdicts[::2], 2 * self._every

    def event(self, event: Event, *, step: int) -> None:
        """Keep the latest state of the event."""
        self._events[event.kind, event.detected] = event

    def flush(self) -> None:
        """Nothing is buffered for a file."""

    def close(self) -> None:
        """Nothing is written."""

    def record(self) -> RunRecord:
        """Return what was kept so far."""
        rows = np.array(self._verdicts or np.zeros((0, 4)), dtype=np.float64)
        if self._resumed is not None and self._course is not None and self._forecast is not None:
            middles, means = self._course.losses(self._forecast)
            before = (middles <= self._resumed) & (middles < (rows[0, 0] if len(rows) else np.inf))
            unknown = np.full(np.count_nonzero(before), np.nan)
            rows = np.vstack([np.stack([np.ceil(middles[before]), means[before], unknown, unknown], axis=1), rows])
        step, loss, statistic, threshold = rows.T
        return RunRecord(
            step=step.astype(np.int64),
            loss=loss,
            statistic=statistic,
            threshold=threshold,
            events=tuple(self._events.values()),
        )
