"""What calibration on a run's start and the outlook are worth, on public runs held out beyond their ladders.

    python tests/benchmarks/calibration.py [--most 8]    # needs the public data, a few minutes on one thread

For every held-out run: the schedule-aware law of its ladder forecasts it; the calibration reads its window; the mean
absolute error of the points after the window is compared with and without. The outlook is compared with the forecast's
own end, at several progress values. Families count equally; laws/calibrate.py cites the ratio at their median.
"""

import argparse
from collections import defaultdict

import numpy as np
from shared_ladders import data_folder, holdouts

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.forecast import Forecast
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.laws import calibrate as module
from trajectory_guard.laws.base import Law
from trajectory_guard.laws.registry import get_law

SHARES = (0.25, 0.5, 0.75, 1.0)
SEEN = (0.15, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9)


def forecast_of(law: Law, run: Rung) -> Forecast:
    first = law.first_progress(run.plan)
    progress = np.unique(np.concatenate([np.geomspace(first, 1, 300), np.linspace(first, 1, 300)]))
    return Forecast(run.plan, progress=progress, loss=law.loss(run.plan, progress), half_widths={0.8: 0.01})


def later_errors(forecast: Forecast, run: Rung) -> dict[float, float] | None:
    """Mean absolute error in percent after the window, by share carried forward; 0 is the forecast itself."""
    curve = run.curves[0]
    _, last = module.calibration_window(run.plan)
    late = (curve.step > last) & (curve.step <= run.plan.total_steps)
    if late.sum() < 3:
        return None
    try:
        made = module.calibrate(forecast, curve.step, curve.loss)
    except TrajectoryGuardError:
        return None
    plain = np.asarray(forecast.loss(curve.step[late]))
    shift = (np.asarray(made.forecast.loss(curve.step[late])) - plain) / module.CARRIED
    return {
        share: float(100 * np.mean(np.abs(curve.loss[late] / (plain + share * shift) - 1))) for share in (0.0, *SHARES)
    }


def final_errors(forecast: Forecast, run: Rung, seen: float) -> tuple[float, float] | None:
    """Recent log ratio at progress `seen`, and log ratio at the end."""
    curve = run.curves[0]
    progress = run.plan.progress(curve.step)
    end = (progress > 0.98) & (progress <= 1.0)
    reached = progress <= seen
    if not end.any() or not reached.any() or run.plan.step_at(seen) < module.outlook_from(run.plan):
        return None
    recent = module.recent_log_ratio(forecast, curve.step[reached], curve.loss[reached])
    if recent is None:
        return None
    return recent, float(np.mean(np.log(curve.loss[end] / np.asarray(forecast.loss(curve.step[end])))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=8, help="recipes of each large sweep")
    most = parser.parse_args().most
    later: dict[str, list[dict[float, float]]] = defaultdict(list)
    final: dict[float, dict[str, list[tuple[float, float]]]] = {seen: defaultdict(list) for seen in SEEN}
    for case in holdouts(data_folder(), most=most):
        try:
            law = get_law("schedule-aware").fit(Ladder(rungs=tuple(case.fit)))
        except TrajectoryGuardError as error:
            print(f"{case.family} {case.case}: {error}")
            continue
        for run in case.targets:
            forecast = forecast_of(law, run)
            errors = later_errors(forecast, run)
            if errors is not None:
                later[case.family].append(errors)
            for seen in SEEN:
                pair = final_errors(forecast, run, seen)
                if pair is not None:
                    final[seen][case.family].append(pair)
    print("mean absolute error after the window, %, by share carried forward")
    print(f"{'family':10} {'runs':>5} " + " ".join(f"{share:6.2f}" for share in (0.0, *SHARES)))
    table = {family: np.mean([list(e.values()) for e in errors], axis=0) for family, errors in later.items()}
    for family, row in table.items():
        print(f"{family:10} {len(later[family]):5} " + " ".join(f"{v:6.3f}" for v in row))
    ratios = np.array([row / row[0] for row in table.values()])
    print(f"{'median of ratios':16} " + " ".join(f"{v:6.3f}" for v in np.median(ratios, axis=0)))
    print("rms error at the end over the forecast's own, median of families, by share of the recent ratio carried")
    for seen, families in final.items():
        ratio = []
        for pairs in families.values():
            recent, end = np.transpose(pairs)
            ratio.append([np.sqrt(np.mean((end - c * recent) ** 2) / np.mean(end**2)) for c in (0.0, *SHARES)])
        print(f"seen {seen:4.0%} ({len(ratio)} families): " + " ".join(f"{v:6.3f}" for v in np.median(ratio, axis=0)))


if __name__ == "__main__":
    main()
