"""LossJudge: all tests over the loss of one run, wired into events."""

import math

from trajectory_guard.detect.events import Event, Severity
from trajectory_guard.detect.excursion import Excursion, rollback_step
from trajectory_guard.detect.level import Alarm, LevelWatch
from trajectory_guard.detect.noise import NoiseChange, prior_sigma
from trajectory_guard.detect.notes import OUTLIER_PAUSE, Scene, noise_event, outlier_event, pairing_lost_event
from trajectory_guard.detect.paired import PairedWatch
from trajectory_guard.detect.plateau import Course
from trajectory_guard.detect.runaway import LOST, Runaway
from trajectory_guard.detect.spike import NEEDED, SHARE, SIGMAS, Spikes
from trajectory_guard.detect.state import PlainState
from trajectory_guard.detect.units import ratio_hint
from trajectory_guard.detect.wording import level_sentence, percent, recovery_sentence

__all__ = ["LossJudge"]

CERTAIN = frozenset({"certified", "certified_paired", "off_forecast"})
PAIRED = frozenset({"paired", "certified_paired"})
"""Criteria with a proved bound, and criteria of the paired stream."""
SPIKE_HOLD = 32
"""Observations after a spike's flag in which CUSUM warnings wait: most spikes are over by then."""
TOO_GOOD = 0.05
"""Share of the forecast below which a loss cannot be true."""
PRIOR_FACTOR = 2.0
"""The noise expected of a batch size is multiplied by this until 20 observations have shown it: a logged loss may be
one rank's micro-batch, 2-3 times noisier."""


