"""DelphiFit: a law fitted to a ladder, kept as one JSON file, that forecasts any run of the ladder's recipe."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from trajectory_guard.channel import MAX_CHANNELS
from trajectory_guard.conventions import Split
from trajectory_guard.errors import FileFormatError, RecipeMismatchError, TrajectoryGuardError
from trajectory_guard.files import read_json, write_json
from trajectory_guard.forecast import Forecast
from trajectory_guard.ladder import Ladder
from trajectory_guard.laws.backtest import BacktestRow, LawBacktest, backtest_law, score
from trajectory_guard.laws.base import Law
from trajectory_guard.laws.channel import ChannelLaw, fit_channel
from trajectory_guard.laws.interval import LEVELS, IntervalModel
from trajectory_guard.laws.registry import ALONG_TRAINING, get_law
from trajectory_guard.laws.smooth import rung_curve
from trajectory_guard.plan import RunPlan
from trajectory_guard.recipe import RecipeCheck, check_recipe

__all__ = ["DelphiFit", "RungPoints", "fit_ladder", "load_fit"]

FORMAT = "trajectory-guard-fit"
VERSION = 1

MAX_RUNG_POINTS = 200
"""A fit keeps at most so many points of each rung, for drawing."""

FAR, TOO_FAR = 1e3, 1e4
"""Compute of a plan over that of the largest rung. The farthest published forecast was 337; beyond 1,000 the interval
is itself an extrapolation, which is said; at 10,000 a forecast is refused unless overridden."""

PREFERRED_WITHIN = 1.1
"""`auto` keeps the first law in order unless another's back-test error is lower by more than a tenth."""


@dataclass(frozen=True, kw_only=True)
class RungPoints:
    """One rung as the fit saw it, thinned for drawing.

    Args:
        name: the rung's name.
        plan: its plan.
        progress: progress of each point.
        loss: nats per token at each, mean over seeds, smoothed where it was per-step loss.
        error: standard error of each in nats; 0 where it is not known.
    """

    name: str
    plan: RunPlan
    progress: tuple[float, ...]
    loss: tuple[float, ...]
    error: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        points = {name: list(getattr(self, name)) for name in ("progress", "loss", "error")}
        return {"name": self.name, "plan": self.plan.to_dict(), **points}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "RungPoints":
        """Rebuild from `to_dict`.

        Raises:
            TrajectoryGuardError: a field is missing, unknown or of the wrong type.
        """
        names = ["name", "plan", "progress", "loss", "error"]
        if not isinstance(content, Mapping) or sorted(content) != sorted(names):
            raise TrajectoryGuardError(f"a rung of a fit has the fields {names}, got {content!r:.200}")
        if not isinstance(content["name"], str) or not isinstance(content["plan"], Mapping):
            raise TrajectoryGuardError("a rung of a fit needs a string `name` and an object `plan`")
        columns = {name: _numbers(f"rung {content['name']!r}: {name}", content[name]) for name in names[2:]}
        if len({len(column) for column in columns.values()}) != 1:
            raise TrajectoryGuardError(f"rung {content['name']!r}: progress, loss and error differ in length")
        return cls(name=content["name"], plan=RunPlan.from_dict(content["plan"]), **columns)


