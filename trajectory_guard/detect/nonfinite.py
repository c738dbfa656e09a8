"""Losses that are NaN or infinite."""

import math
from collections.abc import Sequence

from trajectory_guard.detect.events import Event, Severity
from trajectory_guard.detect.state import PlainState

__all__ = ["NonFiniteWatch"]

RUN, RATE = 3, 0.05
"""Under a loss scaler: this many in a row, or this share over about 200 observations, is no longer normal. A scaler
that halves at each overflow needs one or two skips, then grows only every 2000 steps (torch.amp.GradScaler)."""
NEGLIGIBLE = 1e-4
"""Rate that counts as none: one in 200 observations, forgotten for four times as long."""
CALM = 64
"""Finite observations in a row that end an event."""


class NonFiniteWatch(PlainState):
    """Every NaN or infinity is critical; under a fp16 loss scaler only a run of them or a high rate is.

    A scaler probes its limit and skips the step when it overflows, so a lone non-finite loss is normal there.
    """

    __slots__ = ("busy", "calm", "detected", "loss_scaler", "onset", "rate", "run", "severity")

    def __init__(self, *, loss_scaler: bool = False) -> None:
        self.loss_scaler = loss_scaler
        # Whether a finite loss is news: one that is not was seen lately.
        self.busy = False
        self.run = 0
        self.rate = 0.0
        self.calm = 0
        self.onset = 0
        self.detected = 0
        self.severity = 0

    def update(self, step: int, loss: float, checkpoints: Sequence[int] = ()) -> list[Event] | None:
        """Take one observation; return the events that changed.

        Args:
            step: its step.
            loss: the loss, nats.
            checkpoints: steps of the checkpoints known. The one to go back to is the newest whose weights gave a finite
                loss, two steps before the onset: those of the step before it may be what gave this one.
        """
        if loss - loss == 0.0:
            self.run = 0
            self.rate = self.rate - self.rate / 200.0 if self.rate > NEGLIGIBLE else 0.0
            if self.detected:
                self.calm += 1
                if self.calm >= CALM:
                    event = self._event(step, f"{CALM} finite losses in a row: over.", checkpoints, closed=step)
                    self.detected = 0
                    return [event]
            else:
                self.busy = self.rate > 0.0
            return None
        self.busy = True
        self.run += 1
        self.rate += (1.0 - self.rate) / 200.0
        self.calm = 0
        critical = not self.loss_scaler or self.run >= RUN or self.rate >= RATE
        severity = int(Severity.CRITICAL if critical else Severity.INFO)
        if self.detected and severity <= self.severity:
            return None
        if not self.detected:
            self.onset = self.detected = step
        self.severity = severity
        value = "NaN" if math.isnan(loss) else "infinite"
        if critical:
            sentence = f"the loss is {value} at step {step}, {self.run} in a row since step {step - self.run + 1}."
        else:
            sentence = f"the loss is {value} at step {step}: normal when a loss scaler probes its limit."
        return [self._event(step, sentence, checkpoints)]

    def _event(self, step: int, sentence: str, checkpoints: Sequence[int], *, closed: int | None = None) -> Event:
        critical = self.severity == Severity.CRITICAL
        return Event(
            kind="non_finite",
            severity=Severity(self.severity),
            state="open" if closed is None else "closed",
            onset=self.onset,
            detected=self.detected,
            closed=closed,
            statistic=float(max(self.run, 1)),
            threshold=float(RUN if self.loss_scaler else 1),
            rollback_step=max((c for c in checkpoints if c <= self.onset - 2), default=None) if critical else None,
            sentence=sentence,
        )
