"""Print as tables how well the laws forecast the public ladders, beside what others would have said.

    python tests/benchmarks/accuracy.py [terminal] [families] [coverage] [speed]

Everything by default, about five minutes on one core. The data lie at ../shared/data or $TRAJECTORY_GUARD_DATA. Errors
are actual / forecast - 1 in percent, over all points after max(5 % of training, twice the warm-up). The same code and
the same defaults everywhere: nothing is set per family.
"""

import statistics
import sys
import time
from collections import defaultdict
from typing import NamedTuple

import numpy as np
from baselines import ChinchillaEachStep, NearestCollapse
from shared_ladders import Holdout, by_size, data_folder, evaluated, holdouts, mixture, read

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.laws import interval as intervals
from trajectory_guard.laws.backtest import backtest_law
from trajectory_guard.laws.interval import NestedError, early_factor, fit_interval, size_distance
from trajectory_guard.laws.isoflop import isoflop_optima
from trajectory_guard.laws.progress import MatchedProgress, published_forecast
from trajectory_guard.laws.schedule import ScheduleAwareLaw
from trajectory_guard.laws.surface import Surface, fit_surface
from trajectory_guard.laws.terminal import TerminalFit

FOLDER = data_folder()


def table(head: tuple[str, ...], rows: list[tuple[str, ...]], title: str) -> None:
    print(f"\n## {title}\n")
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, tuple("-" * w for w in widths), *rows]:
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |")


def column(name: str, field: str) -> np.ndarray:
    return np.array([float(row[field]) for row in read(FOLDER, name) if row[field]])


def terminal() -> None:
    runs = [column("delphi_ladder_isoflop.csv", k) for k in ("budget_flops", "params_total", "tokens", "loss")]
    fit = TerminalFit.from_runs(*runs)
    names = ("tokens_star", "params_star", "loss_star")
    published = np.transpose([column("delphi_ladder_optima.csv", k) for k in names])
    ours = np.array([(o.tokens, o.params, o.loss) for o in fit.optima])
    print("\n# Terminal law, Delphi\n")
    print(f"optima: largest relative difference {np.max(np.abs(ours / published - 1)):.1e}")
    print(f"L* = {fit.floor:.6f} + {fit.amplitude:.4f} C^-{fit.alpha:.7f}  (published 1.644058, 121.4494, .0972360)")
    print(
        f"T* = {fit.token_law[0]:.5f} C^{fit.token_law[1]:.4f}   P* = {fit.param_law[0]:.2f} C^{fit.param_law[1]:.4f}"
    )
    held = [column("delphi_ladder_heldout.csv", k) for k in ("budget_flops", "loss")]
    rows = []
    for compute in (1e21, 1e22, 1e23):
        advice = fit.recommend(compute)
        errors = 100 * (held[1][held[0] == compute] / advice.loss - 1)
        band = 100 * (np.array(advice.bootstrap) / advice.loss - 1)
        half = {level: 100 * np.log(high / advice.loss) for level, (_, high) in advice.interval.items()}
        rows.append(
            (
                f"{compute:.0e}", f"{advice.loss:.6f}", " ".join(f"{e:+.2f}" for e in errors),
                f"{band[0]:+.1f} / {band[1]:+.1f}", f"{half[0.8]:.1f} / {half[0.95]:.1f}",
            )
        )  # fmt: skip
    table(("compute", "forecast", "errors %", "resampled 5-95 %", "half-width 80 / 95 %"), rows, "Held-out budgets")
    for floor, loss, rms in fit.sensitivity(1e23, [1.5, fit.floor, 1.75]):
        print(f"floor {floor:.3f}: 1e23 error {100 * (2.3546013832092285 / loss - 1):+.2f} %, rms {rms / fit.rms:.2f}")

    names = ("flops_at_80pct", "active_params", "tokens_full", "loss_paloma_macro_at_80pct")
    anchors = [column("snowball_67b_anchors.csv", k)[:3] for k in names]
    pinned = TerminalFit.from_runs(*anchors, floor=1.4)
    own = TerminalFit.from_optima(isoflop_optima(*anchors)).recommend(1.19e23)
    low, high = own.interval[0.95]
    print("\n# The 67B run from its three anchors (actual 2.256)\n")
    print(f"floor 1.4 pinned: {float(pinned.expect(1.19e23)):.4f} (published 2.269)")
    print(f"floor with its prior: {own.loss:.4f}, 95 % interval {low:.3f} to {high:.3f}")

    print("\n# Surface over sizes and tokens\n")
    print("The 240 Chinchilla points are not in the data: as many drawn from Epoch's constants.")
    true = Surface(floor=1.8172, a=482.01, b=2085.43, alpha=0.3478, beta=0.3658)
    rng = np.random.default_rng(0)
    n = np.exp(rng.uniform(np.log(5e7), np.log(1.6e10), 240))
    d = np.exp(rng.uniform(np.log(6e18), np.log(3e21), 240)) / 6 / n
    for noise in (0.0, 0.002):
        start = time.perf_counter()
        found = fit_surface(n, d, true.loss(n, d) * np.exp(noise * rng.standard_t(3, 240)))
        print(f"noise {noise}: {found} in {time.perf_counter() - start:.2f} s")
    hero()


