"""Expectation: a forecast, or the course of a channel, read in blocks as plain numbers: no numpy call a step."""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.channel import ChannelCourse
from trajectory_guard.forecast import Forecast
from trajectory_guard.plan import RunPlan

__all__ = ["ChannelExpectation", "Expectation"]

BLOCK = 4096
"""Steps read at once: reading a block takes about as long as judging some tens of steps, whatever its length."""
GATE_SHARE = 1.0 / 3.0
"""Share of the 80 % half-width below which no change is flagged: within a third of it a forecast may bend. Measured by
tests/benchmarks/detection.py."""

BEND_STEPS = 2000
"""A forecast errs by a bias that moves with progress, and the run's level follows some 700 observations late. In a run
of not much more steps the bias may move by far more meanwhile than in a long one: the gate is up to twice as wide, and
the slow test allows for it. Measured on the example's rungs and on runs made to follow a law."""

Row = tuple[float, float, float, float, float, int]


class Expectation:
    """What a plan and its forecast expect of a step; all in nats, NaN without a forecast."""

    def __init__(self, forecast: Forecast) -> None:
        self.forecast = forecast
        self.bend = min(1.0, BEND_STEPS / forecast.plan.total_steps)
        self._first = 1
        self._rows: list[Row] = []
        phases = forecast.plan.batch_phases
        self._phase_starts = np.array([first for first, _ in phases])
        self._phase_tokens = np.array([tokens for _, tokens in phases])

    def at(self, step: int) -> Row:
        """Return (forecast, lower, upper, gate, promise, tokens) at `step`.

        lower and upper are the ends of the 95 % interval, promise its half-width, gate the smallest change to flag,
        tokens the planned ones of this optimizer update.
        """
        index = step - self._first
        if not 0 <= index < len(self._rows):
            self._load(step)
            index = step - self._first
        return self._rows[index]

    def _load(self, step: int) -> None:
        self._first = 1 + (step - 1) // BLOCK * BLOCK
        steps = np.arange(self._first, self._first + BLOCK)
        loss = np.asarray(self.forecast.loss(steps))
        wide = self._half_width(steps, 0.95)
        columns = (
            loss,
            loss * np.exp(-wide),
            loss * np.exp(wide),
            GATE_SHARE * (1.0 + self.bend) * self._half_width(steps, 0.8) * loss,
            wide * loss,
        )
        tokens = self._phase_tokens[np.searchsorted(self._phase_starts, steps, side="right") - 1]
        self._rows = list(zip(*(column.tolist() for column in (*columns, tokens)), strict=True))

    def _half_width(self, steps: NDArray[np.int64], level: float) -> NDArray[np.float64]:
        """Half-width of ln(loss); outside the table's levels by the normal quantile of the nearest level."""
        levels = self.forecast.levels
        nearest = min(max(level, levels[0]), levels[-1])
        width = np.asarray(self.forecast.half_width(steps, nearest))
        return width if nearest == level else width * (_quantile(level) / _quantile(nearest))


class ChannelExpectation:
    """What a course expects of a channel at a step of a plan; NaN before the course begins."""

    def __init__(self, plan: RunPlan, course: ChannelCourse) -> None:
        self.course = course
        self._plan = plan
        self._first = 1
        self._values: list[float] = []

    def at(self, step: int) -> float:
        """Return the value to expect at `step`."""
        index = step - self._first
        if not 0 <= index < len(self._values):
            self._first = 1 + (step - 1) // BLOCK * BLOCK
            progress = self._plan.progress(np.arange(self._first, self._first + BLOCK))
            self._values = self.course.at(progress).tolist()
            index = step - self._first
        return self._values[index]


def _quantile(level: float) -> float:
    return NormalDist().inv_cdf(0.5 + 0.5 * level) if level > 0.0 else math.nan
