"""Course: how a run has stood to its forecast so far, in a few hundred numbers; for outlook and calibration."""

import math

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

    Example:
        >>> course = Course(total_steps=1000)
        >>> for step in (1, 2, 999):
        ...     course.add(step, loss=2.0, expected=2.0)
        >>> course.counts[0], course.counts[-1]
        (2, 1)
    """

    __slots__ = ("counts", "log_ratios", "total_steps")

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.counts = [0] * STRETCHES
        self.log_ratios = [0.0] * STRETCHES

    def add(self, step: int, loss: float, expected: float) -> None:
        """Take one finite, positive loss at a step that has a forecast."""
        at = (step - 1) * STRETCHES // self.total_steps
        self.counts[at] += 1
        self.log_ratios[at] += math.log(loss / expected)

    def go_back(self, step: int) -> None:
        """Forget the stretches from `step` on: the run trains them again."""
        for at in range((step - 1) * STRETCHES // self.total_steps, STRETCHES):
            self.counts[at], self.log_ratios[at] = 0, 0.0

    def recent_log_ratio(self, forecast: Forecast, step: int) -> float:
        """Return the mean of ln(loss / forecast) over the last 40 % of the progress seen; NaN where nothing was."""
        plan = forecast.plan
        recent = plan.progress(self._middles()) >= OUTLOOK_RECENT * plan.progress(step)
        count = float(np.sum(np.where(recent, self.counts, 0)))
        return float(np.sum(np.where(recent, self.log_ratios, 0.0))) / count if count else math.nan

    def losses(self, forecast: Forecast) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the middle step of every stretch seen and the loss there: the forecast times the mean ratio to it."""
        middles, counts = self._middles(), np.array(self.counts)
        seen = (counts > 0) & (middles >= forecast.first_step)
        expected = np.asarray(forecast.loss(middles[seen]))
        return middles[seen], expected * np.exp(np.array(self.log_ratios)[seen] / counts[seen])

    def _middles(self) -> NDArray[np.float64]:
        return (np.arange(STRETCHES) + 0.5) * self.total_steps / STRETCHES