def hero() -> None:
    grid = read(FOLDER, "hero_ladder_eval_grid.csv")
    names = ("d768", "d1024", "d1536", "d2048")
    losses = {n: {r["fraction_snapped"]: float(r["loss_eval_dropless_paloma_macro"]) for r in grid if r["rung"] == n}
              for n in names}  # fmt: skip
    facts = {r["rung"]: float(r["flops_total_excl_lm_head"]) for r in read(FOLDER, "hero_ladder_rungs.csv")}
    shared = sorted(set.intersection(*(set(v) for v in losses.values())), key=float)
    g = np.array([float(k) for k in shared])
    made = published_forecast(
        g, [[losses[n][k] for k in shared] for n in names[:3]], [facts[n] for n in names[:3]], facts["d2048"]
    )
    error = 100 * np.abs(np.array([losses["d2048"][k] for k in shared]) / made.loss - 1)
    print(f"\n# d2048 of the MoE ladder\n\nthe published way: mean {error.mean():.2f} max {error.max():.2f} %")
    rungs, target = mixture(FOLDER)
    law = MatchedProgress.fit(Ladder(rungs=tuple(rungs[:3])))
    curve = rungs[3].curves[0]
    at = rungs[3].plan.progress(curve.step)
    error = 100 * np.abs(curve.loss / law.loss(rungs[3].plan, at) - 1)
    falls = np.all(np.diff(law.loss(rungs[3].plan, np.linspace(0.05, 1, 500))) <= 0)
    print(f"matched progress: mean {error.mean():.2f} max {error.max():.2f} %, monotone: {bool(falls)}")
    found = backtest_law(MatchedProgress, Ladder(rungs=tuple(rungs))).interval
    assert found is not None
    half = 100 * found.half_width(target.active_params, np.arange(0.05, 1.01, 0.05), 0.95)
    print(f"535B run: 95 % half-width between {half.min():.1f} and {half.max():.1f} % at the 20 published points")


def judged(law, targets: list[Rung]) -> list[tuple[Rung, np.ndarray, np.ndarray]]:
    out = []
    for target in targets:
        g, loss = evaluated(target)
        if len(g):
            out.append((target, g, np.log(loss / law.loss(target.plan, g))))
    return out


def summary(results: list[tuple[Rung, np.ndarray, np.ndarray]]) -> tuple[float, float, float]:
    errors = [100 * np.abs(np.expm1(r)) for _, _, r in results]
    return (
        float(np.mean([e.mean() for e in errors])),
        float(np.max([e.max() for e in errors])),
        float(np.mean([e[-1] for e in errors])),
    )


