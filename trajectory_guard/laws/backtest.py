"""Back-tests: forecast rungs that were held out, and choose a law and its interval by what that shows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.laws.base import Law
from trajectory_guard.laws.interval import IntervalModel, NestedError, early_factor, fit_interval, size_distance
from trajectory_guard.laws.smooth import rung_curve
from trajectory_guard.laws.terminal import TerminalFit

__all__ = ["BacktestRow", "LawBacktest", "backtest_law", "format_backtest", "score"]

Kind = Literal["nested", "leave-out"]

JUDGED_FROM = 0.05
"""Points are judged after the larger of 5 % of training and twice the warm-up."""


@dataclass(frozen=True, kw_only=True)
class BacktestRow:
    """How well the other rungs forecast one that was held out; errors are actual / forecast - 1 in percent.

    Args:
        law: the law that forecast.
        kind: `"nested"`: the smallest sizes forecast a larger one; `"leave-out"`: all others forecast it.
        target: the rung held out.
        fitted: the rungs fitted.
        mean_percent, max_percent: mean and maximum absolute error over the judged progress.
        final_percent: signed error at the end of training; None where the rung did not get there.
        inside_80, inside_95: share of points inside the interval that the fitted rungs alone would have promised.
    """

    law: str
    kind: Kind
    target: str
    fitted: tuple[str, ...]
    mean_percent: float
    max_percent: float
    final_percent: float | None
    inside_80: float
    inside_95: float

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "BacktestRow":
        """Rebuild from plain JSON values.

        Raises:
            TrajectoryGuardError: a field is missing, unknown or of the wrong type.
        """
        names = [f.name for f in fields(cls)]
        if not isinstance(content, Mapping) or sorted(content) != sorted(names):
            raise TrajectoryGuardError(f"a back-test row has the fields {names}, got {content!r:.200}")
        for name in ("law", "kind", "target"):
            if not isinstance(content[name], str):
                raise TrajectoryGuardError(f"back-test field `{name}` must be a string, got {content[name]!r}")
        if content["kind"] not in get_args(Kind):
            raise TrajectoryGuardError(f"back-test `kind` must be one of {get_args(Kind)}, got {content['kind']!r}")
        for name in names[4:]:
            value = content[name]
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number and not (name == "final_percent" and value is None):
                raise TrajectoryGuardError(f"back-test field `{name}` must be a number, got {value!r}")
        if not isinstance(content["fitted"], (list, tuple)) or not all(isinstance(v, str) for v in content["fitted"]):
            raise TrajectoryGuardError(f"back-test `fitted` must list rung names, got {content['fitted']!r}")
        return cls(**{**content, "fitted": tuple(content["fitted"])})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {**asdict(self), "fitted": list(self.fitted)}


@dataclass(frozen=True, kw_only=True)
class LawBacktest:
    """Back-test of one law on one ladder.

    Args:
        law: its name.
        rows: nested rows first, then one leave-out row per rung.
        interval: what the nested rows promise for a target beyond the ladder.
        model: the law fitted to the full ladder.
        refused: why the law cannot fit this ladder; then there is nothing else.
    """

    law: str
    rows: tuple[BacktestRow, ...] = ()
    interval: IntervalModel | None = None
    model: Law | None = None
    refused: str | None = None


def score(backtest: LawBacktest) -> float:
    """Return what a law is chosen by, in percent: the mean over leave-out and nested targets of their mean error.

    Targets larger than everything fitted count, since that is what a forecast is for; where a ladder is too small for
    any, the rungs left out count. Infinite for a law that refused the ladder.
    """
    if backtest.refused is not None:
        return math.inf
    for kind in get_args(Kind):
        errors = [row.mean_percent for row in backtest.rows if row.kind == kind]
        if errors:
            return float(np.mean(errors))
    return math.nan


def backtest_law(law: type[Law], ladder: Ladder) -> LawBacktest:
    """Hold out rungs of a ladder and forecast them with a law fitted on the others.

    Nested: for every j >= 2 the j smallest sizes forecast each rung of every larger size; these set the interval.
    Leave-out: each size in turn is forecast from all others (each rung, where the ladder has fewer than three sizes).
    The terminal law is tested on its optima, a compute budget standing for a size.

    Args:
        law: the class to test.
        ladder: the full ladder.

    Returns:
        Rows, interval and the law fitted to the full ladder, or the reason why the law refused it.
    """
    tester = _Tester(law)
    try:
        model = tester.fit(ladder.rungs)
    except TrajectoryGuardError as error:
        return LawBacktest(law=law.name, refused=str(error))
    if isinstance(model, TerminalFit):
        return _backtest_budgets(model)
    rows, interval = tester.nested(ladder.rungs)
    sizes = _sizes(ladder.rungs)
    for group in sizes if len(sizes) > 2 else [[rung] for rung in ladder.rungs]:
        rest = tuple(rung for rung in ladder.rungs if rung not in group)
        model_of_rest = tester.try_fit(rest)
        if model_of_rest is not None:
            promised = tester.nested(rest)[1]
            compared = [(rung, _compare(model_of_rest, rung)) for rung in group]
            rows += [_row(law.name, "leave-out", rung, rest, c, promised) for rung, c in compared]
    return LawBacktest(law=law.name, rows=tuple(rows), interval=interval, model=model)


class _Tester:
    """Fits of one law on parts of a ladder, each made once."""

    def __init__(self, law: type[Law]) -> None:
        self.law = law
        self._fits: dict[frozenset[str], Law | TrajectoryGuardError] = {}

    def fit(self, rungs: Sequence[Rung]) -> Law:
        key = frozenset(rung.name for rung in rungs)
        if key not in self._fits:
            try:
                self._fits[key] = self.law.fit(Ladder(rungs=tuple(rungs)))
            except TrajectoryGuardError as error:
                self._fits[key] = error
        made = self._fits[key]
        if isinstance(made, TrajectoryGuardError):
            raise made
        return made

    def try_fit(self, rungs: Sequence[Rung]) -> Law | None:
        """Fit part of a ladder, or nothing where the part alone is too little for the law."""
        try:
            return self.fit(rungs)
        except TrajectoryGuardError:
            return None

    def nested(self, rungs: Sequence[Rung]) -> tuple[list[BacktestRow], IntervalModel]:
        errors, compared = self._nested_errors(rungs)
        rows = []
        for count, fitted, rung, c in compared:
            # Only what the fitted sizes knew of themselves may set the interval of their forecast.
            promised = fit_interval([e for e in errors if e.target < count], _params(fitted))
            rows.append(_row(self.law.name, "nested", rung, fitted, c, promised))
        return rows, fit_interval(errors, _params(rungs), sizes=len(_sizes(rungs)))

    def _nested_errors(
        self, rungs: Sequence[Rung]
    ) -> tuple[list[NestedError], list[tuple[int, list[Rung], Rung, "_Compared"]]]:
        sizes = _sizes(rungs)
        errors: list[NestedError] = []
        compared: list[tuple[int, list[Rung], Rung, _Compared]] = []
        for count in range(2, len(sizes)):
            fitted = [rung for size in sizes[:count] for rung in size]
            model = self.try_fit(fitted)
            if model is None:
                continue
            for index in range(count, len(sizes)):
                pairs = [(rung, _compare(model, rung)) for rung in sizes[index]]
                distance = size_distance(_params(sizes[index]), _params(fitted))
                rms = float(np.sqrt(np.mean([c.scaled_rms**2 for _, c in pairs])))
                errors.append(NestedError(index, distance, rms))
                compared += [(count, fitted, rung, c) for rung, c in pairs]
        return errors, compared


def _backtest_budgets(fit: TerminalFit) -> LawBacktest:
    """Nested back-test of the terminal law: the optima of the smallest budgets forecast those of larger ones."""
    optima = fit.optima
    names = [f"optimum at {optimum.compute:.3g} FLOPs" for optimum in optima]
    errors: list[NestedError] = []
    compared: list[tuple[int, int, float]] = []
    for count in range(3, len(optima)):
        smaller = TerminalFit(optima[:count])
        for index in range(count, len(optima)):
            ratio = math.log(optima[index].loss / float(smaller.expect(optima[index].compute)))
            distance = size_distance(optima[index].params, optima[count - 1].params)
            errors.append(NestedError(index, distance, abs(ratio) / float(early_factor(1.0))))
            compared.append((count, index, ratio))
    rows = []
    for count, index, ratio in compared:
        promised = fit_interval([e for e in errors if e.target < count], optima[count - 1].params)
        inside = [abs(ratio) <= float(promised.half_width(optima[index].params, 1.0, v)) for v in (0.8, 0.95)]
        percent = 100.0 * math.expm1(ratio)
        rows.append(
            BacktestRow(
                law=fit.name,
                kind="nested",
                target=names[index],
                fitted=tuple(names[:count]),
                mean_percent=abs(percent),
                max_percent=abs(percent),
                final_percent=percent,
                inside_80=float(inside[0]),
                inside_95=float(inside[1]),
            )
        )
    return LawBacktest(law=fit.name, rows=tuple(rows), interval=fit_interval(errors, optima[-1].params), model=fit)


@dataclass(frozen=True, kw_only=True)
class _Compared:
    progress: NDArray[np.float64]
    log_ratio: NDArray[np.float64]
    noise: NDArray[np.float64]

    @property
    def scaled_rms(self) -> float:
        """Rms of the error in units of `early_factor`, less what is noise of the held-out log itself."""
        scale = early_factor(self.progress)
        return math.sqrt(max(float(np.mean((self.log_ratio / scale) ** 2 - (self.noise / scale) ** 2)), 0.0))


def _compare(model: Law, rung: Rung) -> _Compared:
    curve = rung_curve(rung)
    first = max(JUDGED_FROM, 2 * rung.plan.schedule.warmup, model.first_progress(rung.plan))
    judged = curve.progress >= min(first, float(curve.progress[-1])) * (1 - 1e-3)
    progress = np.maximum(curve.progress[judged], model.first_progress(rung.plan))
    loss = curve.loss[judged]
    return _Compared(
        progress=progress,
        log_ratio=np.log(loss / model.loss(rung.plan, progress)),
        noise=curve.error[judged] / loss,
    )


def _row(
    law: str, kind: Kind, rung: Rung, fitted: Sequence[Rung], compared: _Compared, interval: IntervalModel
) -> BacktestRow:
    percent = 100.0 * np.expm1(compared.log_ratio)
    inside = {
        level: float(
            np.mean(
                np.abs(compared.log_ratio) <= interval.half_width(rung.plan.active_params, compared.progress, level)
            )
        )
        for level in (0.8, 0.95)
    }
    return BacktestRow(
        law=law,
        kind=kind,
        target=rung.name,
        fitted=tuple(r.name for r in fitted),
        mean_percent=float(np.abs(percent).mean()),
        max_percent=float(np.abs(percent).max()),
        final_percent=float(percent[-1]) if compared.progress[-1] >= 0.98 else None,
        inside_80=inside[0.8],
        inside_95=inside[0.95],
    )


def _params(rungs: Sequence[Rung]) -> float:
    return max(rung.plan.active_params for rung in rungs)


def _sizes(rungs: Sequence[Rung]) -> list[list[Rung]]:
    """Rungs grouped by active parameters (equal within 2 %), smallest first."""
    groups: list[list[Rung]] = []
    for rung in sorted(rungs, key=lambda r: (r.plan.active_params, r.plan.total_flops, r.name)):
        if groups and rung.plan.active_params <= 1.02 * groups[-1][0].plan.active_params:
            groups[-1].append(rung)
        else:
            groups.append([rung])
    return groups


def format_backtest(rows: Sequence[BacktestRow]) -> str:
    """Return rows as an aligned text table.

    Example:
        >>> print(format_backtest([]))
        no back-test: the ladder is too small to hold a rung out
    """
    if not rows:
        return "no back-test: the ladder is too small to hold a rung out"
    head = ("law", "kind", "held out", "fitted", "mean %", "max %", "final %", "in 80 %", "in 95 %")
    table = [head] + [
        (
            row.law,
            row.kind,
            row.target,
            str(len(row.fitted)),
            f"{row.mean_percent:.2f}",
            f"{row.max_percent:.2f}",
            "-" if row.final_percent is None else f"{row.final_percent:+.2f}",
            f"{100 * row.inside_80:.0f}",
            f"{100 * row.inside_95:.0f}",
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < 3 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    )
