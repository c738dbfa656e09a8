"""Declared changes: where the level is learnt anew, and the shift that was absorbed is reported."""

import math

from trajectory_guard.detect.events import Event
from trajectory_guard.detect.judge import LossJudge
from trajectory_guard.detect.notes import note
from trajectory_guard.detect.state import PlainState
from trajectory_guard.detect.wording import percent, size_words

__all__ = ["Declared"]

NEVER = 2**62


class Declared(PlainState):
    """Pending changes in the order of their steps, the one being absorbed, and the shift of the loss's definition.

    `shift` (nats) is added to the forecast from the step on where a changed definition of the loss was absorbed.
    """

    __slots__ = ("before", "kind", "next_step", "pending", "reason", "shift", "step")

    def __init__(self) -> None:
        self.pending: list[list[int | str]] = []
        self.next_step = NEVER
        self.step = 0
        self.kind = ""
        self.reason = ""
        self.before = math.nan
        self.shift = 0.0

    def declare(self, step: int, kind: str, reason: str) -> None:
        """Add a change; the same one twice is one."""
        if [step, kind, reason] not in self.pending and (step, kind, reason) != (self.step, self.kind, self.reason):
            self.pending.append([step, kind, reason])
            self.pending.sort(key=lambda change: int(change[0]))
            self.next_step = int(self.pending[0][0])

    def begin(self, step: int, forecast: float, judge: LossJudge) -> list[Event]:
        """Start absorbing the changes that are due at `step`; return the events that this opens and closes."""
        due = [change for change in self.pending if int(change[0]) <= step]
        self.pending = self.pending[len(due) :]
        self.next_step = int(self.pending[0][0]) if self.pending else NEVER
        kinds = [str(kind) for _, kind, _ in due]
        if not self.kind:
            self.before = judge.level.level if judge.level.calibrated else math.nan
        self.step = step
        self.kind = "loss_definition" if "loss_definition" in [self.kind, *kinds] else kinds[-1]
        self.reason = ", ".join(str(reason) for _, _, reason in due)
        keep_noise = not {"batch_size", "loss_definition"} & {self.kind, *kinds}
        return judge.anchor(step, f"{self.kind}, {self.reason}", forecast, keep_noise=keep_noise)

    def finish(self, step: int, forecast: float, judge: LossJudge) -> list[Event] | None:
        """After an observation: report the shift once the new level is known."""
        if not self.kind or not judge.level.calibrated:
            return None
        kind, reason, began, before = self.kind, self.reason, self.step, self.before
        shift = judge.level.level - before
        sigma = judge.level.noise.sigma
        if before != before:
            words = "there was no level before to compare with"
        else:
            words = f"it shifted the loss by {size_words(shift, forecast, sigma)} against the forecast"
        if kind == "loss_definition" and before == before:
            self.shift += shift
            judge.level.baseline.level = before
            words += "; this is added to the forecast from here on"
        self.kind, self.reason, self.before = "", "", math.nan
        known = shift == shift
        return [
            note(
                "planned_change",
                step,
                f"planned change at step {began} ({kind}: {reason}) is absorbed: {words}; noise {sigma:.4g} nats.",
                size_nats=shift if known else None,
                size_percent=percent(shift, forecast) if known else None,
                size_sigma=shift / sigma if known and sigma > 0.0 else None,
            )
        ]
