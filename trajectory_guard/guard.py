"""TrajectoryGuard: one observation per optimizer step in, one verdict out. Only wiring: the tests stand in detect/."""

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from trajectory_guard.actions import Action, Actions
from trajectory_guard.detect.events import Event, Severity, Verdict
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.forecast import Forecast
from trajectory_guard.journal import Journal
from trajectory_guard.laws.calibrate import Calibration, Outlook, calibrate, outlook
from trajectory_guard.observation import loss_value, step_value, tokens_value
from trajectory_guard.paired import PairedReference
from trajectory_guard.planned import ChangeKind, PlannedChange
from trajectory_guard.sinks.base import Sink
from trajectory_guard.standing import Standing
from trajectory_guard.watcher import Watcher

__all__ = ["TrajectoryGuard"]

STATE_VERSION = 2


class TrajectoryGuard:
    """Watch one run's loss against its forecast, one observation per optimizer step.

    Until the forecast begins only non-finite losses and the first loss are judged; until warm-up is over the forecast
    is shown but no change judged; then 400 observations calibrate the run's own level and noise (the off-forecast test
    already runs), and from there on everything is watched. docs/detection.md says what every event means.

    Args:
        forecast: what the loss should be, and other scalars where it carries their courses.
        actions: severity (or its name), or kind of event -> `"log"`, `"warn"`, `"checkpoint"`, `"stop"`, `"raise"`, a
            callable taking the event, or several of these. By default INFO is logged, everything above warns, and
            nothing stops.
        sinks: where verdicts and events are written.
        log_every_n_steps: steps between verdicts that go to the sinks; events always go.
        loss_scaler: the run trains under a fp16 loss scaler, where a lone non-finite loss is normal.
        paired: residuals of a run on the same data order; its noise is subtracted while the two correlate.

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
        paired: PairedReference | None = None,
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
        self._watcher = Watcher(forecast, loss_scaler=loss_scaler, paired=paired)
        for change in forecast.plan.changes:
            self._watcher.declared.declare(change.step, change.kind, change.reason)
        self._next_log = 0
        self._started = False
        self._closed = False

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
        """The latest state of every event, oldest flag first (the latest 100)."""
        return self._journal.events

    @property
    def open_events(self) -> tuple[Event, ...]:
        """The events that are not over."""
        return tuple(event for event in self._journal.events if event.state == "open")

    @property
    def last_step(self) -> int:
        """Step of the latest observation; 0 before the first."""
        return self._watcher.last_step

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
            channels: other scalars of this step, such as `{"grad_norm": 1.3}`. One whose name is in
                `forecast.channels` is watched against its course there, any other against its own level.

        Returns:
            The verdict on this step.

        Raises:
            TrajectoryGuardError: an argument is not what it should be; the message says what to do.
            DivergenceError: an event's configured action is `"raise"`; everything was written before.
        """
        # The plain types that a training loop passes need no second look.
        if type(step) is not int or step < 1:
            step = step_value(step)
        if type(loss) is not float:
            loss = loss_value(loss)
        if tokens is not None and (type(tokens) is not int or tokens < 1):
            tokens = tokens_value(tokens)
        if channels:
            channels = {str(name): loss_value(value, f"channel {name}") for name, value in channels.items()}
        if not self._started:
            self._started = True
            self._journal.start(self.forecast, self._watcher.last_step or None)
        if step < self._watcher.last_step:
            self._next_log = step
        verdict = self._watcher.observe(step, loss, tokens, channels)
        if verdict.events or step >= self._next_log or self._journal.every_step:
            log = step >= self._next_log
            if log:
                self._next_log = (step // self.log_every_n_steps + 1) * self.log_every_n_steps
            standing = Standing(self.forecast, self._watcher.course, step, channels)
            error = self._journal.write(verdict, standing, log=log)
            if error:
                raise error
        return verdict

    def outlook(self, level: float = 0.8) -> Outlook | None:
        """Return the final loss to expect given what was seen, with its interval; None before 15 % of training.

        A part of the recent residual is carried to the end: half of it, and from half of training on the progress
        itself. See `laws.calibrate.outlook` for what was back-tested.

        Args:
            level: level of the interval.
        """
        step = self._watcher.last_step
        if step < 1:
            return None
        return outlook(self.forecast, step, self._watcher.course.recent_log_ratio(self.forecast, step), level=level)

    def calibration(self) -> Calibration | None:
        """Return the forecast moved by half of what the start of the run showed; nothing is judged against it.

        The start runs from 3 % of training or three times the warm-up to 10 % or later. None until it is over, and
        where fewer than three of its stretches of half a percent were seen. See `laws.calibrate.calibrate`.
        """
        try:
            return calibrate(self.forecast, *self._watcher.course.losses(self.forecast))
        except TrajectoryGuardError:
            return None

    def expect(
        self, step: int | None = None, reason: str = "", *, tokens: float | None = None, kind: ChangeKind = "data"
    ) -> None:
        """Declare a change that moves loss or noise on purpose, such as a data phase or another batch size.

        From its step on the guard learns level and noise anew from 400 observations, then says by how much the loss
        shifted. Meanwhile the forecast's interval is still watched, except when the definition of the loss changes.

        Args:
            step: first optimizer step under the new conditions; one that has passed means the next.
            reason: what changes, in words.
            tokens: instead of `step`, training tokens consumed before the change.
            kind: `"data"`, `"batch_size"`, `"lr"`, `"loss_definition"` or `"restart"`.

        Raises:
            TrajectoryGuardError: neither or both of step and tokens, no reason, or an unknown kind.
        """
        if (step is None) == (tokens is None):
            raise TrajectoryGuardError(f"expect() takes a step or tokens, one of them; got {step!r} and {tokens!r}")
        if step is None:
            plan = self.forecast.plan
            step = 1 + math.ceil(float(plan.step_at(tokens_value(tokens) / plan.total_tokens)) - 1e-9)
        change = PlannedChange(step=max(step_value(step), self._watcher.last_step + 1), reason=reason, kind=kind)
        self._watcher.declared.declare(change.step, change.kind, change.reason)

    def note_checkpoint(self, step: int) -> None:
        """Note that a checkpoint of `step` exists: events suggest rolling back to the newest safe one."""
        checkpoints = self._watcher.judge.checkpoints
        checkpoints.append(step_value(step))
        # An onset is at most some hundred steps back: older checkpoints only matter as the very last resort.
        del checkpoints[1:-200]
        self._actions.checkpoint = False

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain Python values, without NaN: it may be saved as JSON or by torch.save.

        The sinks are flushed first: a run that goes on from this state does not write anew what was logged before it.
        """
        if self._started and not self._closed:
            self._journal.flush()
        return {
            "format": "trajectory-guard-state",
            "version": STATE_VERSION,
            "next_log": self._next_log,
            "should_stop": self._actions.stop,
            "checkpoint_requested": self._actions.checkpoint,
            "watcher": self._watcher.state(),
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
            self._watcher.load_state(state["watcher"])
            self._journal.load_state(state["events"])
            self._next_log = int(state["next_log"])
            self._actions.stop = bool(state["should_stop"])
            self._actions.checkpoint = bool(state["checkpoint_requested"])
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
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
