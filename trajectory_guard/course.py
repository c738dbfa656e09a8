"""Course: how a run has stood to its forecast so far, in a few hundred numbers; for outlook and calibration."""

import math
from collections.abc import Mapping
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.detect.state import PlainState
from trajectory_guard.forecast import Forecast
from trajectory_guard.laws.calibrate import OUTLOOK_RECENT

__all__ = ["Course"]

STRETCHES = 200
"""Equal stretches of steps, each kept as one mean: half a percent of training, far finer than the window they serve."""


class Course(PlainState):
    """Mean of ln(loss / forecast) over each of 200 stretches of steps; its size does not grow with the run.

    What belongs to the latest stretch, `at`, which ends with step `end`, is summed in `count` and `log_ratio` first.

    Example:
        >>> course = Course(total_steps=1000)
        >>> for step in (1, 2, 999):
        ...     course.add(step, loss=2.0, expected=2.0)
        >>> counts, log_ratios = course.stretches()
        >>> int(counts[0]), int(counts[-1])
        (2, 1)
    """

    __slots__ = ("at", "count", "counts", "end", "log_ratio", "log_ratios", "total_steps")

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.counts = [0] * STRETCHES
        self.log_ratios = [0.0] * STRETCHES
        self.at = 0
        self.end = 0
        self.count = 0
        self.log_ratio = 0.0

    def load_state(self, content: Mapping[str, Any]) -> None:
        """See `PlainState.load_state`. The stretches of a plan of another length are not those of this one: they go."""
        total_steps = self.total_steps
        super().load_state(content)
        if len(self.counts) != STRETCHES or len(self.log_ratios) != STRETCHES or self.at not in range(STRETCHES):
            raise ValueError(f"a course has {STRETCHES} stretches")
        if not all(isinstance(value, (int, float)) for value in [*self.counts, *self.log_ratios]):
            raise ValueError("the stretches of a course are numbers")
        if self.total_steps != total_steps:
            Course.__init__(self, total_steps)

    def add(self, step: int, loss: float, expected: float) -> None:
        """Take one finite, positive loss at a step that has a forecast; steps only rise, but for `go_back`."""
        if step > self.end:
            self._turn(step)
        self.count += 1
        self.log_ratio += log(loss / expected)

    def go_back(self, step: int) -> None:
        """Forget the stretches from `step` on: the run trains them again."""
        self._turn(step)
        for at in range(self.at, STRETCHES):
            self.counts[at], self.log_ratios[at] = 0, 0.0

    def stretches(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the count and the sum of ln(loss / forecast) of every stretch, both of shape (200,)."""
        counts, log_ratios = np.array(self.counts), np.array(self.log_ratios)
        counts[self.at] += self.count
        log_ratios[self.at] += self.log_ratio
        return counts, log_ratios

    def recent_log_ratio(self, forecast: Forecast, step: int) -> float:
        """Return the mean of ln(loss / forecast) over the last 40 % of the progress seen; NaN where nothing was."""
        plan = forecast.plan
        recent = plan.progress(self._middles()) >= OUTLOOK_RECENT * plan.progress(step)
        counts, log_ratios = self.stretches()
        count = float(np.sum(counts[recent]))
        return float(np.sum(log_ratios[recent])) / count if count else math.nan

    def losses(self, forecast: Forecast) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the middle step of every stretch seen and the loss there: the forecast times the mean ratio to it."""
        middles, (counts, log_ratios) = self._middles(), self.stretches()
        seen = (counts > 0) & (middles >= forecast.first_step)
        expected = np.asarray(forecast.loss(middles[seen]))
        return middles[seen], expected * np.exp(log_ratios[seen] / counts[seen])

    def _turn(self, step: int) -> None:
        """Put the latest stretch by, and go to that of `step`."""
        self.counts[self.at] += self.count
        self.log_ratios[self.at] += self.log_ratio
        self.count, self.log_ratio = 0, 0.0
        self.at = (step - 1) * STRETCHES // self.total_steps
        self.end = -(-(self.at + 1) * self.total_steps // STRETCHES)

    def _middles(self) -> NDArray[np.float64]:
        return (np.arange(STRETCHES) + 0.5) * self.total_steps / STRETCHES