def cosine_only(case: Holdout) -> Holdout:
    kept = [t for t in case.targets if "const" not in t.name and "decay" not in t.name]
    return Holdout(family=case.family, case=case.case + ", cosine", fit=case.fit, targets=kept)


def families() -> None:
    rows, per_family = [], defaultdict(lambda: defaultdict(list))
    for case in holdouts(FOLDER):
        start = time.perf_counter()
        law = ScheduleAwareLaw.fit(Ladder(rungs=tuple(case.fit)))
        seconds = time.perf_counter() - start
        laws = {"ours": law, "chinchilla": ChinchillaEachStep(case.fit), "collapse": NearestCollapse(case.fit)}
        for shown in [case, cosine_only(case)] if case.case.startswith("<=760M") else [case]:
            cells = {name: summary(judged(model, shown.targets)) for name, model in laws.items()}
            if shown is case:
                for name, cell in cells.items():
                    per_family[case.family][name].append(cell)
            rows.append(
                (
                    case.family, shown.case[:34], f"{len(by_size(case.fit))}/{len(case.fit)}/{len(shown.targets)}",
                    law.memory, *(f"{a:.2f} / {b:.2f} / {c:.2f}" for a, b, c in cells.values()), f"{seconds:.1f}",
                )
            )  # fmt: skip
    table(
        ("family", "case", "sizes/runs/targets", "memory", "this law", "Chinchilla each step", "nearest collapse", "s"),
        rows, "Held-out runs: mean / max / final absolute error, %",
    )  # fmt: skip
    rows = []
    medians = defaultdict(list)
    for family, cells in per_family.items():
        line = [family]
        for name, values in cells.items():
            middle = [statistics.median(v[i] for v in values) for i in range(3)]
            medians[name].append(middle[0])
            line.append(" / ".join(f"{v:.2f}" for v in middle))
        rows.append(tuple(line))
    rows.append(("median of families", *(f"{statistics.median(v):.2f}" for v in medians.values())))
    table(("family", "this law", "Chinchilla each step", "nearest collapse"), rows, "Median over the cases of a family")
    print(
        "\nWhere it fails: `nanochat` ladders have one size (d8 -> d12) or sizes of other width-to-depth ratios, and\n"
        "runs of a few hundred steps whose start is not over at 5 %; `marin` ladders have one size, so the priors\n"
        "alone say what size does; `steplaw` keeps one peak rate and batch for all sizes, off each one's optimum."
    )


def coverage() -> None:
    """Intervals as `fit` sets them, with the constants as shipped and refitted without the tested family."""
    cases = []
    for case in holdouts(FOLDER, most=8):
        law = ScheduleAwareLaw.fit(Ladder(rungs=tuple(case.fit)))
        results = judged(law, case.targets)
        cases.append(Case(case, nested(case.fit, law.memory), results, others(case.fit, law, results)))
    shipped = {name: getattr(intervals, name) for name in CONSTANTS}
    found = one_size(cases, shipped["K0"], shipped["TAU"], shipped["SIGMA"])
    print("\n# Ladders of one size, from all families\n")
    print(", ".join(f"{name} {value:.4g} (shipped {shipped[name]:g})" for name, value in found.items()))
    for title, refit in (("shipped constants", False), ("constants refitted without the tested family", True)):
        rows, totals = [], defaultdict(list)
        for family in dict.fromkeys(case.holdout.family for case in cases):
            found = constants([c for c in cases if c.holdout.family != family]) if refit else {}
            for name, value in {**shipped, **found}.items():
                setattr(intervals, name, value)
            rows.append(covered(family, [c for c in cases if c.holdout.family == family], totals))
        rows.append(("mean", "", *(f"{np.mean(v):.0f}" for v in totals.values()), ""))
        head = ("family", "runs", *totals, "half-width 80 / 95 %")
        table(head, rows, f"Coverage, % of a run's points, {title}; families weigh equally")
    for name, value in shipped.items():
        setattr(intervals, name, value)


