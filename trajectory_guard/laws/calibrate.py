"""What a run says about its own forecast: a calibration on its start, and the outlook for its end."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.forecast import Forecast
from trajectory_guard.plan import RunPlan

__all__ = ["Calibration", "Outlook", "calibrate", "calibration_window", "outlook", "outlook_from", "recent_log_ratio"]

LEVEL_SD_NATS, AMPLITUDE_SD = 0.02, 0.03
"""Prior of the two numbers: the level is off by 0.02 nats, the fall of the loss by 3 %."""

MISFIT, EFFECTIVE_POINTS = 0.006, 4
"""However many steps a window holds, it weighs like 4 points of relative sd 0.6 %: what differs is mostly not
noise of single steps."""

CARRIED = 0.5
"""Share of what the window shows that is carried forward: one half left 0.87 of the mean absolute error on later points
at the median of six public families, the whole left 1.07 (tests/benchmarks/calibration.py)."""

WINDOW_START, WINDOW_END, WINDOW_LEAST = 0.03, 0.10, 0.07
"""A window runs from the later of 3 % and three times the warm-up to 10 %, or for 7 % of training if that is later."""

OUTLOOK_FROM, OUTLOOK_RECENT = 0.15, 0.6
"""An outlook is given from the later of 15 % of training and three times the warm-up, from the last 40 % seen."""

OUTLOOK_CARRIED = 0.5
"""Share of the recent log ratio that is expected at the end; once more than half is seen, the progress itself."""

OUTLOOK_WIDTH, OUTLOOK_NARROWS = 0.9, 1.6
"""What is left of the interval at progress g: min(0.9, 1.6 - g). The rms error at the end fell to 0.7-0.9 of the
forecast's own up to 70 % of training, to 0.8 at 80 % and 0.7 at 90 % (median of six public families,
tests/benchmarks/calibration.py)."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A forecast moved by what the start of its run showed; the uncalibrated forecast stays what it was.

    Args:
        forecast: the calibrated forecast; its half-widths are those of the uncalibrated one.
        first_step, last_step: the window.
        level_nats: what was added at every step.
        amplitude: relative change of the fall still to come, L(g) - L(1).
        end_percent: change of the forecast at the end, in percent.
    """

    forecast: Forecast
    first_step: int
    last_step: int
    level_nats: float
    amplitude: float
    end_percent: float

    def describe(self) -> str:
        """Say that the forecast was calibrated and by how much."""
        return (
            f"forecast calibrated on steps {self.first_step} to {self.last_step} of this run: level "
            f"{self.level_nats:+.4f} nats, fall {100 * self.amplitude:+.2f} %, end {self.end_percent:+.2f} %"
        )


class Outlook(NamedTuple):
    """Projected final loss in nats with its interval, given the run up to `step`."""

    step: int
    loss: float
    lower: float
    upper: float
    level: float
    recent_percent: float

    def describe(self) -> str:
        """Say the outlook in words."""
        return (
            f"outlook at step {self.step}: final loss {self.loss:.4f} nats, {self.level:.0%} interval {self.lower:.4f} "
            f"to {self.upper:.4f}; recent losses are {self.recent_percent:+.2f} % off the forecast"
        )


def calibration_window(plan: RunPlan) -> tuple[int, int]:
    """Return first and last step of the calibration window of a run.

    Example:
        >>> from trajectory_guard.lr_schedule import LRSchedule
        >>> schedule = LRSchedule(shape="cosine", warmup=0.02)
        >>> plan = RunPlan(total_steps=1000, tokens_per_step=8, active_params=1e3, schedule=schedule)
        >>> calibration_window(plan)
        (60, 130)
    """
    start = min(max(WINDOW_START, 3.0 * plan.schedule.warmup), 1.0 - WINDOW_LEAST)
    first, last = plan.step_at([start, max(WINDOW_END, start + WINDOW_LEAST)])
    return max(1, math.ceil(first - 1e-9)), math.floor(last + 1e-9)


def calibrate(forecast: Forecast, step: ArrayLike, loss: ArrayLike) -> Calibration:
    """Calibrate a forecast on the start of its own run, by half of what a ridge fit of two numbers shows.

    With f the forecast: loss - f = a + b (f - f(end)) + noise, a ~ N(0, 0.02^2 nats), b ~ N(0, 0.03^2); then half of a
    and b is carried forward. An early residual carried whole is a bad forecast: on a published 535B run it missed a
    later point by 3 %.

    Args:
        forecast: the forecast made before the run.
        step: (n,) steps seen; those outside `calibration_window` are left out.
        loss: (n,) losses at them, nats.

    Raises:
        TrajectoryGuardError: fewer than three finite losses in the window, or the window is not over yet.
    """
    first, last = calibration_window(forecast.plan)
    first = max(first, forecast.first_step)
    steps, losses = np.asarray(step, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    if steps.size and steps.max() < last:
        raise TrajectoryGuardError(f"the calibration window ends at step {last}, the run is at {int(steps.max())}")
    inside = (steps >= first) & (steps <= last) & np.isfinite(losses)
    if np.count_nonzero(inside) < 3:
        raise TrajectoryGuardError(
            f"calibration needs three losses in steps {first} to {last}, got {np.count_nonzero(inside)}"
        )
    expected = np.asarray(forecast.loss(steps[inside]))
    residual = losses[inside] - expected
    end = float(forecast.loss(forecast.plan.total_steps))
    design = np.stack([np.ones_like(expected), expected - end], axis=1)
    count = len(residual)
    noise = float(np.mean(np.diff(residual, n=2) ** 2)) / 6.0
    variance = noise + (MISFIT * float(expected.mean())) ** 2 * max(count / EFFECTIVE_POINTS, 1.0)
    prior = np.diag([LEVEL_SD_NATS**-2, AMPLITUDE_SD**-2])
    level, amplitude = CARRIED * np.linalg.solve(design.T @ design / variance + prior, design.T @ residual / variance)
    progress, table, widths = forecast.table
    moved = Forecast(
        forecast.plan,
        progress=progress,
        loss=table + level + amplitude * (table - end),
        half_widths=widths,
        law=f"{forecast.law}, calibrated",
        check=forecast.check,
        channels=forecast.channels,
    )
    return Calibration(
        forecast=moved,
        first_step=first,
        last_step=last,
        level_nats=float(level),
        amplitude=float(amplitude),
        end_percent=100.0 * float(level) / end,
    )


def recent_log_ratio(forecast: Forecast, step: ArrayLike, loss: ArrayLike) -> float | None:
    """Return the mean of ln(loss / forecast) over the last 40 % of the progress seen; None without finite losses there.

    Args:
        forecast: the forecast.
        step: (n,) steps seen, rising.
        loss: (n,) losses at them, nats.
    """
    steps, losses = np.asarray(step, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    if not steps.size:
        return None
    progress = forecast.plan.progress(steps)
    recent = (progress >= OUTLOOK_RECENT * progress[-1]) & np.isfinite(losses) & (losses > 0)
    ratio: NDArray[np.float64] = np.log(losses[recent] / np.asarray(forecast.loss(steps[recent])))
    ratio = ratio[np.isfinite(ratio)]
    return float(ratio.mean()) if ratio.size else None


def outlook_from(plan: RunPlan) -> int:
    """Return the first step at which an outlook is given: 15 % of training, or three times the warm-up."""
    return math.ceil(float(plan.step_at(min(1.0, max(OUTLOOK_FROM, 3.0 * plan.schedule.warmup)))) - 1e-9)


def outlook(forecast: Forecast, step: int, log_ratio: float, *, level: float = 0.8) -> Outlook | None:
    """Return the projected final loss given how the recent losses stand to the forecast; None before it is back-tested.

    final = forecast(end) x exp(max(0.5, g) log_ratio), interval = final x exp(-+ min(0.9, 1.6 - g) half-width(end)).

    Args:
        forecast: the forecast made before the run.
        step: the step reached.
        log_ratio: mean ln(loss / forecast) over the last 40 % of the progress seen (`recent_log_ratio`).
        level: level of the interval.

    Example:
        >>> from trajectory_guard.lr_schedule import LRSchedule
        >>> plan = RunPlan(total_steps=100, tokens_per_step=8, active_params=10, schedule=LRSchedule(shape="linear"))
        >>> forecast = Forecast(plan, progress=[0.1, 1.0], loss=[4.0, 3.0], half_widths={0.8: 0.01})
        >>> outlook(forecast, 14, 0.004) is None
        True
        >>> [round(v, 3) for v in outlook(forecast, 50, 0.004)[1:4]]
        [3.006, 2.979, 3.033]
    """
    if step < outlook_from(forecast.plan) or not math.isfinite(log_ratio):
        return None
    end = forecast.plan.total_steps
    progress = min(1.0, float(forecast.plan.progress(step)))
    final = float(forecast.loss(end)) * math.exp(max(OUTLOOK_CARRIED, progress) * log_ratio)
    width = min(OUTLOOK_WIDTH, OUTLOOK_NARROWS - progress) * float(forecast.half_width(end, level))
    return Outlook(step, final, final * math.exp(-width), final * math.exp(width), level, 100 * math.expm1(log_ratio))
