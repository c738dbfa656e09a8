"""Onlookers: what is said once or rarely about how the loss is logged, beside the tests of its level."""

import math

from trajectory_guard.detect.events import Event, Severity
from trajectory_guard.detect.judge import LossJudge
from trajectory_guard.detect.level import CALIBRATION, SMOOTHED_ABOVE
from trajectory_guard.detect.notes import note
from trajectory_guard.detect.replayed import TOLERANCE_NATS
from trajectory_guard.detect.state import PlainState
from trajectory_guard.detect.units import first_loss_problem

__all__ = ["Onlookers"]

FIRST_STEPS = 3
"""Steps whose loss still is that of an untrained model."""
JUMP = 1.5
"""Ratio of tokens per loss between observations from which the noise is learnt anew."""
TOO_MANY_TOKENS = 1.5
"""A loss cannot average more tokens than the step has; a half more allows for counting labels differently."""


class Onlookers(PlainState):
    """First loss, late start, end of the horizon, smoothed, quantised or sparse logs, tokens that cannot be."""

    __slots__ = (
        "begun",
        "beyond_said",
        "calibration_said",
        "first_judged_step",
        "first_watched_step",
        "ignore_tokens",
        "jumped_at",
        "last_step",
        "root_weight",
        "uniform_nats",
    )

    def __init__(self, *, uniform_nats: float, first_judged_step: int, last_step: int) -> None:
        self.uniform_nats = uniform_nats
        self.first_judged_step = first_judged_step
        self.last_step = last_step
        self.first_watched_step = 0
        self.root_weight = 1.0
        self.ignore_tokens = False
        self.jumped_at = 0
        self.begun = False
        self.beyond_said = False
        self.calibration_said = False

    def before(self, step: int, loss: float, judge: LossJudge) -> list[Event] | None:
        """Take the first step, and steps beyond the horizon, before they are judged."""
        if self.begun:
            return [self._beyond(step)] if step > self.last_step and not self.beyond_said else None
        self.begun = True
        events = []
        uniform = self.uniform_nats
        judge.untrained = uniform
        if step <= FIRST_STEPS and math.isfinite(loss):
            if uniform != uniform:
                judge.untrained = loss
            elif problem := first_loss_problem(loss, uniform):
                ratio, words = problem
                events.append(
                    note(
                        "first_loss",
                        step,
                        f"the first loss is {loss:.4f}, {ratio:.3f} times the ln(vocabulary) = {uniform:.4f} of an "
                        f"untrained model: it looks like {words}; the guard expects mean nats per token.",
                        severity=Severity.WARNING,
                        size_nats=loss - uniform,
                        statistic=ratio,
                        threshold=1.25 if ratio > 1.0 else 0.8,
                    )
                )
        if step > self.last_step:
            events.append(self._beyond(step))
        elif step > self.first_judged_step + CALIBRATION:
            events.append(
                note(
                    "late_start",
                    step,
                    f"the first observation is step {step}: the run's own level and noise are learnt from the next "
                    f"{CALIBRATION} observations; until then only the forecast's interval is watched.",
                )
            )
        return events

    def after(self, step: int, judge: LossJudge) -> list[Event] | None:
        """Take a step after it was judged: speak once when the calibration is over."""
        if not self.first_watched_step:
            self.first_watched_step = step
        if self.calibration_said or not judge.level.calibrated:
            return None
        self.calibration_said = True
        events = []
        level = judge.level
        if level.rho > SMOOTHED_ABOVE:
            events.append(
                note(
                    "smoothed_loss",
                    step,
                    f"residuals are correlated ({level.rho:.2f} at lag 1 > {SMOOTHED_ABOVE}): the logged loss looks "
                    "smoothed or the data unshuffled; pass the raw loss. The noise scale is widened by "
                    f"{level.noise.lrv:.2g} for it, so that faults are seen later.",
                    statistic=level.rho,
                    threshold=SMOOTHED_ABOVE,
                )
            )
        if level.noise.quantum > level.noise.sigma:
            events.append(
                note(
                    "quantised_loss",
                    step,
                    f"losses come in steps of {level.noise.quantum:.4g} nats, more than their noise "
                    f"({level.noise.sigma:.4g}): they were rounded, perhaps to bf16; pass them in fp32.",
                    statistic=level.noise.quantum,
                    threshold=level.noise.sigma,
                )
            )
        spacing = (step - self.first_watched_step) / (CALIBRATION - 1)
        if spacing > 1.5:
            events.append(
                note(
                    "sparse_log",
                    step,
                    f"one observation in {spacing:.3g} steps: delays count observations, so faults are seen "
                    f"{spacing:.3g} times as many steps late; pass every step.",
                    statistic=spacing,
                    threshold=1.5,
                )
            )
        return events

    def weigh(self, step: int, tokens: float, planned: int, judge: LossJudge) -> list[Event] | None:
        """Take another number of tokens per loss: set `root_weight`, and learn the noise anew after a jump."""
        events = None
        if tokens > TOO_MANY_TOKENS * planned and not self.ignore_tokens:
            self.ignore_tokens = True
            events = [
                note(
                    "tokens_mismatch",
                    step,
                    f"a loss that averages {tokens:.6g} tokens, but the plan has {planned} per step: tokens are those "
                    "averaged in this one loss, not cumulative; they are ignored from here on.",
                    statistic=tokens / planned,
                    threshold=TOO_MANY_TOKENS,
                )
            ]
        if self.ignore_tokens:
            tokens = float(planned)
        before = self.root_weight
        if judge.level.observation == 0:
            judge.reference_tokens = tokens
        self.root_weight = math.sqrt(tokens / judge.reference_tokens)
        jump = (self.root_weight / before) ** 2
        recent = judge.level.observation - self.jumped_at
        if not 1.0 / JUMP < jump < JUMP and (recent > 512 or not self.jumped_at):
            self.jumped_at = judge.level.observation
            # The tokens may be right or wrong: the larger of both noises holds until the losses have shown theirs.
            judge.level.relearn_noise(max(1.0, math.sqrt(jump)))
        return events

    def replayed_event(self, step: int, finding: str, median: float, alike: float) -> Event:
        """Return the event of a comparison of steps trained twice."""
        if finding == "data_order_differs":
            sentence = (
                f"steps trained again do not repeat their losses (median difference {median:.4f} nats, correlation "
                f"{alike:.2f}): the data order differs from the first time."
            )
            severity = Severity.INFO
        else:
            sentence = (
                f"steps trained again see the same data (correlation {alike:.2f}) but give other losses: median "
                f"difference {median:.4f} > {TOLERANCE_NATS} nats; restored weights, optimizer or random state differ."
            )
            severity = Severity.WARNING
        return note(
            finding, step, sentence, severity=severity, size_nats=median, statistic=median, threshold=TOLERANCE_NATS
        )

    def _beyond(self, step: int) -> Event:
        self.beyond_said = True
        return note(
            "beyond_horizon",
            step,
            f"step {step} lies beyond the planned {self.last_step} steps: there is no forecast any more, only "
            "non-finite losses are judged.",
        )
