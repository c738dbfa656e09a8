"""Channels: other scalars of a run, such as the gradient norm, each against its course or its own level."""

import math
from collections.abc import Mapping
from typing import Any

from trajectory_guard.detect.baseline import robust_level
from trajectory_guard.detect.change import MID_THRESHOLD, Cusum
from trajectory_guard.detect.events import Event, Severity
from trajectory_guard.detect.noise import CLIP, NoiseScale
from trajectory_guard.detect.spike import NEEDED, SIGMAS, Spikes
from trajectory_guard.detect.state import PlainState

__all__ = ["ChannelWatch"]

CALIBRATION = 200
"""Observations that a channel's level is learnt from."""
REFRESH = 32
GATE = math.log(1.5)
"""Smallest lasting change that is worth a word: by half, for a positive channel. Without a course nothing is known of a
channel's own bends beforehand, so this is far above what is flagged in a loss."""
GATE_SIGMAS = 4.0
"""The same for a channel of both signs, in sigmas."""
GUIDED_SHARE = 0.5
"""Share of the gate that is left to a channel whose course is well known: +22 % for a positive one. This and the two
constants of its kind below are measured by tests/benchmarks/channels.py."""
GUIDED_ERRORS = 3.0
"""Errors of a course, as its ladder measured them, that are no change of the run."""
SPIKE_RATIO = math.log(2.0)
FOLLOW = 100.0
"""Observations over which the level follows: a gradient norm may double within a few hundred healthy steps."""
GUIDED_FOLLOW = 500.0
"""The same against a course that narrows the gate: its bends are expected."""
DRIFT = 0.5
CALM = 64
LEAST_SHARE_OF_SPREAD = 0.5