class Case(NamedTuple):
    holdout: Holdout
    errors: list[NestedError]
    results: list[tuple[Rung, np.ndarray, np.ndarray]]
    ranges: dict[str, list[tuple[np.ndarray, np.ndarray]]]

    @property
    def sizes(self) -> int:
        return len(by_size(self.holdout.fit))

    @property
    def largest(self) -> float:
        return max(rung.plan.active_params for rung in self.holdout.fit)


def covered(family: str, cases: list[Case], totals: dict[str, list[float]]) -> tuple[str, ...]:
    cells, widths = defaultdict(list), defaultdict(list)
    for case in cases:
        model = fit_interval(case.errors, case.largest, sizes=case.sizes)
        for i, (target, g, log_ratio) in enumerate(case.results):
            for level in (80, 95):
                half = model.half_width(target.plan.active_params, g, level / 100)
                cells[f"in {level} %"].append(np.mean(np.abs(log_ratio) <= half))
                cells[f"final in {level} %"].append(float(np.abs(log_ratio[-1]) <= half[-1]))
                widths[level].append(100 * half[-1])
            for name, bounds in case.ranges.items():
                low, high = bounds[i]
                cells[name].append(np.mean((log_ratio >= low) & (log_ratio <= high)))
    line = [family, str(sum(len(case.results) for case in cases))]
    for name, values in cells.items():
        totals[name].append(100 * float(np.mean(values)))
        line.append(f"{100 * np.mean(values):.0f}")
    return (*line, f"{np.median(widths[80]):.1f} / {np.median(widths[95]):.1f}")


def nested(rungs: list[Rung], memory) -> list[NestedError]:
    sizes = list(by_size(rungs).values())
    errors = []
    for count in range(2, len(sizes)):
        fitted = [rung for size in sizes[:count] for rung in size]
        law = ScheduleAwareLaw.fit_with(Ladder(rungs=tuple(fitted)), memory)
        for index in range(count, len(sizes)):
            found = judged(law, sizes[index])
            if found:
                rms = float(np.sqrt(np.mean([np.mean((r / early_factor(g)) ** 2) for _, g, r in found])))
                distance = size_distance(sizes[index][0].plan.active_params, sizes[count - 1][0].plan.active_params)
                errors.append(NestedError(index, distance, rms))
    return errors


def others(rungs: list[Rung], law: ScheduleAwareLaw, results) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Ranges of ln(forecast of a changed ladder / forecast) per target: rungs left out, runs resampled."""
    sizes = list(by_size(rungs).values())
    groups = sizes if len(sizes) > 2 else [[rung] for rung in rungs[:: max(1, len(rungs) // 8)]]
    left = [[rung for rung in rungs if rung not in group] for group in groups]
    rng = np.random.default_rng(0)
    drawn = [[rungs[i] for i in np.unique(rng.integers(0, len(rungs), len(rungs)))] for _ in range(16)]

    def forecasts(ladders: list[list[Rung]]) -> list[list[np.ndarray]]:
        tables = []
        for ladder in ladders:
            try:
                other = ScheduleAwareLaw.fit_with(Ladder(rungs=tuple(ladder)), law.memory)
            except TrajectoryGuardError:
                continue
            tables.append([np.log(other.loss(t.plan, g) / law.loss(t.plan, g)) for t, g, _ in results])
        return [[row[i] for row in tables] or [np.zeros_like(g)] for i, (_, g, _) in enumerate(results)]

    out = {"leave-out range": [(np.min(v, axis=0), np.max(v, axis=0)) for v in forecasts(left)]}
    resampled = forecasts(drawn)
    for level in (80, 95):
        tail = (100 - level) / 2
        out[f"bootstrap {level}"] = [tuple(np.percentile(v, [tail, 100 - tail], axis=0)) for v in resampled]
    return out


CONSTANTS = ("K0", "TAU", "SIGMA", "ONE_SIZE_SCALE", "ONE_SIZE_POWER", "ONE_SIZE_FAMILIES")


def run_levels(case: Case, power: float) -> np.ndarray:
    """Per target ln of the error level at ln size ratio 1, if errors grow with that power of it."""
    values = []
    for target, g, log_ratio in case.results:
        z = np.sqrt(np.mean((log_ratio / early_factor(g)) ** 2) + intervals.FLOOR**2)
        values.append(np.log(z) - power * np.log(size_distance(target.plan.active_params, case.largest)))
    return np.array(values)


def constants(cases: list[Case]) -> dict[str, float]:
    """Refit: mean ln k of ladders of several sizes, its sd between families and between a ladder's runs; one size."""
    levels, within = defaultdict(list), []
    for case in cases:
        values = run_levels(case, 1.0 if case.sizes == 1 else intervals.POWER)
        within += (values - values.mean()).tolist()
        if case.sizes > 1:
            levels[case.holdout.family].append(float(values.mean()))
    several = [np.mean(v) for v in levels.values()]
    k0, tau = float(np.exp(np.mean(several))), float(np.clip(np.std(several, ddof=1), 0.3, 1.0))
    sigma = float(np.clip(np.std(within), 0.3, 0.8))
    return {"K0": k0, "TAU": tau, "SIGMA": sigma, **one_size(cases, k0, tau, sigma)}


