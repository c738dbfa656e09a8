"""What every adapter does: from paths, objects and a framework's horizon to a guard that is fed by an intake."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from trajectory_guard.actions import Action
from trajectory_guard.detect.events import Severity
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.fit import DelphiFit, load_fit
from trajectory_guard.forecast import Forecast
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.intake import ChannelSource, LossIntake
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan
from trajectory_guard.report import ReportSink
from trajectory_guard.sinks.base import Sink
from trajectory_guard.sinks.console import ConsoleSink
from trajectory_guard.sinks.jsonl import JsonlSink
from trajectory_guard.sinks.loggers import logger_sinks
from trajectory_guard.sinks.scalars import check_name

__all__ = ["FitSource", "GuardConfig", "PlanSource"]

FitSource = str | Path | DelphiFit | Forecast
"""A fit's file, a fit, or a forecast that is already made."""

PlanSource = str | Path | RunPlan | None
"""A plan's file, a plan, or None where the plan is made from the framework's horizon and a few numbers."""


@dataclass(frozen=True)
class GuardConfig:
    """What a user says about a guard, whatever the framework; checked before anything runs.

    Args:
        fit: file of a fit, a `DelphiFit`, or a finished `Forecast` (which holds its plan).
        plan: file of a plan or a `RunPlan`. Without one the horizon is the framework's, and `tokens_per_step` and
            `active_params` are needed.
        tokens_per_step: training tokens of one optimizer update, over all micro-batches and ranks.
        active_params: parameters used by one token, counted as the ladder's were.
        schedule: learning rate over its peak along progress; by default assumed to be the fit's.
        actions: severity or kind of event -> action, as `TrajectoryGuard` takes them.
        log_every_n_steps: steps between logged verdicts, by default the framework's, else 50; every step is checked.
        events_path: file of the event log, JSON lines; None for no file.
        report_path: report of the run, `.html` or `.png`, written when it ends, is stopped or fails; None for no file.
        console: print to the console.
        name: first part of every tag, and part of the key of the state: several guards of one run need several names.
        override_recipe: accept a plan whose recipe makes the comparison meaningless; events then say so.
        sinks: further sinks, such as `TensorBoardSink(folder)` or `WandbSink()`, used on the main process.
        channels: called at the end of every optimizer step for other scalars to watch, by name.

    Raises:
        TrajectoryGuardError: numbers are missing, or contradict a plan or a finished forecast.
        FileFormatError: a file cannot be read.
        MissingExtraError: a report is asked for and matplotlib is not installed.
    """

    fit: FitSource
    plan: PlanSource = None
    _: KW_ONLY
    tokens_per_step: int | None = None
    active_params: float | None = None
    schedule: LRSchedule | None = None
    actions: Mapping[str, Action | Sequence[Action]] | None = None
    log_every_n_steps: int | None = None
    events_path: str | Path | None = None
    report_path: str | Path | None = None
    console: bool = True
    name: str = "guard"
    override_recipe: bool = False
    sinks: Sequence[Sink] = ()
    channels: ChannelSource = None

    def __post_init__(self) -> None:
        check_name(self.name)
        numbers = ("tokens_per_step", "active_params", "schedule")
        given = [name for name in numbers if getattr(self, name) is not None]
        missing = [name for name in numbers[:2] if getattr(self, name) is None]
        planned = self.plan is not None or isinstance(self.fit, Forecast)
        if isinstance(self.fit, Forecast) and self.plan is not None:
            raise TrajectoryGuardError("a Forecast holds its plan already; give plan=None, or a fit instead")
        if planned and given:
            raise TrajectoryGuardError(
                f"{', '.join(given)}: the plan says that already; give a plan or these, not both"
            )
        if not planned and missing:
            raise TrajectoryGuardError(
                f"without a plan, {' and '.join(missing)} must be given: tokens of one optimizer update over all "
                "micro-batches and ranks, and parameters used by one token; or give plan=..."
            )
        if isinstance(self.fit, (str, Path)):
            object.__setattr__(self, "fit", load_fit(self.fit))
        if isinstance(self.plan, (str, Path)):
            object.__setattr__(self, "plan", RunPlan.load(self.plan))
        if self.report_path is not None:
            ReportSink(self.report_path)  # What is wrong with it is said now, not at the end of the run.

    def forecast(self, total_steps: float | None) -> tuple[Forecast, tuple[str, ...]]:
        """Return the forecast for a framework's horizon, and what should be said about it.

        Args:
            total_steps: the framework's horizon in optimizer updates; None, infinite or negative when it has no end.

        Raises:
            TrajectoryGuardError: neither plan nor framework has a horizon.
            RecipeMismatchError: the fit is for another recipe.
        """
        steps = int(total_steps) if total_steps is not None and 0 < total_steps < math.inf else None
        notes = []
        if isinstance(self.fit, Forecast):
            forecast = self.fit
        else:
            assert isinstance(self.fit, DelphiFit)
            plan = self.plan
            if plan is None:
                plan, note = self._plan_of(self.fit, steps)
                notes.append(note)
            assert isinstance(plan, RunPlan)
            forecast = self.fit.forecast(plan, override_recipe=self.override_recipe)
        if steps is not None and steps != forecast.plan.total_steps:
            notes.append(
                f"the trainer ends at step {steps:,}, the plan at {forecast.plan.total_steps:,}; "
                "the forecast is for the plan"
            )
        return forecast, tuple(notes)

    def open(
        self,
        *,
        total_steps: float | None,
        accumulation: int,
        world_size: int,
        main_process: bool,
        loss_scaler: bool = False,
        loggers: Iterable[Any] = (),
        log_every_n_steps: int | None = None,
    ) -> LossIntake:
        """Build guard and intake for a run, and print what was inferred.

        Args:
            total_steps: the framework's horizon in optimizer updates; None, infinite or negative when it has no end.
            accumulation: micro-batches per optimizer update at the start, to be printed.
            world_size: ranks; with more than one the loss is averaged over them.
            main_process: this rank writes and prints. Every rank judges.
            loss_scaler: the run trains under a fp16 loss scaler.
            loggers: loggers of the framework, with `log_metrics(metrics, step)`.
            log_every_n_steps: the framework's own interval of logging, if it has one.
        """
        forecast, notes = self.forecast(total_steps)
        outlets: list[Sink] = []
        if main_process:
            outlets += [ConsoleSink()] if self.console else []
            outlets += logger_sinks(loggers, name=self.name)
            outlets += [JsonlSink(self.events_path)] if self.events_path is not None else []
            if self.report_path is not None:
                outlets.append(ReportSink(self.report_path, fit=self.fit if isinstance(self.fit, DelphiFit) else None))
            outlets += self.sinks
        guard = TrajectoryGuard(
            forecast,
            actions=self._actions(),
            sinks=outlets,
            log_every_n_steps=self.log_every_n_steps or log_every_n_steps or 50,
            loss_scaler=loss_scaler,
        )
        tokens = forecast.plan.batch_phases[0][1]
        self.say(
            f"{forecast.plan.total_steps:,} steps, accumulation {accumulation}, world size {world_size}, "
            f"{tokens:,} tokens per step",
            *notes,
            main_process=main_process,
        )
        return LossIntake(guard, average_ranks=world_size > 1, channels=self.channels)

    def resume(self, intake: LossIntake, state: Mapping[str, Any] | None, *, step: int, main_process: bool) -> None:
        """Take over the state of a checkpoint, and say what was found.

        Args:
            intake: as `open` returned it.
            state: the guard's state in the checkpoint, None where there is none or no checkpoint.
            step: the framework's own step: 0 for a run from the start.
            main_process: this rank prints.
        """
        if state is not None:
            intake.load_state_dict(state)
            self.say(f"state of step {intake.step:,} restored from the checkpoint", main_process=main_process)
        elif step:
            words = f"WARNING: the checkpoint has no state of {self.name!r}; the guard starts anew"
            self.say(words, main_process=main_process)

    def say(self, *sentences: str, main_process: bool = True) -> None:
        """Print sentences on the main process, when the console is wanted."""
        for sentence in sentences if main_process and self.console else ():
            print(f"trajectory-guard: {sentence}", flush=True)

    def _actions(self) -> Mapping[Severity | str, Action | Sequence[Action]]:
        return {name: action for name, action in (self.actions or {}).items()}

    def _plan_of(self, fit: DelphiFit, steps: int | None) -> tuple[RunPlan, str]:
        if steps is None:
            raise TrajectoryGuardError(
                "the run has no end, and a forecast needs its horizon; set the trainer's max_steps or max_epochs, "
                "or give plan=..."
            )
        assert self.tokens_per_step is not None and self.active_params is not None
        schedule, note = self.schedule, "learning-rate schedule as given"
        if schedule is None and "lr_schedule" in fit.recipe:
            schedule = LRSchedule.from_dict(fit.recipe["lr_schedule"])
            note = f"learning-rate schedule assumed to be the fit's ({schedule.describe()}); it was not checked"
        plan = RunPlan(
            total_steps=steps,
            tokens_per_step=self.tokens_per_step,
            active_params=self.active_params,
            schedule=schedule or LRSchedule(shape="constant"),
            metric=fit.metric,
            split=fit.split,
        )
        return plan, note