class ChannelWatch(PlainState):
    """One scalar, on a logarithmic scale while it is positive, else on its own.

    Three of five observations over 5 sigmas and twice the level warn: a gradient norm leads a loss spike by 4-40 steps.
    A change by half within about 100 observations informs; slower ones are followed. Against a course, what is watched
    is the distance from it, and its bends are no change; a well-known course halves the gate.
    """

    __slots__ = (
        "calm",
        "change",
        "criterion",
        "detected",
        "guided",
        "level",
        "logarithmic",
        "noise",
        "observation",
        "onset",
        "peak",
        "sample",
        "severity",
        "spikes",
        "statistic",
        "threshold",
        "waiting",
    )

    def __init__(self) -> None:
        self.noise = NoiseScale()
        self.level = 0.0
        self.spikes = Spikes()
        self.change = Cusum()
        self.sample: list[float] = []
        # Values that the noise scale has not seen yet.
        self.waiting: list[float] = []
        self.logarithmic = True
        self.guided = False
        self.observation = 0
        self.criterion = ""
        self.severity = 0
        self.onset = 0
        self.detected = 0
        self.calm = 0
        self.peak = 0.0
        self.statistic = 0.0
        self.threshold = 0.0

    def update(
        self,
        name: str,
        step: int,
        value: float,
        expected: float = math.nan,
        error: float = math.nan,
        logarithmic: bool = True,
    ) -> list[Event] | None:
        """Take one value; return the events that changed.

        Args:
            name: of the channel.
            step: its step.
            value: the scalar; NaN and infinities are findings.
            expected: its course at this step where one is known, NaN where not.
            error: typical error of the course, of the logarithm if `logarithmic`; NaN where it is not known.
            logarithmic: the course is one of a positive channel.
        """
        if value - value != 0.0:
            self._learn_noise()
            self.noise.skip()
            if self.criterion:
                return None
            self._open("not finite", Severity.WARNING, step, step, 1.0, 1.0, 0.0)
            return [self._event(name, f"channel {name} is {value} at step {step}.")]
        guided = expected == expected
        on_logs = value > 0.0 and (logarithmic or not guided)
        again = None
        if guided != self.guided or (self.logarithmic and not on_logs):
            again = self._begin_anew(name, step, guided, on_logs)
        if self.logarithmic:
            x = math.log(value) - math.log(expected) if guided else math.log(value)
        else:
            x = value - expected if guided else value
        self.observation = i = self.observation + 1
        if i <= CALIBRATION:
            self._calibrate(i, x)
            return self._count_calm(name, step, 0.0, GATE) if self.criterion else again
        sigma = self.noise.sigma
        excess = x - self.level
        u = excess / sigma
        y = CLIP if u > CLIP else -CLIP if u < -CLIP else u
        whole = GATE if self.logarithmic else GATE_SIGMAS * sigma
        gate = whole
        if guided and logarithmic == self.logarithmic and GUIDED_ERRORS * error < whole:
            gate = max(GUIDED_SHARE * whole, GUIDED_ERRORS * error)
        drift = max(DRIFT, gate / sigma)
        # A channel with little noise has its gate many sigmas out: what passes it counts up to 1.5 an observation.
        limit = drift + 1.5
        beyond = limit if u > limit else -limit if u < -limit else u
        change = self.change
        total = change.update(step, beyond - drift, -beyond - drift, u)
        change.cap(2.0 * MID_THRESHOLD)
        spiking = u > SIGMAS and excess > SPIKE_RATIO / GATE * whole and self.spikes.add(step, i)
        if self.criterion:
            return self._count_calm(name, step, excess, gate)
        if spiking:
            steps = self.spikes.steps
            self._open("spike", Severity.WARNING, steps[0], step, float(len(steps)), float(NEEDED), excess)
        elif total >= MID_THRESHOLD:
            sign = 1 if change.up >= change.down else -1
            size = change.mean(sign) * sigma
            self._open("change", Severity.INFO, change.onset(sign), step, total, MID_THRESHOLD, size)
        else:
            self.level += sigma * y / (FOLLOW if gate == whole else GUIDED_FOLLOW)
            self.waiting.append(x)
            if len(self.waiting) == REFRESH:
                self._learn_noise()
            return None
        return [self._event(name, self._sentence(name, value))]

    def load_state(self, content: Mapping[str, Any]) -> None:
        """Take over a state that `state` returned; one from before there were courses had none."""
        super().load_state({"guided": False, **content})

    def _begin_anew(self, name: str, step: int, guided: bool, logarithmic: bool) -> list[Event] | None:
        """Learn the level on another scale; an event of the old one is over."""
        event = None
        if self.criterion:
            event = self._event(name, f"channel {name} is measured on another scale from here on.", closed=step)
        self.__init__()
        self.guided, self.logarithmic = guided, logarithmic
        return event and [event]

    def _calibrate(self, i: int, x: float) -> None:
        self.sample.append(x)
        self.waiting.append(x)
        if i == CALIBRATION:
            self._learn_noise()
            # A channel may bend or hold still: half its whole spread is the least scale that is believed.
            ordered = sorted(self.sample)
            spread = 0.7413 * (ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4])
            self.noise.sigma = max(self.noise.sigma, LEAST_SHARE_OF_SPREAD * spread)
            self.level = robust_level(self.sample[-100:], self.noise.sigma)
            self.sample = []

    def _learn_noise(self) -> None:
        if self.waiting:
            self.noise.add(self.waiting, self.waiting)
            self.waiting = []

    def _open(
        self, criterion: str, severity: Severity, onset: int, step: int, statistic: float, threshold: float, size: float
    ) -> None:
        self.criterion, self.severity = criterion, int(severity)
        self.onset, self.detected, self.peak = onset, step, size
        self.statistic, self.threshold, self.calm = statistic, threshold, 0

    def _count_calm(self, name: str, step: int, excess: float, gate: float) -> list[Event] | None:
        """While an event is open: close it after 64 observations in a row inside the gate, or take a new level."""
        self.peak = max(self.peak, excess, key=abs)
        self.calm = self.calm + 1 if abs(excess) < max(gate, 2.0 * self.noise.sigma) else 0
        settled = step - self.detected > 1000
        if self.calm < CALM and not settled:
            return None
        words = "stays at a new level, which is learnt now" if settled else "is back at its level"
        event = self._event(name, f"channel {name} {words}.", closed=step)
        if settled:
            self._begin_anew(name, step, self.guided, self.logarithmic)
        self.criterion, self.detected = "", 0
        self.change.reset()
        self.spikes.reset()
        return [event]

    def _sentence(self, name: str, value: float) -> str:
        change = f"{100.0 * math.expm1(min(self.peak, 30.0)):+.0f} %" if self.logarithmic else f"{self.peak:+.4g}"
        against = " against its ladder's course" if self.guided else ""
        return (
            f"channel {name}: {self.criterion} of {change}{against} since about step {self.onset}, now {value:.4g} "
            f"(statistic {self.statistic:.1f} >= {self.threshold:.1f})."
        )

    def _event(self, name: str, sentence: str, *, closed: int | None = None) -> Event:
        percent = 100.0 * math.expm1(min(self.peak, 30.0)) if self.logarithmic else None
        sigma = self.noise.sigma
        return Event(
            kind=f"channel/{name}",
            severity=Severity(self.severity),
            state="open" if closed is None else "closed",
            onset=self.onset,
            detected=self.detected,
            closed=closed,
            size_percent=percent,
            size_sigma=self.peak / sigma if sigma > 0.0 else None,
            statistic=self.statistic,
            threshold=self.threshold,
            sentence=sentence,
        )
