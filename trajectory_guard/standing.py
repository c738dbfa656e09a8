"""Standing: what sinks show of a run beside a verdict: means over many steps, the outlook, the channels' values."""

import math
from collections.abc import Mapping

from trajectory_guard.course import STRETCHES, Course
from trajectory_guard.forecast import Forecast
from trajectory_guard.laws.calibrate import Outlook, outlook

__all__ = ["Standing"]


class Standing:
    """How a run stands at one step, from every step it was seen at; worked out when a sink asks.

    Args:
        forecast: what the loss should be.
        course: how the run has stood to it so far; the guard's own, which goes on with the run.
        step: the step of the verdict.
        channels: the other scalars of that step, by name.

    Example:
        >>> from trajectory_guard.lr_schedule import LRSchedule
        >>> from trajectory_guard.plan import RunPlan
        >>> plan = RunPlan(total_steps=1000, tokens_per_step=8, active_params=9, schedule=LRSchedule(shape="constant"))
        >>> forecast = Forecast(plan, progress=[0.0, 1.0], loss=[2.0, 2.0], half_widths={0.8: 0.01})
        >>> course = Course(total_steps=1000)
        >>> for step in range(1, 401):
        ...     course.add(step, loss=2.02, expected=2.0)
        >>> standing = Standing(forecast, course, 400)
        >>> round(standing.residual_percent, 3), round(standing.outlook(0.8).loss, 4)
        (1.0, 2.01)
    """

    __slots__ = ("channels", "course", "forecast", "step")

    def __init__(
        self, forecast: Forecast, course: Course, step: int, channels: Mapping[str, float] | None = None
    ) -> None:
        self.forecast, self.course, self.step = forecast, course, step
        self.channels: Mapping[str, float] = channels or {}

    @property
    def residual_percent(self) -> float:
        """Residual in percent of the forecast, a mean over the last 0.5 to 1 % of the run's steps; NaN without any.

        It is the geometric mean over the stretch of the course that the step lies in and the one before.
        """
        at = min((self.step - 1) * STRETCHES // self.course.total_steps, STRETCHES - 1)
        recent = slice(max(0, at - 1), at + 1)
        counts, log_ratios = self.course.stretches()
        count = int(counts[recent].sum())
        return 100.0 * math.expm1(float(log_ratios[recent].sum()) / count) if count else math.nan

    def outlook(self, level: float) -> Outlook | None:
        """Return the final loss to expect, as `TrajectoryGuard.outlook` does; None before 15 % of training."""
        return outlook(self.forecast, self.step, self.course.recent_log_ratio(self.forecast, self.step), level=level)
