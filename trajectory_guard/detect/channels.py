"""Channels: other scalars of a run, such as the gradient norm, each against its course or its own level."""

import math

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
"""Smallest lasting change that is worth a word: by half, for a positive channel. Nothing is known of a channel's own
bends beforehand, so this is far above what is flagged in a loss."""
SPIKE_RATIO = math.log(2.0)
FOLLOW = 100.0
"""Observations over which the level follows: a gradient norm may double within a few hundred healthy steps."""
DRIFT = 0.5
CALM = 64
LEAST_SHARE_OF_SPREAD = 0.5


class ChannelWatch(PlainState):
    """One scalar, on a logarithmic scale while it is positive, else on its own.

    Three of five observations over 5 sigmas and twice the level warn: a gradient norm leads a loss spike by 4-40 steps.
    A change by half within about 100 observations informs; slower ones are followed.
    """

    __slots__ = (
        "calm",
        "change",
        "criterion",
        "detected",
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
        self.observation = 0
        self.criterion = ""
        self.severity = 0
        self.onset = 0
        self.detected = 0
        self.calm = 0
        self.peak = 0.0
        self.statistic = 0.0
        self.threshold = 0.0

    def update(self, name: str, step: int, value: float, expected: float) -> list[Event] | None:
        """Take one value; return the events that changed.

        Args:
            name: of the channel.
            step: its step.
            value: the scalar; NaN and infinities are findings.
            expected: its course at this step where one is known, NaN where not.
        """
        if value - value != 0.0:
            self._learn_noise()
            self.noise.skip()
            if self.criterion:
                return None
            self._open("not finite", Severity.WARNING, step, step, 1.0, 1.0, 0.0)
            return [self._event(name, f"channel {name} is {value} at step {step}.")]
        x = self._scale(value, expected)
        self.observation = i = self.observation + 1
        if i <= CALIBRATION:
            self._calibrate(i, x)
            return self._count_calm(name, step, 0.0) if self.criterion else None
        sigma = self.noise.sigma
        excess = x - self.level
        u = excess / sigma
        y = CLIP if u > CLIP else -CLIP if u < -CLIP else u
        unit = 1.0 if self.logarithmic else 4.0 * sigma / GATE
        drift = max(DRIFT, GATE * unit / sigma)
        # A channel with little noise has its gate many sigmas out: what passes it counts up to 1.5 an observation.
        limit = drift + 1.5
        beyond = limit if u > limit else -limit if u < -limit else u
        change = self.change
        total = change.update(step, beyond - drift, -beyond - drift, u)
        change.cap(2.0 * MID_THRESHOLD)
        spiking = u > SIGMAS and excess > SPIKE_RATIO * unit and self.spikes.add(step, i)
        if self.criterion:
            return self._count_calm(name, step, excess)
        if spiking:
            steps = self.spikes.steps
            self._open("spike", Severity.WARNING, steps[0], step, float(len(steps)), float(NEEDED), excess)
        elif total >= MID_THRESHOLD:
            sign = 1 if change.up >= change.down else -1
            size = change.mean(sign) * sigma
            self._open("change", Severity.INFO, change.onset(sign), step, total, MID_THRESHOLD, size)
        else:
            self.level += sigma * y / FOLLOW
            self.waiting.append(x)
            if len(self.waiting) == REFRESH:
                self._learn_noise()
            return None
        return [self._event(name, self._sentence(name, value))]

    def _scale(self, value: float, expected: float) -> float:
        if self.observation == 0:
            self.logarithmic = value > 0.0
        elif self.logarithmic and value <= 0.0:
            # The channel is not a positive one after all: begin anew on its own scale.
            self.__init__()
            self.logarithmic = False
            self.observation = 1
        if self.logarithmic:
            return math.log(value / expected) if expected > 0.0 else math.log(value)
        return value if expected != expected else value - expected

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

    def _count_calm(self, name: str, step: int, excess: float) -> list[Event] | None:
        """While an event is open: close it after 64 observations in a row inside the gate, or take a new level."""
        unit = 1.0 if self.logarithmic else 4.0 * self.noise.sigma / GATE
        self.peak = max(self.peak, excess, key=abs)
        self.calm = self.calm + 1 if abs(excess) < max(GATE * unit, 2.0 * self.noise.sigma) else 0
        settled = step - self.detected > 1000
        if self.calm < CALM and not settled:
            return None
        words = "stays at a new level, which is learnt now" if settled else "is back at its level"
        event = self._event(name, f"channel {name} {words}.", closed=step)
        logarithmic = self.logarithmic
        if settled:
            self.__init__()
            self.logarithmic = logarithmic
        self.criterion, self.detected = "", 0
        self.change.reset()
        self.spikes.reset()
        return [event]

    def _sentence(self, name: str, value: float) -> str:
        change = f"{100.0 * math.expm1(min(self.peak, 30.0)):+.0f} %" if self.logarithmic else f"{self.peak:+.4g}"
        return (
            f"channel {name}: {self.criterion} of {change} since about step {self.onset}, now {value:.4g} (statistic "
            f"{self.statistic:.1f} >= {self.threshold:.1f})."
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
