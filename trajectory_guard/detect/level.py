"""LevelWatch: every level test over one stream of residuals: noise, baseline, changes, the forecast's promise."""

import math
from dataclasses import dataclass

from trajectory_guard.detect.baseline import Baseline
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
REFRESH = 32
"""Observations between two looks at the scale."""


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
    """

    __slots__ = (
        "baseline",
        "bend",
        "caution",
        "caution_until",
        "certified_down",
        "certified_up",
        "mean",
        "mid_down",
        "mid_up",
        "noise",
        "observation",
        "off_down",
        "off_onset_down",
        "off_onset_up",
        "off_up",
        "rho",
        "sample",
        "sigma",
        "slow_down",
        "slow_up",
        "statistic",
        "threshold",
        "u",
        "variance",
    )

    def __init__(self) -> None:
        self.noise = NoiseScale()
        self.baseline = Baseline()
        self.slow_up, self.slow_down = Cusum(), Cusum()
        self.mid_up, self.mid_down = Cusum(), Cusum()
        self.certified_up, self.certified_down = Evidence(), Evidence()
        self.off_up, self.off_down = Evidence(), Evidence()
        self.off_onset_up, self.off_onset_down = Cusum(), Cusum()
        self.sample: list[float] = []
        self.observation = 0
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

    @property
    def calibrated(self) -> bool:
        """Whether level and scale are known."""
        return self.observation >= CALIBRATION

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
        self.observation = 0
        self.sample = []
        self.baseline.drop_waiting()
        if not keep_noise:
            self.noise = NoiseScale()
        self.rest()

    def rest(self) -> None:
        """Set every statistic to zero: an excursion has ended."""
        for cusum in (self.slow_up, self.slow_down, self.mid_up, self.mid_down, self.off_onset_up, self.off_onset_down):
            cusum.reset()
        for evidence in (self.certified_up, self.certified_down, self.off_up, self.off_down):
            evidence.reset()
        self.mean = 0.0

    def relearn_noise(self, caution: float) -> None:
        """Take the noise from new differences only; until they are enough, its scale counts `caution` times."""
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
        noise = self.noise
        sigma = noise.sigma * self.caution / root_weight
        self.observation = i = self.observation + 1
        calibrating = i <= CALIBRATION
        alarms = None
        if sigma == sigma and (i > FIRST_SCALE or not calibrating):
            alarms = self._off_forecast(step, residual, promise, sigma)
            self.u = u = (residual - self.baseline.level) / sigma
            if not calibrating:
                found = self._changes(step, i, u, gate / sigma, sigma)
                alarms = found if alarms is None else alarms + (found or [])
                if not frozen:
                    self.baseline.add(self.baseline.level + sigma * (CLIP if u > CLIP else -CLIP if u < -CLIP else u))
        self.sigma = sigma
        if i == self.caution_until:
            self.caution = 1.0
        if not frozen:
            noise.add(residual, loss, root_weight)
            if calibrating:
                self._calibrate(i, residual)
            elif i % REFRESH == 0:
                noise.refresh()
        return alarms or None

    def skip(self) -> None:
        """Note an observation that no test can use."""
        self.noise.skip()

    def _calibrate(self, i: int, residual: float) -> None:
        sample = self.sample
        sample.append(residual)
        if i == FIRST_SCALE or i % REFRESH == 0:
            self.noise.refresh()
            self.baseline.level = sorted(sample)[len(sample) // 2]
        if i == CALIBRATION:
            # The correlation is judged at the white scale; the final scale follows from it.
            noise = self.noise
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

    def _off_forecast(self, step: int, residual: float, promise: float, sigma: float) -> list[Alarm] | None:
        above, below = (residual - promise) / sigma, (-residual - promise) / sigma
        if above < -1.0 and below < -1.0 and not (self.off_up.statistic or self.off_down.statistic):
            # Well inside, and no evidence to carry: what `Evidence.update` would do to both sides.
            if self.off_onset_up.seen or self.off_onset_down.seen:
                self.off_onset_up.update(step, max(above, -4.0), residual, 0.0, 1e3)
                self.off_onset_down.update(step, max(below, -4.0), -residual, 0.0, 1e3)
            return None
        alarms = None
        for sign, z, evidence, onset in (
            (1, above, self.off_up, self.off_onset_up),
            (-1, below, self.off_down, self.off_onset_down),
        ):
            statistic = evidence.update(z)
            if z > 0.0 or onset.seen:
                onset.update(step, 4.0 if z > 4.0 else -4.0 if z < -4.0 else z, sign * residual, 0.0, 1e3)
            if statistic >= ALARM:
                alarm = Alarm("off_forecast", sign, onset.onset, statistic, ALARM, sign * onset.raw_mean)
                alarms = [alarm] if alarms is None else [*alarms, alarm]
        return alarms

    def _changes(self, step: int, i: int, u: float, gate: float, sigma: float) -> list[Alarm] | None:
        y = CLIP if u > CLIP else -CLIP if u < -CLIP else u
        self.mean = mean = self.mean + (y - self.mean) / SMOOTHING
        slow_limit = slow_threshold(i)
        bend = self.bend * gate
        drift = (gate if gate > MID_DRIFT else MID_DRIFT) + 0.5 * bend
        slow_drift = SLOW_DRIFT + bend
        slow_up = slow_down = mid_up = mid_down = 0.0
        # A sum at zero stays there unless this observation lifts it.
        if y > slow_drift or self.slow_up.seen:
            slow_up = self.slow_up.update(step, y, u, slow_drift, 2.0 * slow_limit)
        if -y > slow_drift or self.slow_down.seen:
            slow_down = self.slow_down.update(step, -y, -u, slow_drift, 2.0 * slow_limit)
        if y > drift or self.mid_up.seen:
            mid_up = self.mid_up.update(step, y, u, drift, 2.0 * MID_THRESHOLD)
        if -y > drift or self.mid_down.seen:
            mid_down = self.mid_down.update(step, -y, -u, drift, 2.0 * MID_THRESHOLD)
        certified_up = self.certified_up.update(u - gate)
        certified_down = self.certified_down.update(-u - gate)

        slow = slow_up if slow_up > slow_down else slow_down
        mid = mid_up if mid_up > mid_down else mid_down
        if mid / MID_THRESHOLD > slow / slow_limit:
            self.statistic, self.threshold = mid, MID_THRESHOLD
        else:
            self.statistic, self.threshold = slow, slow_limit

        if slow < slow_limit and mid < MID_THRESHOLD and certified_up < ALARM and certified_down < ALARM:
            return None
        alarms = []
        for sign, cusum, evidence in (
            (1, self.mid_up, certified_up),
            (-1, self.mid_down, certified_down),
        ):
            slow_cusum = self.slow_up if sign > 0 else self.slow_down
            if cusum.total >= MID_THRESHOLD:
                alarms.append(
                    Alarm("mid", sign, cusum.onset, cusum.total, MID_THRESHOLD, sign * cusum.raw_mean * sigma)
                )
            if slow_cusum.total >= slow_limit and (sign * mean >= gate or slow_cusum.mean >= gate):
                size = sign * slow_cusum.raw_mean * sigma
                alarms.append(Alarm("slow", sign, slow_cusum.onset, slow_cusum.total, slow_limit, size))
            if evidence >= ALARM:
                best = cusum if cusum.seen else slow_cusum
                alarms.append(
                    Alarm("certified", sign, best.onset or step, evidence, ALARM, sign * best.raw_mean * sigma)
                )
        return alarms or None
