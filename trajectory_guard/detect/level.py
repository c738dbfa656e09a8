"""LevelWatch: every level test over one stream of residuals: noise, baseline, changes, the forecast's promise."""

import math
from dataclasses import dataclass

from trajectory_guard.detect.baseline import BLOCK, Baseline
from trajectory_guard.detect.change import (
    MID_DRIFT,
    MID_THRESHOLD,
    SLOW_DRIFT,
    SMOOTHING,
    Cusum,
    slow_threshold,
)
from trajectory_guard.detect.evidence import ALARM, VARIANCE, Evidence
from trajectory_guard.detect.noise import CLIP, NoiseScale, autocorrelation, long_run_factor
from trajectory_guard.detect.state import PlainState

__all__ = ["CALIBRATION", "Alarm", "LevelWatch"]

CALIBRATION = 400
"""Observations after warm-up that the level and the correlation of the noise are learnt from."""
FIRST_SCALE = 20
"""Observations before the first scale: the off-forecast test begins here."""
SMOOTHED_ABOVE = 0.3
"""Lag-1 autocorrelation above which the logged loss counts as smoothed or the data as unshuffled."""
MAD_TO_SIGMA = 1.4826
"""sd / median |value| of a Gaussian: 1 / 0.6745."""
RELEARN = 64
"""Observations until a noise scale that was forgotten counts as known again: at least two looks at it."""
ALERT = 0.5 * MID_THRESHOLD
"""Mid sum from which the certified evidence is looked at with every observation, not once a block: what it can certify
within a block lifts the mid sum this far first."""


@dataclass(slots=True)
class Alarm:
    """A criterion that holds at this step.

    Args:
        criterion: `"slow"`, `"mid"`, `"certified"` (changes) or `"off_forecast"`.
        sign: +1 above, -1 below.
        onset: estimated first step.
        statistic: its value.
        threshold: its limit.
        size_nats: mean residual since the onset over what was expected, nats.
    """

    criterion: str
    sign: int
    onset: int
    statistic: float
    threshold: float
    size_nats: float


