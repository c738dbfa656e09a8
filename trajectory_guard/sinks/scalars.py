"""The numbers that every sink shows for a verdict, under one set of names and in one call."""

import math
import re
from collections.abc import Sequence

from trajectory_guard.detect.events import Event, Severity, Verdict
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.forecast import Forecast
from trajectory_guard.standing import Standing

__all__ = ["FlagState", "check_name", "shown_level", "verdict_scalars"]


def shown_level(forecast: Forecast) -> float:
    """Return the level of the intervals that are shown: 95 % where the forecast has it, else its nearest."""
    return min(max(0.95, forecast.levels[0]), forecast.levels[-1])


def check_name(name: str) -> str:
    """Return a guard's name if it can begin a tag.

    Raises:
        TrajectoryGuardError: it is empty or holds anything but letters, digits, `_`, `-`, `.` and inner `/`.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", name):
        raise TrajectoryGuardError(f"a guard's name must be letters, digits, '_', '-', '.' or '/', got {name!r}")
    return name


def verdict_scalars(
    verdict: Verdict, *, flag: bool, name: str = "guard", standing: Standing | None = None
) -> dict[str, float]:
    """Return the scalars of one verdict by tag: always the same tags and the channels', NaN where nothing is known.

    Args:
        verdict: the verdict.
        flag: an event of at least warning is open.
        name: first part of every tag.
        standing: how the run stands beside it.

    Returns:
        `loss`, `forecast`, `lower` and `upper` in nats; `loss_mean`, the forecast times the mean ratio of the losses to
        it over the last 0.5 to 1 % of the run, or the loss where that is not finite; `residual_percent` with
        `residual_lower_percent` and `residual_upper_percent`, the interval relative to the forecast;
        `residual_mean_percent` over the same steps as `loss_mean`; `residual_sigma`; `alarm_ratio`, the change
        statistic over its threshold, with its `alarm_floor` 0 and `alarm_limit` 1; `outlook` of the final loss with
        `outlook_lower` and `outlook_upper` in nats; `flag`, 0 or 1; and `channel/NAME`.

    Example:
        >>> verdict = Verdict(step=3, loss=2.2, forecast=2.0, lower=1.9, upper=2.1, residual_nats=0.2,
        ...                   residual_sigma=2.0, stage="watching", statistic=1.0, threshold=16.0)
        >>> round(verdict_scalars(verdict, flag=False)["guard/residual_percent"], 6)
        10.0
    """
    f = verdict.forecast
    outlook = None if standing is None else standing.outlook(shown_level(standing.forecast))
    nothing = math.nan
    mean_percent = nothing if standing is None else standing.residual_percent
    values = {
        "loss": verdict.loss,
        # A NaN is no part of the mean, and must be seen.
        "loss_mean": f * (1.0 + mean_percent / 100.0) if math.isfinite(verdict.loss) else verdict.loss,
        "forecast": f,
        "lower": verdict.lower,
        "upper": verdict.upper,
        "residual_percent": verdict.residual_percent,
        "residual_lower_percent": 100.0 * (verdict.lower - f) / f,
        "residual_upper_percent": 100.0 * (verdict.upper - f) / f,
        "residual_mean_percent": mean_percent,
        "residual_sigma": verdict.residual_sigma,
        "alarm_ratio": verdict.statistic / verdict.threshold,
        "alarm_floor": 0.0,
        "alarm_limit": 1.0,
        "outlook": nothing if outlook is None else outlook.loss,
        "outlook_lower": nothing if outlook is None else outlook.lower,
        "outlook_upper": nothing if outlook is None else outlook.upper,
        "flag": float(flag),
    }
    if standing is not None:
        values.update({f"channel/{channel}": value for channel, value in standing.channels.items()})
    return {f"{name}/{key}": float(value) for key, value in values.items()}


class FlagState:
    """Remembers which events of at least warning are open, for the 0/1 flag that marks steps."""

    def __init__(self) -> None:
        self._open: set[tuple[str, int]] = set()

    def take(self, event: Event) -> None:
        """Take an event that was opened, updated or closed."""
        key = (event.kind, event.detected)
        if event.state == "open" and event.severity >= Severity.WARNING:
            self._open.add(key)
        else:
            self._open.discard(key)

    def reopen(self, events: Sequence[Event]) -> None:
        """Take the events that are known at a resume."""
        self._open.clear()
        for event in events:
            self.take(event)

    def at(self, verdict: Verdict) -> bool:
        """True when an event of at least warning is open at this verdict's step, or was flagged in it."""
        return bool(self._open) or any(
            event.severity >= Severity.WARNING and verdict.step == event.detected for event in verdict.events
        )