@dataclass(frozen=True, kw_only=True, eq=False)
class DelphiFit:
    """A fitted law with what it is valid for, how well it back-tested, and the interval that follows.

    Args:
        law: name of the law.
        params: its parameters, plain JSON values.
        recipe: identity fields that a plan is compared with (`RunPlan.identity`).
        metric: name of the loss.
        split: which data it was measured on.
        rungs: points for drawing; empty in a fit that carries constants only.
        backtest: rows of every law tried on the ladder.
        refused: law -> why it could not fit the ladder.
        interval: half-width of a forecast.
        source: where the ladder was published, in a fit of someone else's runs.
        channels: name of another scalar that the ladder carries -> its course by size.

    Raises:
        TrajectoryGuardError: the law is unknown or its parameters are not valid.
    """

    law: str
    params: Mapping[str, Any]
    recipe: Mapping[str, Any]
    metric: str
    split: Split
    rungs: tuple[RungPoints, ...]
    backtest: tuple[BacktestRow, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    interval: IntervalModel
    source: str | None = None
    channels: Mapping[str, ChannelLaw] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            model = get_law(self.law).from_params(self.params)
        except TrajectoryGuardError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise TrajectoryGuardError(f"params of law {self.law!r} are not valid: {error!r}") from error
        object.__setattr__(self, "_model", model)

    @property
    def model(self) -> Law:
        """The fitted law itself."""
        return self._model  # type: ignore[attr-defined]

    @property
    def largest_flops(self) -> float | None:
        """FLOPs of the largest rung's full plan; None in a fit without rung points."""
        return max((rung.plan.total_flops for rung in self.rungs), default=None)

    def forecast(self, plan: RunPlan, *, override_recipe: bool = False) -> Forecast:
        """Return the loss to expect at every step of a run, with its interval, and the courses of its channels.

        Args:
            plan: the run; its recipe is compared with the ladder's.
            override_recipe: forecast in spite of differences that make the comparison meaningless; they stay in
                `Forecast.check` and in every report.

        Raises:
            RecipeMismatchError: the plan's recipe is another one, or its compute is 10,000 times the largest rung's.
        """
        check = self._check(plan, override_recipe)
        first = float(self.model.first_progress(plan))
        progress = np.unique(np.concatenate([np.geomspace(first, 1.0, 400), np.linspace(first, 1.0, 600)]))
        return Forecast(
            plan,
            progress=progress,
            loss=self.model.loss(plan, progress),
            half_widths={level: self.interval.half_width(plan.active_params, progress, level) for level in LEVELS},
            law=self.law,
            check=check,
            channels={name: law.course(plan.total_flops) for name, law in self.channels.items()},
        )

    def _check(self, plan: RunPlan, override: bool) -> RecipeCheck:
        check = check_recipe(self.recipe, plan.identity(), override=True)
        ratio = plan.total_flops / self.largest_flops if self.largest_flops else 0.0
        # Rounding must not decide about a plan at exactly the limit.
        if ratio >= TOO_FAR * 0.99:
            far = f"compute: the plan's {plan.total_flops:.3g} FLOPs are {ratio:.3g} times the largest rung's"
            check = dataclasses.replace(check, errors=(*check.errors, f"{far}; no ladder was tested so far out"))
        elif ratio > FAR:
            text = f"compute: the plan's FLOPs are {ratio:.3g} times the largest rung's; its interval is untested there"
            check = dataclasses.replace(check, warnings=(*check.warnings, text))
        check = dataclasses.replace(check, overridden=override and bool(check.errors))
        if check.errors and not override:
            raise RecipeMismatchError("the forecast is not for this run:\n" + check.message())
        return check

    def to_dict(self) -> dict[str, Any]:
        """Return the fit as plain JSON values (docs/formats.md)."""
        source = {} if self.source is None else {"source": self.source}
        channels = {name: law.to_dict() for name, law in self.channels.items()}
        return {
            "format": FORMAT,
            "version": VERSION,
            **source,
            "law": self.law,
            "metric": self.metric,
            "split": self.split,
            "recipe": dict(self.recipe),
            "params": dict(self.params),
            "interval": self.interval.to_dict(),
            "backtest": {"rows": [row.to_dict() for row in self.backtest], "refused": dict(self.refused)},
            "rungs": [rung.to_dict() for rung in self.rungs],
            **({"channels": channels} if channels else {}),
        }

    def save(self, path: str | Path) -> None:
        """Write the fit as JSON, atomically; equal fits give equal bytes."""
        write_json(path, self.to_dict())


def load_fit(path: str | Path) -> DelphiFit:
    """Read a fit that `DelphiFit.save` wrote, and check all of it.

    Raises:
        FileFormatError: the file is missing, cut off, damaged, of a newer version, or a field is missing, unknown or
            out of range.
    """
    content = read_json(path, format=FORMAT, version=VERSION)
    names = ("law", "metric", "split", "recipe", "params", "interval", "backtest", "rungs")
    known = {"format", "version", "source", "channels", *names}
    missing, unknown = sorted(set(names) - set(content)), sorted(set(content) - known)
    if missing or unknown:
        raise FileFormatError(f"{path}: fit fields missing {missing}, unknown {unknown}; restore or refit")
    try:
        return _from_content(content)
    except FileFormatError:
        raise
    except (TrajectoryGuardError, TypeError, ValueError, OverflowError) as error:
        raise FileFormatError(f"{path}: not a valid fit: {error}") from error


def _from_content(content: Mapping[str, Any]) -> DelphiFit:
    for name, kind in (("law", str), ("metric", str), ("recipe", dict), ("params", dict), ("rungs", list)):
        if not isinstance(content[name], kind):
            raise TrajectoryGuardError(f"`{name}` must be a {kind.__name__}, got {content[name]!r:.80}")
    if not isinstance(content.get("source", ""), str):
        raise TrajectoryGuardError(f"`source` must be a str, got {content['source']!r:.80}")
    if content["split"] not in get_args(Split):
        raise TrajectoryGuardError(f"`split` must be one of {get_args(Split)}, got {content['split']!r}")
    if not isinstance(content["interval"], dict):
        raise TrajectoryGuardError(f"`interval` must be an object, got {content['interval']!r:.80}")
    check_recipe(content["recipe"], content["recipe"])  # Raises for a field of the wrong type.
    backtest = content["backtest"]
    if not isinstance(backtest, dict) or sorted(backtest) != ["refused", "rows"]:
        raise TrajectoryGuardError("`backtest` must be an object with `rows` and `refused`")
    if not isinstance(backtest["rows"], list) or not isinstance(backtest["refused"], dict):
        raise TrajectoryGuardError("`backtest.rows` must be a list and `backtest.refused` an object")
    return DelphiFit(
        law=content["law"],
        params=content["params"],
        recipe=content["recipe"],
        metric=content["metric"],
        split=content["split"],
        rungs=tuple(RungPoints.from_dict(rung) for rung in content["rungs"]),
        backtest=tuple(BacktestRow.from_dict(row) for row in backtest["rows"]),
        refused={str(law): str(reason) for law, reason in backtest["refused"].items()},
        interval=IntervalModel.from_dict(content["interval"]),
        source=content.get("source"),
        channels=_channels_from(content.get("channels", {})),
    )


def _channels_from(content: object) -> dict[str, ChannelLaw]:
    if not isinstance(content, dict) or len(content) > MAX_CHANNELS:
        raise TrajectoryGuardError(f"`channels` must be an object of at most {MAX_CHANNELS}, got {content!r:.80}")
    laws = {}
    for name, fields in content.items():
        try:
            laws[name] = ChannelLaw.from_dict(fields)
        except TrajectoryGuardError as error:
            raise TrajectoryGuardError(f"channel {name!r}: {error}") from error
    return laws


def fit_ladder(ladder: Ladder, law: str = "auto") -> DelphiFit:
    """Fit a law to a ladder, back-test it, and set the interval of its forecasts by that.

    Args:
        ladder: two or more rungs.
        law: name of a law, or `"auto"`: of the laws along training, the one with the lowest back-test error (the first
            in order within a tenth of it).

    Returns:
        The fit; it carries the back-tests of every law tried. Equal ladders give equal fits, byte for byte.

    Raises:
        TrajectoryGuardError: no law of that name, none that can fit this ladder, or a channel with too few values; the
            message says why.
    """
    names = ALONG_TRAINING if law == "auto" else (law,)
    tests = [backtest_law(get_law(name), ladder) for name in names]
    usable = [test for test in tests if test.interval is not None]
    if not usable:
        reasons = "\n".join(f"  {test.law}: {test.refused}" for test in tests)
        raise TrajectoryGuardError(f"no law fits this ladder:\n{reasons}")
    chosen = _choose(usable)
    assert chosen.interval is not None and chosen.model is not None
    return DelphiFit(
        law=chosen.law,
        params=chosen.model.to_params(),
        recipe={name: value for name, value in ladder.identity().items() if name not in chosen.model.varies},
        metric=ladder.metric,
        split=ladder.rungs[0].plan.split,
        rungs=tuple(_points(ladder)),
        backtest=tuple(row for test in tests for row in test.rows),
        refused={test.law: test.refused for test in tests if test.refused is not None},
        interval=chosen.interval,
        channels={name: fit_channel(ladder, name) for name in ladder.channels},
    )


def _choose(tests: list[LawBacktest]) -> LawBacktest:
    scores = np.array([score(test) for test in tests])
    if not np.any(np.isfinite(scores)):
        return tests[0]
    good = scores <= PREFERRED_WITHIN * np.nanmin(scores)
    return tests[int(np.flatnonzero(good)[0])]


def _points(ladder: Ladder) -> list[RungPoints]:
    points = []
    for rung in ladder.rungs:
        curve = rung_curve(rung)
        kept = np.unique(np.linspace(0, len(curve.loss) - 1, min(MAX_RUNG_POINTS, len(curve.loss))).round().astype(int))
        # Seven digits are far below any noise and keep the file small.
        columns = {
            name: tuple(float(f"{value:.7g}") for value in getattr(curve, name)[kept])
            for name in ("progress", "loss", "error")
        }
        points.append(RungPoints(name=rung.name, plan=rung.plan, **columns))
    return points


def _numbers(name: str, values: object) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        raise TrajectoryGuardError(f"{name} must be a list of numbers, got {values!r:.80}")
    return tuple(float(v) for v in values)
