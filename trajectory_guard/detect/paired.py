"""Paired residuals: the noise that two runs on the same data order share is subtracted before judging."""

import math
from itertools import pairwise

from trajectory_guard.detect.change import Cusum
from trajectory_guard.detect.level import CALIBRATION, Alarm, LevelWatch
from trajectory_guard.detect.replayed import correlation
from trajectory_guard.detect.state import PlainState

__all__ = ["PairedWatch", "Pairing"]

WINDOW = 256
"""Pairs that slope and correlation are learnt from."""
FIRST = 64
"""Pairs before the reference is used at all."""
REFRESH = 32
USEFUL = 0.8
"""Correlation from which pairing is on: at 0.8 it removes 40 % of the noise (sd); runs that share a data order have
0.996-0.999, runs that do not about 0."""
LOST = 0.6
"""Correlation below which it is off again, so that it does not flicker."""


class Pairing(PlainState):
    """Slope and correlation between the residuals of a run and those of its reference, over the last 256 pairs.

    r' = r - slope x r_ref. The slope is least squares over the window; both are taken anew every 32 pairs, so that the
    values used at a step were known before it.
    """

    __slots__ = ("active", "correlation", "own", "position", "reference", "seen", "slope")

    def __init__(self) -> None:
        self.active = False
        self.correlation = 0.0
        self.slope = 0.0
        self.own: list[float] = []
        self.reference: list[float] = []
        self.position = 0
        self.seen = 0

    def update(self, residual: float, reference: float) -> float | None:
        """Take one pair of finite residuals in nats; return r' while the pairing is on, else None."""
        paired = residual - self.slope * reference if self.active else None
        if len(self.own) < WINDOW:
            self.own.append(residual)
            self.reference.append(reference)
        else:
            self.own[self.position] = residual
            self.reference[self.position] = reference
            self.position = (self.position + 1) % WINDOW
        self.seen += 1
        if self.seen % REFRESH == 0 and self.seen >= FIRST:
            self._learn()
        return paired

    def drop(self) -> None:
        """Switch off and forget what was learnt."""
        self.__init__()

    def _learn(self) -> None:
        # Differences of neighbours: blind to a level that one of the runs has left, which is what is looked for.
        order = [*range(self.position, len(self.own)), *range(self.position)]
        own = [self.own[b] - self.own[a] for a, b in pairwise(order)]
        reference = [self.reference[b] - self.reference[a] for a, b in pairwise(order)]
        self.correlation = correlation(own, reference)
        power = sum(value * value for value in reference)
        slope = sum(a * b for a, b in zip(own, reference, strict=True)) / power if power > 0.0 else 0.0
        self.active = self.correlation >= (LOST if self.active else USEFUL)
        if self.active:
            self.slope = slope


SHORT = 8.0
"""Observations of the running means that tell within a few steps that a reference has ended to fit."""
SMOOTHS = 0.75
"""Ratio of paired to raw differences up to which paired alarms count; at correlation 0.8 it is 0.6."""
FAST_CLIP, FAST_DRIFT, FAST_THRESHOLD = 4.0, 1.0, 12.0
"""Fast test on paired residuals: their tails are light enough for it. In sigmas; measured by
tests/benchmarks/detection.py."""


class PairedWatch(PlainState):
    """The level tests on paired residuals, and a fast one; silent while the pairing is off.

    `residual` and `used` tell of the latest observation: its paired residual, and whether there was one.
    """

    __slots__ = ("before", "fast", "level", "pairing", "raw", "residual", "rough", "smooth", "used")

    def __init__(self) -> None:
        self.pairing = Pairing()
        self.level = LevelWatch()
        self.fast = Cusum()
        self.residual = 0.0
        self.used = False
        # Of the latest observation: raw and paired residual; running means of their absolute differences.
        self.before = math.nan
        self.raw = math.nan
        self.rough = 0.0
        self.smooth = 0.0

    def rest(self) -> None:
        """Set every statistic to zero: an excursion has ended."""
        self.level.rest()
        self.fast.reset()

    def anchor(self) -> None:
        """Begin calibrating anew."""
        self.level.anchor(keep_noise=False)
        self.rest()

    def update(
        self, step: int, loss: float, residual: float, reference: float, gate: float, root_weight: float, frozen: bool
    ) -> tuple[list[Alarm] | None, bool]:
        """Take one observation; return its alarms, and whether the pairing was lost at it.

        Args:
            step: its step.
            loss: the loss, nats.
            residual: loss - forecast, nats.
            reference: residual of the reference at this step, nats; NaN where there is none.
            gate: smallest change to flag, nats.
            root_weight: sqrt(tokens averaged / reference tokens).
            frozen: an excursion is open: learn nothing.
        """
        self.used = False
        if reference != reference:
            return None, False
        was_active = self.pairing.active
        paired = self.pairing.update(residual, reference)
        if paired is None:
            return None, False
        self.used, self.residual = True, paired
        if self._fell_apart(residual, paired):
            self.pairing.drop()
            self.anchor()
            return None, True
        level = self.level
        alarms = level.update(step, loss, paired, gate, math.inf, root_weight, frozen and level.calibrated) or []
        if level.observation >= level.due:
            level.learn()
        for alarm in alarms:
            alarm.criterion = "certified_paired" if alarm.criterion == "certified" else "paired"
        if level.observation > CALIBRATION:
            u = level.u
            drift = max(FAST_DRIFT, gate / level.sigma)
            # Above the gate as far as below it: a reference that fits very well must not be the slower for it.
            limit = max(FAST_CLIP, drift + FAST_CLIP - FAST_DRIFT)
            clipped = min(limit, max(-limit, u))
            fast = self.fast
            if fast.update(step, clipped - drift, -clipped - drift, u) >= FAST_THRESHOLD:
                fast.cap(2.0 * FAST_THRESHOLD)
                sign = 1 if fast.up > fast.down else -1
                size = fast.mean(sign) * level.sigma
                alarms.append(Alarm("paired", sign, fast.onset(sign), fast.total(sign), FAST_THRESHOLD, size))
        if was_active and not self.pairing.active:
            self.anchor()
            return None, True
        # A level can only have moved if the pairing still smooths: else the reference's own noise is what is seen.
        return (alarms or None) if self.smooth < SMOOTHS * self.rough else None, False

    def _fell_apart(self, residual: float, paired: float) -> bool:
        """Whether subtracting the reference has stopped making the residuals smoother."""
        rough, smooth = abs(residual - self.raw), abs(paired - self.before)
        self.raw, self.before = residual, paired
        if rough != rough:
            return False
        self.rough += (rough - self.rough) / SHORT
        self.smooth += (smooth - self.smooth) / SHORT
        return self.smooth > self.rough > 0.0
