"""ConsoleSink: one line per interval for a person who glances, one clear line at a flag."""

import math
import sys
from typing import TextIO

from trajectory_guard.detect.events import Event, Severity, Verdict
from trajectory_guard.forecast import Forecast
from trajectory_guard.sinks.scalars import shown_level

__all__ = ["ConsoleSink", "event_line", "rollback_words", "verdict_line"]


class ConsoleSink:
    """Prints verdicts and events, above a progress bar where one is drawn.

    Args:
        stream: where to print; by default whatever `sys.stdout` is at that moment.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._total_steps = 0

    def start(self, forecast: Forecast, *, resumed_step: int | None) -> None:
        """Say what is watched, from which step on there is a forecast, and how the run should end."""
        plan = forecast.plan
        self._total_steps = plan.total_steps
        level = shown_level(forecast)
        lower, upper = forecast.interval(plan.total_steps, level=level)
        resumed = "" if resumed_step is None else f"; resumed after step {resumed_step:,}"
        self._print(
            f"trajectory-guard: {plan.split} {plan.metric} over {plan.total_steps:,} steps, forecast ({forecast.law}) "
            f"from step {forecast.first_step:,}, final loss {forecast.loss(plan.total_steps):.4f} "
            f"[{lower:.4f}, {upper:.4f}] at {level:.0%}{resumed}"
        )
        check = forecast.check
        if check.errors or check.warnings:
            self._print("trajectory-guard: " + check.message())

    def verdict(self, verdict: Verdict) -> None:
        """Print the line of `verdict_line`."""
        self._print(verdict_line(verdict, self._total_steps))

    def event(self, event: Event, *, step: int) -> None:
        """Print the line of `event_line`."""
        self._print(event_line(event, step))

    def flush(self) -> None:
        """Flush the stream."""
        (self._stream or sys.stdout).flush()

    def close(self) -> None:
        """Flush; the stream is not ours to close."""
        self.flush()

    def _print(self, text: str) -> None:
        stream = self._stream or sys.stdout
        # A bar drawn by tqdm is cleared, the line printed, the bar redrawn. Not imported unless it is in use.
        tqdm = sys.modules.get("tqdm")
        if tqdm is not None and hasattr(tqdm, "tqdm"):
            tqdm.tqdm.write(text, file=stream)
        else:
            stream.write(text + "\n")


def verdict_line(verdict: Verdict, total_steps: int) -> str:
    """Return one verdict as one line; parts that are not known are left out.

    Example:
        >>> verdict = Verdict(step=567, loss=2.7474, forecast=2.6522, lower=2.5, upper=2.8, residual_nats=0.0952,
        ...                   residual_sigma=math.nan, stage="watching", statistic=31.0, threshold=34.5)
        >>> print(verdict_line(verdict, 2000))
        step    567/2,000 | loss 2.7474 | forecast 2.6522 [2.50, 2.80] | residual +3.6 % | CUSUM 31.0 < 34.5
    """
    total = f"{total_steps:,}"
    parts = [f"step {verdict.step:>{len(total) + 1},}/{total}", f"loss {verdict.loss:.4f}"]
    if math.isnan(verdict.forecast):
        parts.append("no forecast yet" if verdict.step < total_steps else "past the forecast")
        return " | ".join(parts)
    parts.append(f"forecast {verdict.forecast:.4f} [{verdict.lower:.2f}, {verdict.upper:.2f}]")
    if math.isfinite(verdict.residual_nats):
        sigma = "" if math.isnan(verdict.residual_sigma) else f" ({verdict.residual_sigma:+.1f} sigma)"
        parts.append(f"residual {verdict.residual_percent:+.1f} %{sigma}")
    if verdict.stage == "watching" and not math.isnan(verdict.statistic):
        sign = ">" if verdict.statistic >= verdict.threshold else "<"
        parts.append(f"CUSUM {verdict.statistic:.1f} {sign} {verdict.threshold:.1f}")
    else:
        parts.append(verdict.stage.replace("_", " "))
    drift = next((e for e in verdict.events if e.state == "open" and e.kind in _DRIFTS), None)
    if drift is not None:
        since = "" if drift.onset is None else f" since about step {drift.onset:,}"
        parts.append(f"{_DRIFTS[drift.kind]}{since}")
    return " | ".join(parts)


_DRIFTS = {"change_up": "DRIFTED ABOVE", "change_down": "DRIFTED BELOW"}


def event_line(event: Event, step: int) -> str:
    """Return an event as one line: how severe, at which step, the sentence, and where to roll back to.

    Example:
        >>> event = Event(kind="spike", severity=Severity.WARNING, state="open", onset=7, detected=9,
        ...               rollback_step=5, sentence="3 of 5 steps are more than 5 sigma above the forecast.")
        >>> print(event_line(event, 9))
        !! WARNING at step 9: 3 of 5 steps are more than 5 sigma above the forecast. Roll back to step 5.
    """
    if event.state == "closed" and event.closed != event.detected:
        return f"-- closed at step {event.closed or step:,}: {event.sentence}"
    if event.severity == Severity.INFO:
        return f"-- note at step {step:,}: {event.sentence}"
    return f"!! {event.severity.name} at step {step:,}: {event.sentence}{rollback_words(event)}"


def rollback_words(event: Event) -> str:
    """Return " Roll back to step N.", or nothing where there is no such step or the sentence says it already."""
    if event.rollback_step is None or "roll back to" in event.sentence:
        return ""
    return f" Roll back to step {event.rollback_step:,}."