def one_size(cases: list[Case], k0: float, tau: float, sigma: float) -> dict[str, float]:
    """Ladders of one size: the mean over families of the line in ln d through the error of their larger targets.

    It starts at d = 0.1, where the 80 % half-width is that of other ladders; families whose targets have the ladder's
    own size say nothing of larger ones and are left out.
    """
    points = defaultdict(list)
    for case in cases:
        distances = [size_distance(target.plan.active_params, case.largest) for target, _, _ in case.results]
        if case.sizes == 1 and min(distances) > OWN_SIZE:
            points[case.holdout.family].append((np.mean(np.log(distances)), np.mean(run_levels(case, 0.0))))
    near = np.log(size_distance(1.0, 1.0))
    spread = np.sqrt(tau**2 * (1 + 1 / len(points)) + sigma**2)
    usual = intervals.quantile(0.8, float(np.hypot(tau, sigma))) / intervals.quantile(0.8, float(spread))
    start = np.log(k0 * usual) + intervals.POWER * near
    ends = [np.mean(v, axis=0) for v in points.values()]
    power = float(np.mean([(error - start) / (distance - near) for distance, error in ends]))
    return {
        "ONE_SIZE_SCALE": float(np.exp(start - power * near)),
        "ONE_SIZE_POWER": power,
        "ONE_SIZE_FAMILIES": len(points),
    }


OWN_SIZE = 0.2
"""ln size ratio up to which a target counts as of the ladder's own size."""


def speed() -> None:
    rungs = []
    plan = next(h for h in holdouts(FOLDER) if h.family == "olmo").fit
    from shared_ladders import LossCurve

    for i in range(50):
        base = plan[i % len(plan)]
        step = np.unique(np.linspace(1, base.plan.total_steps, 100).astype(int))
        curve = base.curves[0]
        loss = np.interp(step, curve.step, curve.loss)
        made = LossCurve(step=step, tokens=base.plan.tokens(step), loss=loss)
        rungs.append(Rung(name=f"r{i}", plan=base.plan, curves=(made,)))
    start = time.process_time()
    law = ScheduleAwareLaw.fit(Ladder(rungs=tuple(rungs)))
    print(f"\n# Speed\n\nfit of 50 runs x 100 points: {time.process_time() - start:.2f} s of one core")
    start = time.process_time()
    law.loss(plan[0].plan, np.linspace(0.05, 1, 10**6))
    print(f"the law at 1e6 points: {time.process_time() - start:.2f} s (a forecast reads a table of a few hundred)")


if __name__ == "__main__":
    parts = {"terminal": terminal, "families": families, "coverage": coverage, "speed": speed}
    for name in sys.argv[1:] or parts:
        parts[name]()
