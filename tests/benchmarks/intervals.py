"""Do intervals hold what they promise? Coverage over public runs held out beyond their ladders.

    python tests/benchmarks/intervals.py [--most 6] [--bootstraps 10]    # needs the public data, minutes on one thread

The schedule-aware law of each ladder forecasts larger runs (or, where a ladder has one size, unseen schedules). The
interval comes from the ladder's own nested back-tests, shrunk towards what the *other* families usually do: the pooled
constants are refitted without the tested family. Runs count equally within a family, families equally in the mean.
Beside it: the range over fits that leave one size out, and a bootstrap over runs.
"""

import argparse
import math
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
from shared_ladders import Holdout, data_folder, evaluated, holdouts

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.laws.backtest import nested_errors
from trajectory_guard.laws.base import Law
from trajectory_guard.laws.interval import (
    FLOOR,
    POWER,
    LadderPrior,
    NestedError,
    early_factor,
    fit_interval,
    size_distance,
)
from trajectory_guard.laws.registry import get_law

LAW = "schedule-aware"


@dataclass
class Case:
    holdout: Holdout
    nested: list[NestedError]
    log_ratios: list[tuple[Rung, np.ndarray, np.ndarray]]
    """Per target: the run, progress, ln(actual / forecast)."""
    spreads: dict[str, list[tuple[np.ndarray, np.ndarray]]]
    """Kind of other interval -> per target lower and upper ln ratio to the forecast, at the levels it has."""

    @property
    def largest(self) -> float:
        return max(run.plan.active_params for run in self.holdout.fit)

    def log_scales(self) -> list[float]:
        """ln of the error at ln size ratio 1, for each target that this ladder could not see or could."""
        found = defaultdict(list)
        for e in self.nested:
            found[e.target].append(0.5 * math.log(e.error**2 + FLOOR**2) - POWER * math.log(e.distance))
        beyond = [
            0.5 * math.log(np.mean((ratio / early_factor(g)) ** 2) + FLOOR**2)
            - POWER * math.log(size_distance(run.plan.active_params, self.largest))
            for run, g, ratio in self.log_ratios
        ]
        return [float(np.mean(v)) for v in found.values()] + ([float(np.mean(beyond))] if beyond else [])


def fit(runs: list[Rung]) -> Law | None:
    try:
        return get_law(LAW).fit(Ladder(rungs=tuple(replace(run, name=f"{i}") for i, run in enumerate(runs))))
    except TrajectoryGuardError:
        return None


def forecast(law: Law, run: Rung, g: np.ndarray) -> np.ndarray:
    return law.loss(run.plan, np.maximum(g, law.first_progress(run.plan)))


def others(holdout: Holdout, law: Law, bootstraps: int) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Range over fits without one size, and 80 and 95 % quantiles over resampled runs."""
    sizes = sorted({run.plan.active_params for run in holdout.fit})
    groups = [[run for run in holdout.fit if run.plan.active_params != size] for size in sizes]
    if len(sizes) == 1:
        groups = [[other for other in holdout.fit if other is not run] for run in holdout.fit]
    left = [made for made in map(fit, groups) if made is not None]
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, len(holdout.fit), len(holdout.fit)) for _ in range(bootstraps)]
    drawn = [made for made in (fit([holdout.fit[i] for i in draw]) for draw in draws) if made is not None]
    out = defaultdict(list)
    for run in holdout.targets:
        g, _ = evaluated(run)
        middle = np.log(forecast(law, run, g))
        for name, laws, low, high in (
            ("leave-one-out range", left, 0.0, 1.0),
            ("bootstrap 80 %", drawn, 0.1, 0.9),
            ("bootstrap 95 %", drawn, 0.025, 0.975),
        ):
            curves = [np.log(forecast(each, run, g)) - middle for each in laws] or [np.zeros_like(middle)]
            out[name].append(tuple(np.quantile(curves, [low, high], axis=0)))
    return dict(out)


def pooled(cases: list[Case]) -> LadderPrior:
    """Moment estimates, families weighted equally."""
    families = defaultdict(list)
    for case in cases:
        scales = case.log_scales()
        if scales:
            families[case.holdout.family].append(scales)
    centre = np.mean([np.mean([np.mean(s) for s in ladders]) for ladders in families.values()])
    within = [np.mean([np.var(s, ddof=1) for s in ladders if len(s) > 1] or [np.nan]) for ladders in families.values()]
    between = [np.mean([(np.mean(s) - centre) ** 2 for s in ladders]) for ladders in families.values()]
    sigma = max(float(np.sqrt(np.nanmean(within))), 0.2)
    return LadderPrior(
        scale=float(np.exp(centre)), between_ladders=max(float(np.sqrt(np.mean(between))), 0.2), between_targets=sigma
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=6, help="recipes of each large sweep")
    parser.add_argument("--bootstraps", type=int, default=10, help="resampled fits of each ladder")
    args = parser.parse_args()
    cases = []
    for holdout in holdouts(data_folder(), most=args.most):
        law = fit(holdout.fit)
        if law is None:
            print(f"{holdout.family} {holdout.case}: no fit")
            continue
        ratios = []
        for run in holdout.targets:
            g, loss = evaluated(run)
            if len(g):
                ratios.append((run, g, np.log(loss / forecast(law, run, g))))
        nested = nested_errors(get_law(LAW), holdout.fit)
        spreads = others(replace(holdout, targets=[run for run, _, _ in ratios]), law, args.bootstraps)
        cases.append(Case(holdout, nested, ratios, spreads))
        print(f"{holdout.family} {holdout.case}: {len(ratios)} runs, {len(nested)} nested back-tests", flush=True)
    families = sorted({case.holdout.family for case in cases})
    rows: dict[str, list[dict[str, float]]] = {}
    for family in families:
        prior = pooled([case for case in cases if case.holdout.family != family])
        own = []
        for case in (c for c in cases if c.holdout.family == family):
            for name, model in (
                ("refitted", fit_interval(case.nested, case.largest, prior=prior)),
                ("shipped", fit_interval(case.nested, case.largest)),
            ):
                for i, (run, g, ratio) in enumerate(case.log_ratios):
                    row = {}
                    for level in (0.8, 0.95):
                        width = model.half_width(run.plan.active_params, g, level)
                        row[f"{name} {level:.0%}"] = float(np.mean(np.abs(ratio) <= width))
                        row[f"{name} width {level:.0%}"] = float(100 * np.median(width))
                    for kind, bounds in case.spreads.items():
                        low, high = bounds[i]
                        row[kind] = float(np.mean((ratio >= low) & (ratio <= high)))
                    own.append(row) if name == "refitted" else own[i - len(case.log_ratios)].update(row)
        rows[family] = own
        print(f"{family}: pooled without it k0 {100 * prior.scale:.2f} %, tau {prior.between_ladders:.2f}, "
              f"sigma {prior.between_targets:.2f}")  # fmt: skip
    names = list(next(iter(rows.values()))[0])
    print(f"{'':24}" + " ".join(f"{family:>9}" for family in families) + f" {'mean':>9}")
    for name in names:
        pick = np.median if "width" in name else np.mean
        values = [float(pick([row[name] for row in rows[family]])) for family in families]
        unit = 1.0 if "width" in name else 100.0
        mean = float(np.mean(values))
        print(f"{name:24}" + " ".join(f"{unit * v:9.2f}" for v in values) + f" {unit * mean:9.2f}")


if __name__ == "__main__":
    main()
