"""TrajectoryGuard: one observation per optimizer step in, one verdict out. Only wiring: the tests stand in detect/."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from trajectory_guard.actions import Action, Actions
from trajectory_guard.detect.events import Event, Severity, Stage, Verdict
from trajectory_guard.detect.judge import LossJudge, note
from trajectory_guard.detect.nonfinite import NonFiniteWatch
from trajectory_guard.detect.onlookers import Onlookers
from trajectory_guard.detect.replayed import Replayed
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.expectation import Expectation
from trajectory_guard.forecast import Forecast
from trajectory_guard.journal import Journal
from trajectory_guard.observation import loss_value, step_value, tokens_value
from trajectory_guard.sinks.base import Sink

__all__ = ["TrajectoryGuard"]

logger = logging.getLogger("trajectory_guard")

STATE_VERSION = 1


class TrajectoryGuard:
    """Watch one run's loss against its forecast, one observation per optimizer step.

    Until the forecast begins only non-finite losses and the first loss are judged; until warm-up is over the forecast
    is shown but no change judged; then 400 observations calibrate the run's own level and noise (the off-forecast test
    already runs), and from there on everything is watched. docs/detection.md says what every event means.

    Args:
        forecast: what the loss should be.
        actions: severity (or its name), or kind of event -> `"log"`, `"warn"`, `"checkpoint"`, `"stop"`, `"raise"`, a
            callable taking the event, or several of these. By default INFO is logged, everything above warns, and
            nothing stops.
        sinks: where verdicts and events are written.
        log_every_n_steps: steps between verdicts that go to the sinks; events always go.
        loss_scaler: the run trains under a fp16 loss scaler, where a lone non-finite loss is normal.

    Raises:
        TrajectoryGuardError: `actions` names an unknown severity, kind or action.

    Example:
        >>> from trajectory_guard.lr_schedule import LRSchedule
        >>> from trajectory_guard.plan import RunPlan
        >>> plan = RunPlan(total_steps=100, tokens_per_step=8, active_params=10, schedule=LRSchedule(shape="linear"))
        >>> forecast = Forecast(plan, progress=[0.0, 1.0], loss=[4.0, 3.0], half_widths={0.8: 0.01, 0.95: 0.02})
        >>> with TrajectoryGuard(forecast, actions={"non_finite": "stop"}) as guard:
        ...     verdict = guard.observe(1, 4.1)
        ...     bad = guard.observe(2, float("nan"))
        >>> verdict.stage, round(verdict.residual_nats, 2), guard.should_stop, bad.events[0].kind
        ('calibrating', 0.11, True, 'non_finite')
    """

    def __init__(
        self,
        forecast: Forecast,
        *,
        actions: Mapping[Severity | str, Action | Sequence[Action]] | None = None,
        sinks: Sequence[Sink] = (),
        log_every_n_steps: int = 50,
        loss_scaler: bool = False,
    ) -> None:
        if not isinstance(forecast, Forecast):
            raise TrajectoryGuardError(
                f"forecast must be a Forecast, got {type(forecast).__name__}; see fit.forecast()"
            )
        if not isinstance(log_every_n_steps, int) or log_every_n_steps < 1:
            raise TrajectoryGuardError(f"log_every_n_steps must be a positive integer, got {log_every_n_steps!r}")
        self.forecast = forecast
        self.log_every_n_steps = log_every_n_steps
        self._actions = Actions(actions)
        self._journal = Journal(sinks, self._actions)
        self._expectation = Expectation(forecast)
        plan = forecast.plan
        self._warmup_end = math.ceil(float(plan.step_at(plan.schedule.warmup)) - 1e-9)
        vocabulary = plan.recipe.vocab_size
        self._judge = LossJudge()
        self._onlookers = Onlookers(
            uniform_nats=math.log(vocabulary) if vocabulary and vocabulary > 1 else math.nan,
            first_judged_step=max(forecast.first_step, self._warmup_end + 1),
            last_step=plan.total_steps,
        )
        self._non_finite = NonFiniteWatch(loss_scaler=loss_scaler)
        self._replayed = Replayed()
        self._last_step = 0
        self._frontier = 0
        self._next_log = 0
        self._root_weight = 1.0
        self._weighed_tokens = math.nan
        self._started = False
        self._closed = False
        self._broken: set[str] = set()

    @property
    def should_stop(self) -> bool:
        """Whether a configured action asks the loop to stop."""
        return self._actions.stop

    @property
    def checkpoint_requested(self) -> bool:
        """Whether a configured action asks for a checkpoint; `note_checkpoint` clears it."""
        return self._actions.checkpoint

    @property
    def events(self) -> tuple[Event, ...]:
        """The latest state of every event, oldest flag first (the latest 128)."""
        return self._journal.events

    @property
    def open_events(self) -> tuple[Event, ...]:
        """The events that are not over."""
        return tuple(event for event in self._journal.events if event.state == "open")

    @property
    def last_step(self) -> int:
        """Step of the latest observation; 0 before the first."""
        return self._last_step

    def observe(
        self, step: int, loss: Any, *, tokens: float | None = None, channels: Mapping[str, Any] | None = None
    ) -> Verdict:
        """Judge the loss of one optimizer step.

        Args:
            step: completed optimizer updates, this one included (1-based). Steps may be skipped. A repeated step is
                compared with its first loss; a step further back is a run that went back: it is said, and the steps
                trained again are compared.
            loss: mean cross-entropy in nats per token: a number, or a tensor or array of one element. NaN and
                infinities are observations. A device tensor is read at once, which waits for the device.
            tokens: predicted tokens averaged in this loss (it sets the noise); never cumulative.
            channels: other scalars of this step, such as `{"grad_norm": 1.3}`.

        Returns:
            The verdict on this step.

        Raises:
            TrajectoryGuardError: an argument is not what it should be; the message says what to do.
            DivergenceError: an event's configured action is `"raise"`; everything was written before.
        """
        step = step_value(step)
        loss = loss if type(loss) is float else loss_value(loss)
        if tokens is not None:
            tokens = tokens_value(tokens)
        if not self._started:
            self._start()
        expected, lower, upper, gate, promise = self._expectation.at(step)
        known = expected == expected
        finite = loss - loss == 0.0
        events: list[Event] = []
        repeated = step == self._last_step
        if step < self._last_step:
            self._try("rewind", events, self._go_back, step, expected)
        self._try("non_finite", events, self._non_finite.update, step, loss, expected)
        if not repeated:
            self._last_step = step
            self._try("onlookers", events, self._onlookers.before, step, loss, known, self._judge)
        if step <= self._frontier:
            self._try("replayed", events, self._compare, step, loss)
        else:
            self._frontier = step
            if finite:
                self._replayed.remember(step, loss)
        stage = self._stage(step, known)
        if finite and not repeated and (stage == "calibrating" or stage == "watching"):
            self._try("judge", events, self._weigh_and_judge, step, loss, expected, gate, promise, tokens)
            self._try("onlookers", events, self._onlookers.after, step, self._judge)
        elif not finite:
            self._judge.skip()

        level = self._judge.level
        residual = loss - expected
        sigma = level.sigma
        verdict = Verdict(
            step,
            loss,
            expected,
            lower,
            upper,
            residual,
            residual / sigma if sigma > 0.0 else math.nan,
            stage,
            level.statistic if stage == "watching" else math.nan,
            level.threshold if stage == "watching" else math.nan,
            tuple(events),
        )
        log = step >= self._next_log
        if log:
            self._next_log = (step // self.log_every_n_steps + 1) * self.log_every_n_steps
        if log or events:
            error = self._journal.write(verdict, log=log)
            if error:
                raise error
        return verdict

    def note_checkpoint(self, step: int) -> None:
        """Note that a checkpoint of `step` exists: events suggest rolling back to the newest safe one."""
        checkpoints = self._judge.checkpoints
        checkpoints.append(step_value(step))
        # An onset is at most some hundred steps back: older checkpoints only matter as the very last resort.
        del checkpoints[1:-200]
        self._actions.checkpoint = False

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain Python values, without NaN: it may be saved as JSON or by torch.save."""
        return {
            "format": "trajectory-guard-state",
            "version": STATE_VERSION,
            "last_step": self._last_step,
            "frontier": self._frontier,
            "next_log": self._next_log,
            "root_weight": self._root_weight,
            "weighed_tokens": None if math.isnan(self._weighed_tokens) else self._weighed_tokens,
            "should_stop": self._actions.stop,
            "checkpoint_requested": self._actions.checkpoint,
            "judge": self._judge.state(),
            "onlookers": self._onlookers.state(),
            "non_finite": self._non_finite.state(),
            "replayed": self._replayed.state(),
            "events": self._journal.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `state_dict` returned: the guard goes on as if it had never stopped.

        Raises:
            TrajectoryGuardError: the state is of a newer version, or damaged.
        """
        if not isinstance(state, Mapping) or state.get("format") != "trajectory-guard-state":
            raise TrajectoryGuardError("this is not the state of a trajectory guard; pass what state_dict() returned")
        if state.get("version") != STATE_VERSION:
            raise TrajectoryGuardError(
                f"the guard state has version {state.get('version')!r}, this release reads {STATE_VERSION}; "
                "resume with the release that wrote it, or start the guard anew"
            )
        try:
            self._judge.load_state(state["judge"])
            self._onlookers.load_state(state["onlookers"])
            self._non_finite.load_state(state["non_finite"])
            self._replayed.load_state(state["replayed"])
            self._journal.load_state(state["events"])
            self._last_step, self._frontier = int(state["last_step"]), int(state["frontier"])
            self._next_log, self._root_weight = int(state["next_log"]), float(state["root_weight"])
            weighed = state["weighed_tokens"]
            self._weighed_tokens = math.nan if weighed is None else float(weighed)
            self._actions.stop = bool(state["should_stop"])
            self._actions.checkpoint = bool(state["checkpoint_requested"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise TrajectoryGuardError(f"the guard state is damaged ({error}); start the guard anew") from error
        self._started = False

    def flush(self) -> None:
        """Bring to disk what the sinks hold."""
        self._journal.flush()

    def close(self) -> None:
        """Flush and close the sinks; called once at the end of the run."""
        if not self._closed:
            self._closed = True
            self._journal.flush()
            self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._started = True
        self._journal.start(self.forecast, self._last_step or None)

    def _stage(self, step: int, known: bool) -> Stage:
        if not known:
            return "no_forecast"
        if step <= self._warmup_end:
            return "warm_up"
        return "watching" if self._judge.level.calibrated else "calibrating"

    def _weigh_and_judge(
        self, step: int, loss: float, expected: float, gate: float, promise: float, tokens: float | None
    ) -> list[Event] | None:
        planned = self._expectation.batch_tokens(step)
        averaged = planned if tokens is None else tokens
        found = None
        if averaged != self._weighed_tokens:
            found = self._onlookers.weigh(step, averaged, planned, self._judge)
            self._weighed_tokens = averaged
            self._root_weight = self._onlookers.root_weight
        events = self._judge.observe(step, loss, expected, gate, promise, self._root_weight)
        return events if found is None else found + (events or [])

    def _compare(self, step: int, loss: float) -> list[Event] | None:
        if not math.isfinite(loss):
            return None
        found = self._replayed.compare(step, loss)
        return None if found is None else [self._onlookers.replayed_event(step, *found)]

    def _go_back(self, step: int, expected: float) -> list[Event]:
        """The run went back: the level and the noise are known, every statistic starts at zero."""
        self._replayed.begin()
        self._next_log = step
        sentence = (
            f"the run went back from step {self._last_step} to step {step}: statistics start anew, level and noise are "
            "kept, and losses of steps trained again are compared with the remembered ones."
        )
        return [note("rewound", step, sentence), *self._judge.rewind(step, expected)]

    def _try(self, name: str, events: list[Event], call: Callable[..., list[Event] | None], *args: Any) -> None:
        """Collect events of one part; a part that fails is reported once and switched off: training goes on."""
        if name in self._broken:
            return
        try:
            found = call(*args)
        except Exception as error:
            self._broken.add(name)
            logger.error("the guard's part %r failed and is switched off; training goes on", name, exc_info=error)
            return
        if found:
            events.extend(found)
