"""Watcher: what happens to one observation, part by part; the guard around it reports and acts."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from trajectory_guard.course import Course
from trajectory_guard.detect.channels import ChannelWatch
from trajectory_guard.detect.declared import Declared
from trajectory_guard.detect.events import Event, Stage, Verdict
from trajectory_guard.detect.judge import LossJudge
from trajectory_guard.detect.nonfinite import NonFiniteWatch
from trajectory_guard.detect.notes import note
from trajectory_guard.detect.onlookers import Onlookers
from trajectory_guard.detect.replayed import Replayed
from trajectory_guard.detect.state import PlainState
from trajectory_guard.expectation import ChannelExpectation, Expectation
from trajectory_guard.forecast import Forecast
from trajectory_guard.paired import PairedReference

__all__ = ["Watcher"]

logger = logging.getLogger("trajectory_guard")


class Watcher:
    """The parts of a guard that judge, in the order in which they see an observation.

    Args:
        forecast: what the loss should be.
        loss_scaler: a lone non-finite loss is normal.
        paired: residuals of a run on the same data order.
    """

    def __init__(
        self,
        forecast: Forecast,
        *,
        loss_scaler: bool,
        paired: PairedReference | None,
    ) -> None:
        plan = forecast.plan
        self.expectation = Expectation(forecast)
        self.warmup_end = math.ceil(float(plan.step_at(plan.schedule.warmup)) - 1e-9)
        vocabulary = plan.recipe.vocab_size
        self.judge = LossJudge()
        self.judge.level.bend = self.expectation.bend
        self.onlookers = Onlookers(
            uniform_nats=math.log(vocabulary) if vocabulary and vocabulary > 1 else math.nan,
            first_judged_step=max(forecast.first_step, self.warmup_end + 1),
            last_step=plan.total_steps,
        )
        self.non_finite = NonFiniteWatch(loss_scaler=loss_scaler)
        self.replayed = Replayed()
        self.course = Course(plan.total_steps)
        self.declared = Declared()
        self.channels: dict[str, ChannelWatch] = {}
        self.last_step = 0
        self.frontier = 0
        self._paired = paired
        self._channel_courses = {name: ChannelExpectation(plan, each) for name, each in forecast.channels.items()}
        self._weighed_tokens = math.nan
        self._broken: set[str] = set()

    def observe(self, step: int, loss: float, tokens: float | None, channels: Mapping[str, float] | None) -> Verdict:
        """Judge one observation; what a part finds or breaks never keeps the others from seeing it."""
        expected, lower, upper, gate, promise, planned_tokens = self.expectation.at(step)
        shift = self.declared.shift
        if shift:
            expected, lower, upper = expected + shift, lower + shift, upper + shift
        known = expected > 0.0
        finite = loss - loss == 0.0
        last_step = self.last_step
        judge, level = self.judge, self.judge.level
        events: list[Event] = []
        if step < last_step:
            self._try("rewind", events, self._go_back, step, expected)
        if not finite or self.non_finite.busy:
            self._try("non_finite", events, self.non_finite.update, step, loss, judge.checkpoints)
        if step != last_step:
            if not last_step or step > self.onlookers.last_step:
                self._try("onlookers", events, self.onlookers.before, step, loss, judge)
            self.last_step = step
        if step <= self.frontier:
            self._try("replayed", events, self._compare, step, loss)
        else:
            self.frontier = step
            if finite:
                self.replayed.remember(step, loss)
        if known and finite and loss > 0.0:
            self.course.add(step, loss, expected)
        if step >= self.declared.next_step and known:
            self._try("declared", events, self.declared.begin, step, expected, judge)
        stage: Stage = "no_forecast"
        if known:
            stage = "warm_up" if step <= self.warmup_end else "watching" if level.calibrated else "calibrating"
        if not finite:
            self._try("judge", events, judge.skip, step)
        elif step != last_step and known and step > self.warmup_end:
            if tokens is None:
                tokens = planned_tokens
            if tokens != self._weighed_tokens:
                self._weighed_tokens = tokens
                self._try("tokens", events, self.onlookers.weigh, step, tokens, planned_tokens, judge)
            if self.declared.kind == "loss_definition":
                promise = math.inf
            reference = math.nan if self._paired is None else self._paired.at(step)
            weight = self.onlookers.root_weight
            if "judge" not in self._broken:
                try:
                    found = judge.observe(step, loss, expected, gate, promise, weight, reference)
                except Exception as error:
                    self._switch_off("judge", error)
                else:
                    if found:
                        events.extend(found)
            if not self.onlookers.calibration_said:
                self._try("onlookers", events, self.onlookers.after, step, judge)
            if self.declared.kind:
                self._try("declared", events, self.declared.finish, step, expected, judge)
        if channels and step != last_step and step > self.warmup_end:
            for name, value in channels.items():
                self._try(f"channel {name}", events, self._watch_channel, name, step, value)

        residual = loss - expected
        watching = stage == "watching"
        return Verdict(
            step,
            loss,
            expected,
            lower,
            upper,
            residual,
            residual / level.sigma if level.sigma > 0.0 else math.nan,
            stage,
            level.statistic if watching else math.nan,
            level.threshold if watching else math.nan,
            tuple(events) if events else (),
        )

    def state(self) -> dict[str, Any]:
        """Return the whole state as plain Python values."""
        return {
            "last_step": self.last_step,
            "frontier": self.frontier,
            "weighed_tokens": None if math.isnan(self._weighed_tokens) else float(self._weighed_tokens),
            "channels": {name: channel.state() for name, channel in self.channels.items()},
            **{name: part.state() for name, part in self._parts().items()},
        }

    def load_state(self, content: Mapping[str, Any]) -> None:
        """Take over a state that `state` returned."""
        for name, part in self._parts().items():
            part.load_state(content[name])
        self.channels = {}
        for name, state in content["channels"].items():
            self.channels[name] = ChannelWatch()
            self.channels[name].load_state(state)
        self.last_step = int(content["last_step"])
        # Steps that this object has seen beyond the state are trained again: they are compared.
        self.frontier = max(self.frontier, int(content["frontier"]))
        weighed = content["weighed_tokens"]
        self._weighed_tokens = math.nan if weighed is None else float(weighed)

    def _parts(self) -> dict[str, PlainState]:
        return {
            "judge": self.judge,
            "onlookers": self.onlookers,
            "non_finite": self.non_finite,
            "replayed": self.replayed,
            "course": self.course,
            "declared": self.declared,
        }

    def _compare(self, step: int, loss: float) -> list[Event] | None:
        if not math.isfinite(loss):
            return None
        found = self.replayed.compare(step, loss)
        return None if found is None else [self.onlookers.replayed_event(step, *found)]

    def _watch_channel(self, name: str, step: int, value: float) -> list[Event] | None:
        channel = self.channels.get(name)
        if channel is None:
            channel = self.channels[name] = ChannelWatch()
        expected = self._channel_courses.get(name)
        if expected is None:
            return channel.update(name, step, value)
        course = expected.course
        return channel.update(name, step, value, expected.at(step), course.error, course.logarithmic)

    def _go_back(self, step: int, expected: float) -> list[Event]:
        """The run went back: the level and the noise are known, every statistic starts at zero."""
        self.replayed.begin(step)
        self.course.go_back(step)
        sentence = (
            f"the run went back from step {self.last_step} to step {step}: statistics start anew, level and noise are "
            "kept, and losses of steps trained again are compared with the remembered ones."
        )
        return [note("rewound", step, sentence), *self.judge.rewind(step, expected)]

    def _try(self, name: str, events: list[Event], call: Callable[..., list[Event] | None], *args: Any) -> None:
        """Collect events of one part; a part that fails is reported once and switched off: training goes on."""
        if name in self._broken:
            return
        try:
            found = call(*args)
        except Exception as error:
            self._switch_off(name, error)
            return
        if found:
            events.extend(found)

    def _switch_off(self, name: str, error: Exception) -> None:
        self._broken.add(name)
        logger.error("the guard's part %r failed and is switched off; training goes on", name, exc_info=error)