class LossJudge(PlainState):
    """Level watch, spikes, runaway, noise changes, and the one excursion that they open together.

    `untrained` is ln(vocabulary size), or the first loss seen, in nats; NaN while unknown. `reference_tokens` are the
    tokens per observation that the noise scale belongs to.
    """

    __slots__ = (
        "checkpoints",
        "course",
        "excursion",
        "last_outlier",
        "level",
        "noise_change",
        "paired",
        "reference_tokens",
        "runaway",
        "spikes",
        "untrained",
    )

    def __init__(self) -> None:
        self.level = LevelWatch()
        self.paired = PairedWatch()
        self.spikes = Spikes()
        self.runaway = Runaway()
        self.noise_change = NoiseChange()
        self.course = Course()
        self.excursion = Excursion()
        self.last_outlier = -OUTLIER_PAUSE
        self.untrained = math.nan
        self.reference_tokens = 1e6
        self.checkpoints: list[int] = []

    def observe(
        self,
        step: int,
        loss: float,
        forecast: float,
        gate: float,
        promise: float,
        root_weight: float,
        reference: float = math.nan,
    ) -> list[Event] | None:
        """Take one finite observation that has a forecast; return the events that changed.

        Args:
            step: its step.
            loss: the loss, nats.
            forecast: the loss expected, nats.
            gate: smallest change to flag, nats.
            promise: half-width of the forecast's 95 % interval, nats.
            root_weight: sqrt(tokens averaged / reference tokens).
            reference: residual of a run on the same data order at this step, nats; NaN where there is none.
        """
        residual = loss - forecast
        level, excursion = self.level, self.excursion
        is_open = excursion.kind != ""
        frozen = is_open and level.calibrated
        alarms = level.update(step, loss, residual, gate, promise, root_weight, frozen)
        u = level.u
        outlier = (u > SIGMAS or u != u) and self._outlier(u, residual, forecast, root_weight)
        lost = False
        if reference == reference:
            paired = self.paired
            # What the forecast may bend in a short run, the reference's own course does not.
            narrow = gate / (1.0 + level.bend)
            found, lost = paired.update(step, loss, residual, reference, narrow, root_weight, is_open)
            if found:
                alarms = found if alarms is None else alarms + found
        events: list[Event] | None = None
        if frozen:
            self.course.add(step, 1, loss, forecast)
        elif level.observation >= level.due:
            events = self._learn(step)
        if not (is_open or alarms or outlier or lost or loss <= TOO_GOOD * forecast):
            return events
        events = events or []
        scene = Scene(step, loss, forecast, residual, level.sigma)
        if is_open:
            clip = max(3.0 * promise if promise < math.inf else 0.0, 2.0 * LOST * (self.untrained - forecast))
            if self._update_excursion(step, residual, gate, promise, clip):
                return [*events, self._close(step, recovery_sentence(excursion, forecast, level.sigma), forecast)]
        if lost:
            events.append(pairing_lost_event(step, self.paired.pairing.correlation))
        if loss <= TOO_GOOD * forecast:
            self._raise(events, scene, "too_good", Severity.CRITICAL, -1, step, loss / forecast, TOO_GOOD, residual)
        if outlier and self.spikes.add(step, level.observation):
            steps, size = self.spikes.steps, residual - level.level
            self._raise(events, scene, "spike", Severity.WARNING, 1, steps[0], float(len(steps)), float(NEEDED), size)
        elif outlier and not is_open and level.observation - self.last_outlier >= OUTLIER_PAUSE:
            self.last_outlier = level.observation
            events.append(outlier_event(scene, level.level))
        for alarm in alarms or ():
            self._alarm(events, scene, alarm)
        if excursion.kind and excursion.sign > 0:
            self._look_for_runaway(events, scene)
        return events

    def skip(self, step: int) -> list[Event] | None:
        """Note an observation that is not finite: it enters no state but the gap."""
        events = self._learn(step)
        self.level.skip()
        return events

    def anchor(self, step: int, reason: str, forecast: float, *, keep_noise: bool) -> list[Event]:
        """Begin calibrating anew, where the level is expected to move; return the events that this closes."""
        events = []
        if self.excursion.kind:
            events.append(self._close(step, f"closed at step {step}: {reason}.", forecast))
        self.level.anchor(keep_noise=keep_noise)
        self.paired.anchor()
        self.spikes.reset()
        self.noise_change = NoiseChange()
        return events

    def rewind(self, step: int, forecast: float) -> list[Event]:
        """Go back to an earlier step with the level and noise known: statistics start at zero."""
        events = []
        if self.excursion.kind:
            events.append(self._close(step, f"closed: the run went back to step {step}.", forecast))
        self.level.rest()
        self.paired.rest()
        self.level.hold()
        self.paired.level.hold()
        self.spikes.reset()
        self.course = Course()
        self.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint < step]
        return events

    def open_event(self, forecast: float) -> Event | None:
        """Return the open event as it stands, or None."""
        return self._event("", forecast) if self.excursion.kind else None

    def _learn(self, step: int) -> list[Event] | None:
        """Learn from the observations that wait; tell of noise that has changed."""
        level = self.level
        if level.pending:
            losses, residuals, _, _ = zip(*level.pending, strict=True)
            self.course.add(step, len(losses), sum(losses), sum(losses) - sum(residuals))
        calibrated = level.calibrated
        differences = level.learn()
        ratio = self.noise_change.update(differences, level.noise.sigma) if calibrated else None
        return None if ratio is None else [noise_event(step, ratio)]

    def _outlier(self, u: float, residual: float, forecast: float, root_weight: float) -> bool:
        """Whether an observation over 5 sigmas, or one before the first scale (`u` NaN), is an outlier."""
        level = self.level
        if u == u:
            return residual - level.level > SHARE * forecast
        before = level.sample[:-1]
        if len(before) < 2 or residual <= SHARE * forecast:
            return False
        excess = residual - sorted(before)[(len(before) - 1) // 2]
        sigma = PRIOR_FACTOR * prior_sigma(forecast, self.reference_tokens) / root_weight
        return excess > max(SIGMAS * sigma, SHARE * forecast)

    def _update_excursion(self, step: int, residual: float, gate: float, promise: float, clip: float) -> bool:
        excursion, paired = self.excursion, self.paired
        if paired.used and not PAIRED.isdisjoint(excursion.criteria):
            # What the paired tests saw may be far too small to be followed in the unpaired noise.
            level = paired.level
            return excursion.update(step, paired.residual, level.level, level.sigma, gate, promise, clip, level.mean)
        level = self.level
        return excursion.update(step, residual, level.level, level.sigma, gate, promise, clip, level.mean)

    def _alarm(self, events: list[Event], scene: Scene, alarm: Alarm) -> None:
        excursion = self.excursion
        certain = alarm.criterion in CERTAIN
        if excursion.kind == "spike" and alarm.sign > 0:
            if not certain and scene.step - excursion.detected < SPIKE_HOLD:
                return
            spike_onset = excursion.onset
            kind = "off_forecast" if alarm.criterion == "off_forecast" else "change_up"
            events.append(self._end_spike(scene, kind))
            if abs(alarm.onset - spike_onset) <= 100:
                alarm.onset = spike_onset
        kind = "off_forecast" if alarm.criterion == "off_forecast" else "change_up" if alarm.sign > 0 else "change_down"
        severity = Severity.CERTIFIED if certain else Severity.WARNING
        self._raise(
            events,
            scene,
            kind,
            severity,
            alarm.sign,
            alarm.onset,
            alarm.statistic,
            alarm.threshold,
            alarm.size_nats,
            criterion=alarm.criterion,
        )

    def _raise(
        self,
        events: list[Event],
        scene: Scene,
        kind: str,
        severity: Severity,
        sign: int,
        onset: int,
        statistic: float,
        threshold: float,
        size: float,
        criterion: str = "",
        rule: str = "",
    ) -> None:
        """Open the excursion or add a criterion to the open one; what is known already is no news."""
        excursion = self.excursion
        criterion = criterion or kind
        if not excursion.kind:
            level = self.paired.level if criterion in PAIRED else self.level
            origin = 0.0 if kind in ("off_forecast", "too_good") else level.level
            excursion.open(kind=kind, sign=sign, onset=onset, step=scene.step, size=size, origin=origin)
            events.extend(self._learn(scene.step) or ())
            self.level.hold()
            self.paired.level.hold()
            self.runaway.reset()
        elif sign != excursion.sign or criterion in excursion.criteria:
            # On the other side of an open excursion: the swing back of the same one, which must end first.
            return
        known = Severity(excursion.severity)
        excursion.add(criterion, severity, statistic, threshold)
        if len(excursion.criteria) > 1 and severity <= known:
            return
        notes = self._notes(scene, severity, rule)
        sigma = scene.sigma if scene.sigma == scene.sigma else 0.0
        size = size if len(excursion.criteria) == 1 else excursion.smooth - excursion.origin
        rollback = rollback_step(self.checkpoints, excursion.onset, excursion.detected) if sign > 0 else None
        sentence = level_sentence(excursion, size, scene.forecast, sigma, rollback=rollback, notes=notes)
        events.append(self._event(sentence, scene.forecast, size=size))

    def _notes(self, scene: Scene, severity: Severity, rule: str) -> tuple[str, ...]:
        excursion = self.excursion
        notes = [rule] if rule else []
        if severity == Severity.CERTIFIED:
            notes.extend(self.level.broken_assumptions())
        if excursion.kind != "spike":
            expected = scene.forecast + excursion.origin
            hint = ratio_hint((expected + excursion.smooth - excursion.origin) / expected)
            if hint:
                notes.append(f"it looks like {hint}")
        if excursion.sign > 0 and scene.sigma == scene.sigma:
            label = self.course.plateau(excursion.onset, scene.sigma)
            if label:
                notes.append(label)
        return tuple(notes)

    def _look_for_runaway(self, events: list[Event], scene: Scene) -> None:
        excursion, level = self.excursion, self.level.level
        holding = excursion.kind == "spike" and scene.step - excursion.detected < SPIKE_HOLD
        if holding or "runaway" in excursion.criteria or not scene.sigma > 0.0:
            return
        found = self.runaway.update(
            scene.residual - level, excursion.smooth - level, scene.sigma, self.untrained - scene.forecast
        )
        if found:
            rule, statistic, threshold = found
            onset = excursion.onset
            if excursion.kind == "spike":
                events.append(self._end_spike(scene, "runaway"))
            self._raise(
                events,
                scene,
                "runaway",
                Severity.CRITICAL,
                1,
                onset,
                statistic,
                threshold,
                excursion.smooth - level,
                rule=rule,
            )

    def _event(self, sentence: str, forecast: float, *, closed: int | None = None, size: float | None = None) -> Event:
        excursion = self.excursion
        size = excursion.peak if size is None else size
        sigma = self.level.sigma
        return Event(
            kind=excursion.kind,
            severity=Severity(excursion.severity),
            state="open" if closed is None else "closed",
            onset=excursion.onset,
            detected=excursion.detected,
            closed=closed,
            size_nats=size,
            size_percent=percent(size, forecast),
            size_sigma=size / sigma if sigma > 0.0 else None,
            statistic=excursion.statistic,
            threshold=excursion.threshold,
            rollback_step=rollback_step(self.checkpoints, excursion.onset, excursion.detected)
            if excursion.sign > 0
            else None,
            sentence=sentence,
        )

    def _end_spike(self, scene: Scene, successor: str) -> Event:
        sentence = f"the spike of step {self.excursion.onset} did not return and goes on as {successor}."
        event = self._event(sentence, scene.forecast, closed=scene.step)
        self.excursion.clear()
        return event

    def _close(self, step: int, sentence: str, forecast: float) -> Event:
        event = self._event(sentence, forecast, closed=step)
        self.excursion.clear()
        self.level.rest()
        self.paired.rest()
        self.runaway.reset()
        return event