class LevelWatch(PlainState):
    """Tests over residuals r = loss - forecast; u = (r - b) / s with the run's own level b and scale s.

    Observation i counts from the anchor. Until `CALIBRATION` only the off-forecast tests run (from `FIRST_SCALE` on).
    b, s and the gates used at a step are known before its residual is: the certified bound needs that.

    Every observation is judged at once, and learnt from in blocks: it waits in `pending`, as (loss, residual, weight,
    clipped excess in nats), until the owner calls `learn`, which it does when `observation` reaches `due`.
    """

    __slots__ = (
        "baseline",
        "bend",
        "calibrated",
        "caution",
        "caution_until",
        "certified_down",
        "certified_up",
        "due",
        "mean",
        "mid",
        "noise",
        "observation",
        "off_active",
        "off_down",
        "off_onset",
        "off_up",
        "pending",
        "rho",
        "sample",
        "sigma",
        "slow",
        "slow_limit",
        "statistic",
        "threshold",
        "u",
        "variance",
    )

    def __init__(self) -> None:
        self.noise = NoiseScale()
        self.baseline = Baseline()
        self.slow, self.mid = Cusum(), Cusum()
        self.certified_up, self.certified_down = Evidence(), Evidence()
        self.off_up, self.off_down = Evidence(), Evidence()
        self.off_onset = Cusum()
        # Whether the off-forecast tests have anything to carry on.
        self.off_active = False
        self.sample: list[float] = []
        self.pending: list[tuple[float, float, float, float]] = []
        self.observation = 0
        self.due = FIRST_SCALE
        self.calibrated = False
        self.slow_limit = slow_threshold(CALIBRATION)
        # Share of the gate that the forecast may bend within the time that the baseline takes to follow.
        self.bend = 0.0
        # Factor on the noise scale while it is not certain, and the observation until which it holds.
        self.caution = 1.0
        self.caution_until = 0
        self.mean = 0.0
        self.rho = 0.0
        self.variance = 1.0
        self.u = math.nan
        self.sigma = math.nan
        self.statistic = math.nan
        self.threshold = math.nan

    def broken_assumptions(self) -> tuple[str, ...]:
        """Say what the bound behind the certified tests assumes and the calibration contradicts."""
        found = []
        if self.rho > SMOOTHED_ABOVE:
            found.append(f"its bound is not proved here: residuals are correlated ({self.rho:.2f} at lag 1)")
        if self.variance > VARIANCE:
            found.append(f"its bound is not proved here: the variance is {self.variance:.1f} > {VARIANCE:g} sigma^2")
        return tuple(found)

    @property
    def level(self) -> float:
        """The run's own level b against its forecast, nats."""
        return self.baseline.level

    def anchor(self, *, keep_noise: bool) -> None:
        """Begin calibrating anew; keep the noise scale where only the level is expected to move."""
        self.hold()
        self.observation = 0
        self.due = FIRST_SCALE
        self.calibrated = False
        self.sample = []
        self.u = math.nan
        if not keep_noise:
            self.noise = NoiseScale()
        self.rest()

    def rest(self) -> None:
        """Set every statistic to zero: an excursion has ended."""
        for cusum in (self.slow, self.mid, self.off_onset):
            cusum.reset()
        for evidence in (self.certified_up, self.certified_down, self.off_up, self.off_down):
            evidence.reset()
        self.off_active = False
        self.mean = 0.0

    def hold(self) -> None:
        """Stop learning, and forget what waits to be learnt of the level: it may hold the beginning of a fault."""
        self.skip()
        self.baseline.drop_waiting()

    def relearn_noise(self, caution: float) -> None:
        """Take the noise from new differences only; until they are enough, its scale counts `caution` times."""
        self.pending = []
        self.noise.forget()
        self.caution = caution
        self.caution_until = self.observation + RELEARN

    def update(
        self,
        step: int,
        loss: float,
        residual: float,
        gate: float,
        promise: float,
        root_weight: float = 1.0,
        frozen: bool = False,
    ) -> list[Alarm] | None:
        """Take one finite observation.

        Args:
            step: its step.
            loss: the loss, nats.
            residual: loss - forecast, nats.
            gate: smallest change that may be flagged, nats (a third of the forecast's 80 % half-width).
            promise: the forecast's 95 % half-width, nats; infinite where the off-forecast test does not apply.
            root_weight: sqrt(tokens averaged in this loss / reference tokens).
            frozen: an excursion is open: learn nothing.

        Returns:
            The alarms that hold, or None.
        """
        self.observation = i = self.observation + 1
        self.sigma = sigma = self.noise.sigma * self.caution / root_weight
        if i == self.caution_until:
            self.caution = 1.0
        calibrated = self.calibrated
        alarms = None
        learnt = 0.0
        if calibrated or (i > FIRST_SCALE and sigma == sigma):
            close = promise - sigma
            if residual > close or -residual > close or self.off_active:
                alarms = self._off_forecast(step, residual, promise, sigma)
            self.u = u = (residual - self.baseline.level) / sigma
            if calibrated:
                clipped = CLIP if u > CLIP else -CLIP if u < -CLIP else u
                learnt = sigma * clipped
                found = self._changes(step, u, clipped, gate / sigma, sigma)
                if found:
                    alarms = alarms + found if alarms else found
        if not frozen:
            self.pending.append((loss, residual, root_weight, learnt))
            if not calibrated:
                self.sample.append(residual)
        return alarms

    def learn(self) -> list[float]:
        """Learn from what waits: the noise scale, the level; return the absolute differences of the residuals, nats."""
        pending, self.pending = self.pending, []
        noise, i = self.noise, self.observation
        self.due = i + BLOCK if self.calibrated else min(i + BLOCK, CALIBRATION)
        if not pending:
            return []
        losses, residuals, root_weights, clipped = zip(*pending, strict=True)
        differences = noise.add(residuals, losses, root_weights)
        if self.calibrated:
            self.baseline.add(self.baseline.level * len(pending) + math.fsum(clipped), len(pending))
            self.slow_limit = slow_threshold(i)
        else:
            self.baseline.level = sorted(self.sample)[len(self.sample) // 2]
            if i >= CALIBRATION:
                self._calibrate()
        return differences

    def skip(self) -> None:
        """Note an observation that no test can use."""
        self.learn()
        self.noise.skip()

    def _calibrate(self) -> None:
        noise, sample = self.noise, self.sample
        if noise.sigma != noise.sigma:
            # Too few neighbours among them for a scale: begin anew.
            self.anchor(keep_noise=True)
            return
        # The correlation is judged at the white scale; the final scale follows from it.
        noise.lrv = 1.0
        noise.refresh()
        self.baseline.calibrate(sample, noise.sigma)
        b = self.baseline.level
        # Of strongly correlated noise the differences are far smaller than the values: clip at the values' scale.
        spread = max(noise.sigma, MAD_TO_SIGMA * sorted(abs(r - b) for r in sample)[len(sample) // 2])
        self.rho = autocorrelation([min(CLIP, max(-CLIP, (r - b) / spread)) for r in sample])
        noise.lrv = long_run_factor(self.rho)
        noise.refresh()
        self.variance = sum((r - b) ** 2 for r in sample) / len(sample) / noise.sigma**2
        self.sample = []
        self.calibrated = True
        self.due = self.observation + BLOCK
        self.slow_limit = slow_threshold(self.observation)

    def _off_forecast(self, step: int, residual: float, promise: float, sigma: float) -> list[Alarm] | None:
        above, below = (residual - promise) / sigma, (-residual - promise) / sigma
        onset = self.off_onset
        rise = 4.0 if above > 4.0 else -4.0 if above < -4.0 else above
        fall = 4.0 if below > 4.0 else -4.0 if below < -4.0 else below
        onset.update(step, rise, fall, residual)
        onset.cap(1e3)
        alarms = []
        for sign, evidence, z in ((1, self.off_up, above), (-1, self.off_down, below)):
            if evidence.update(z) >= ALARM:
                alarms.append(
                    Alarm("off_forecast", sign, onset.onset(sign), evidence.statistic, ALARM, onset.mean(sign))
                )
        self.off_active = (onset.up or onset.down or self.off_up.statistic or self.off_down.statistic) > 0.0
        return alarms or None

    def _changes(self, step: int, u: float, y: float, gate: float, sigma: float) -> list[Alarm] | None:
        self.mean += (y - self.mean) / SMOOTHING
        bend = self.bend * gate
        slow_drift = SLOW_DRIFT + bend
        mid_drift = (gate if gate > MID_DRIFT else MID_DRIFT) + 0.5 * bend
        slow_limit = self.slow_limit
        slow = self.slow.update(step, y - slow_drift, -y - slow_drift, u)
        mid = self.mid.update(step, y - mid_drift, -y - mid_drift, u)
        up, down = self.certified_up, self.certified_down
        up.pending.append(u - gate)
        down.pending.append(-u - gate)
        if mid > ALERT or len(up.pending) == BLOCK:
            up.settle()
            down.settle()

        if mid / MID_THRESHOLD > slow / slow_limit:
            self.statistic, self.threshold = mid, MID_THRESHOLD
        else:
            self.statistic, self.threshold = slow, slow_limit
        if slow < slow_limit and mid < MID_THRESHOLD and up.statistic < ALARM and down.statistic < ALARM:
            return None
        return self._alarms(step, gate, slow_drift, sigma)

    def _alarms(self, step: int, gate: float, slow_drift: float, sigma: float) -> list[Alarm] | None:
        """Return the change alarms that hold, some statistic being over its limit; `gate` in sigmas."""
        slow, mid, limit = self.slow, self.mid, self.slow_limit
        slow.cap(2.0 * limit)
        mid.cap(2.0 * MID_THRESHOLD)
        alarms = []
        for sign, evidence in ((1, self.certified_up), (-1, self.certified_down)):
            if mid.total(sign) >= MID_THRESHOLD:
                size = mid.mean(sign) * sigma
                alarms.append(Alarm("mid", sign, mid.onset(sign), mid.total(sign), MID_THRESHOLD, size))
            if slow.total(sign) >= limit:
                # The sum holds what the clipped residuals have over the drift.
                excess = slow.total(sign) / slow.count(sign) + slow_drift
                if sign * self.mean >= gate or excess >= gate:
                    size = slow.mean(sign) * sigma
                    alarms.append(Alarm("slow", sign, slow.onset(sign), slow.total(sign), limit, size))
            if evidence.statistic >= ALARM:
                best = mid if mid.total(sign) else slow
                size, onset = best.mean(sign) * sigma, best.onset(sign) if best.total(sign) else step
                alarms.append(Alarm("certified", sign, onset, evidence.statistic, ALARM, size))
        return alarms or None
