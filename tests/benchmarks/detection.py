"""False alarms and delays of the guard and of other tools' rules: python tests/benchmarks/detection.py [SECTION ...]

Sections: faults, healthy, spike176, quiet, delays, paired, sine, bound. Each prints a table; without names all run
(about 25 minutes on one core; `--scale 0.1` for a look). The constants in trajectory_guard/detect were set on these
logs, so these numbers flatter them.
"""

import argparse
import csv
import logging
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from detection_data import (
    DATA,
    FAULTS,
    FULL_BATCH,
    MICRO_BATCH,
    Array,
    Log,
    bootstrap,
    course,
    fault_logs,
    healthy_logs,
    make_forecast,
    residual_pool,
    smooth,
)
from rivals import RIVALS

from trajectory_guard.detect.evidence import ALARM, BETS, CAP, UPPER_CLIP, VARIANCE, Evidence
from trajectory_guard.detect.judge import LossJudge
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.paired import PairedReference

NEVER = 10**9


def flags(loss: Array, guard: TrajectoryGuard, tokens: int | None = None) -> list[tuple[int, int, str, int]]:
    """(step, severity, kind, onset) of every warning and above when it is flagged or rises."""
    found = []
    best: dict[tuple[str, int], int] = {}
    for step, value in enumerate(loss.tolist(), 1):
        for event in guard.observe(step, value, tokens=tokens).events:
            key = (event.kind, event.detected)
            if event.severity >= 2 and event.severity > best.get(key, 0):
                best[key] = int(event.severity)
                found.append((step, int(event.severity), event.kind, event.onset or 0))
    return found


def faults(scale: float) -> None:
    """Labelled runs, fault at step 901; monitoring begins at step 300 and changes are judged from 700 on."""
    logs = fault_logs()
    of = {name: smooth(logs[name][1].loss) for name in ("healthy_s0", "healthy_s1")}
    print(
        f"{'run':14s}{'class':16s}{'warn':>6s}{'cert':>6s}{'onset':>7s}  kind            "
        + " ".join(f"{n:>12s}" for n in RIVALS)
    )
    for name, (label, log) in logs.items():
        curve = of["healthy_s0" if name == "healthy_s1" else "healthy_s1"]
        guard = TrajectoryGuard(make_forecast(curve, tokens=log.tokens))
        start = (
            (int(label["fault_step"]) + 1)
            if label["fault_step"] not in ("", "0")
            else (300 if label["fault_step"] else 0)
        )
        found = flags(log.loss, guard)
        warn = next(((s, kind, onset) for s, _, kind, onset in found if s >= start), None)
        sure = next((s for s, severity, _, _ in found if s >= start and severity >= 3), None)
        cells = []
        for rule in RIVALS.values():
            hits = np.flatnonzero(rule(log.loss)) + 1
            before, after = np.sum((hits >= 300) & (hits < max(start, 300))), hits[hits >= max(start, 300)]
            cells.append((str(after[0] - start) if after.size else "-") + (f" ({before})" if before else ""))
        print(
            f"{name:14s}{label['class']:16s}{warn[0] - start if warn else '-':>6}{sure - start if sure else '-':>6}"
            f"{warn[2] - start if warn else '-':>7}  {warn[1] if warn else '-':15s} "
            + " ".join(f"{c:>12s}" for c in cells)
        )
    print("steps after the fault (others: first alarm after it, alarms from step 300 to it in brackets)")


def _healthy_guard(log: Log, logs: list[Log]) -> tuple[TrajectoryGuard, str]:
    other = next((o for o in logs if o.recipe == log.recipe and o is not log and len(o.loss) == len(log.loss)), None)
    # A run's own course must follow its bends: half-width 6 % of the step instead of 15 %.
    curve = smooth(other.loss) if other else smooth(log.loss, width=0.06) * 1.003
    return TrajectoryGuard(make_forecast(curve, tokens=log.tokens, first=500)), "twin" if other else "own + 0.3 %"


def healthy(scale: float) -> None:
    """Healthy public logs at their own noise: warnings of the guard, alarms of the others per 10,000 steps."""
    logs = healthy_logs()
    totals = dict.fromkeys(RIVALS, 0)
    steps = 0
    for log in logs:
        guard, forecast = _healthy_guard(log, logs)
        found = flags(log.loss, guard, log.tokens)
        print(f"{log.name[:40]:42s}{len(log.loss):6d} steps, forecast {forecast:12s} warnings {len(found)} {found[:3]}")
        steps += len(log.loss) - 500
        for name, rule in RIVALS.items():
            totals[name] += int(np.sum(rule(log.loss)[500:]))
    print("alarms per 10,000 steps: " + ", ".join(f"{name} {1e4 * n / steps:.1f}" for name, n in totals.items()))


def spike176(scale: float) -> None:
    """The first spike of the 176B run: two log lines before it, a constant forecast of 2.2."""
    with (DATA / "faults" / "bigscience_snippets.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["section"].endswith("First lm loss spike")]
    steps = [int(row["step"]) for row in rows]
    forecast = make_forecast(np.full(400, 2.2), tokens=2048 * 2048, first=1, total=steps[-1] + 10)
    guard = TrajectoryGuard(forecast)
    for row in rows:
        verdict = guard.observe(int(row["step"]), float(row["loss"]))
        print(row["step"], row["loss"], [f"{e.severity.name} {e.kind}" for e in verdict.events])


def judged(loss: Array, forecast: Array, half_width: float, tokens: int, reference: Array | None = None) -> Iterator:
    """Yield (index from 0, event) for what a fresh judge says; it is what the guard calls after warm-up."""
    judge = LossJudge()
    judge.reference_tokens = float(tokens)
    others = [math.nan] * len(loss) if reference is None else reference.tolist()
    for i, (value, f, other) in enumerate(zip(loss.tolist(), forecast.tolist(), others, strict=True)):
        for event in judge.observe(i + 1, value, f, half_width / 3.0 * f, 2.0 * half_width * f, 1.0, other) or ():
            yield i, event


def _pools() -> dict[int, list[Array]]:
    logs = healthy_logs()
    return {tokens: residual_pool(logs, tokens) for tokens in (FULL_BATCH, MICRO_BATCH)}


def false_alarms(
    pool: list[Array], runs: int, *, tokens: int, half_width: float = 0.01, bias: float = 0.0, sine: int = 0
):
    """Warnings and certified events flagged in `runs` runs of 50,000 steps."""
    n, warnings, certified = 50_000, 0, 0
    f = course(n, n)
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        wave = 0.003 * np.sin(2 * np.pi * np.arange(n) / sine + rng.uniform(0, 6.3)) if sine else 0.0
        loss = f * (1.0 + bootstrap(pool, n, rng)) * (1.0 + bias + wave)
        open_now: set[tuple[str, int]] = set()
        for _, event in judged(loss, f, half_width, tokens):
            if event.severity >= 2 and (event.kind, event.detected) not in open_now:
                open_now.add((event.kind, event.detected))
                warnings += 1
            certified += event.severity >= 3
    return warnings, certified, runs * n


def quiet(scale: float) -> None:
    """False alarms on block-bootstrapped residuals of healthy logs."""
    pools = _pools()
    runs = max(1, round(40 * scale))
    for label, tokens, keywords in (
        ("0.5M batch, forecast right", FULL_BATCH, {}),
        ("0.5M batch, 0.3 % bias", FULL_BATCH, {"bias": 0.003}),
        ("0.5M batch, 1 % bias", FULL_BATCH, {"bias": 0.01}),
        ("0.5M batch, half-width 0.5 %", FULL_BATCH, {"half_width": 0.005}),
        ("65k batch, forecast right", MICRO_BATCH, {}),
        ("65k batch, 0.3 % bias", MICRO_BATCH, {"bias": 0.003}),
    ):
        start = time.time()
        warnings, certified, steps = false_alarms(pools[tokens], runs, tokens=tokens, **keywords)
        rate = 1e5 * warnings / steps
        print(
            f"{label:30s}{steps:10,d} steps: {rate:5.2f} warnings per 100k, {certified} certified",
            f"in {time.time() - start:.0f} s",
        )


def sine(scale: float) -> None:
    """A forecast that errs by a slow sine of 0.3 %."""
    pools = _pools()
    for period in (10_000, 20_000):
        warnings, certified, steps = false_alarms(
            pools[FULL_BATCH], max(1, round(20 * scale)), tokens=FULL_BATCH, sine=period
        )
        print(
            f"period {period}: {1e5 * warnings / steps:.1f} warnings per 100k, {certified} certified, {steps:,} steps"
        )


def delay(pool: list[Array], fault: str, runs: int, *, tokens: int, half_width: float, bias: float) -> str:
    """Median delays and onset error of one injected fault, 3000 steps after monitoring began."""
    start, tail = 3000, 1500
    n = start + tail
    f = course(n + 5000)[5000:]
    warn, sure, onset = [], [], []
    for seed in range(runs):
        rng = np.random.default_rng(1000 + seed)
        excess = np.zeros(n)
        excess[start:] = FAULTS[fault](np.arange(tail), f[start:])
        first = second = None
        for i, event in judged(f * (1.0 + bootstrap(pool, n, rng)) * (1.0 + bias) + excess, f, half_width, tokens):
            if i >= start and event.severity >= 2:
                if first is None:
                    first = i - start + 1
                    onset.append((event.onset or 0) - start - 1)
                if event.severity >= 3:
                    second = i - start + 1
                    break
        warn.append(first or NEVER)
        sure.append(second or NEVER)
    low, middle, high = np.quantile(onset, [0.1, 0.5, 0.9]) if onset else (math.nan,) * 3
    numbers = [f"{np.median(v):6.0f}" if np.median(v) < NEVER else "     -" for v in (warn, sure)]
    return f"{numbers[0]} {numbers[1]}   {middle:+.0f} [{low:+.0f}, {high:+.0f}]"


def delays(scale: float) -> None:
    """Median delay (warning, certified) and onset error [10 %, 90 %] of injected faults at 0.5M-token noise."""
    pool = _pools()[FULL_BATCH]
    runs = max(5, round(60 * scale))
    for half_width in (0.01, 0.005):
        for bias in (0.0, 0.003, 0.01):
            if bias > half_width:
                continue
            print(f"80 % half-width {half_width:.1%}, forecast biased by {bias:.1%}: warn, certified, onset error")
            for fault in FAULTS:
                print(f"  {fault:16s}{delay(pool, fault, runs, tokens=FULL_BATCH, half_width=half_width, bias=bias)}")


def paired(scale: float) -> None:
    """+1 % in a run with a reference on the same data order, 65k-token batches, one-micro-batch noise."""
    logs = [log for log in healthy_logs() if log.recipe.startswith("2024-11-06") and len(log.loss) == 3200]
    delays_found, false = [], 0
    for log in logs[1:]:
        reference = PairedReference(step=np.arange(1, 3201), residual=logs[0].loss - smooth(logs[0].loss))
        loss = log.loss.copy()
        loss[1999:] *= 1.01
        guard = TrajectoryGuard(make_forecast(smooth(logs[0].loss), tokens=log.tokens, first=500), paired=reference)
        found = flags(loss, guard, log.tokens)
        false += sum(step < 2000 for step, *_ in found)
        delays_found.append(next((step - 1999 for step, *_ in found if step >= 2000), NEVER))
        guard = TrajectoryGuard(make_forecast(smooth(logs[0].loss), tokens=log.tokens, first=500), paired=reference)
        false += len(flags(log.loss, guard, log.tokens))
        correlation = guard._watcher.judge.paired.pairing.correlation
        sharper = guard._watcher.judge.level.noise.sigma / guard._watcher.judge.paired.level.noise.sigma
        took = delays_found[-1]
        print(f"{log.name[-8:]}: +1 % after {took} steps; correlation {correlation:.4f}, noise / {sharper:.1f}")
    print(f"median delay {np.median(delays_found):.0f}; false warnings {false} in {len(logs) - 1} healthy runs")


def noises(rng: np.random.Generator, shape: tuple[int, int]) -> Iterator[tuple[str, Array]]:
    """Noises of mean zero and variance one, (steps, streams); skewed ones on both sides."""
    yield "white", rng.standard_normal(shape)
    yield "t3", rng.standard_t(3, shape) / math.sqrt(3.0)
    lognormal = np.exp(0.7 * rng.standard_normal(shape)) - math.exp(0.245)
    lognormal /= math.sqrt(math.exp(0.98) - math.exp(0.49))
    yield "lognormal", lognormal
    yield "-lognormal", -lognormal
    outlier = math.sqrt(0.7525) * rng.standard_normal(shape) + np.where(rng.random(shape) < 0.01, 5.0, 0.0) - 0.05
    yield "1 % outliers", outlier
    yield "-1 % outliers", -outlier
    ar = rng.standard_normal(shape)
    for row in range(1, shape[0]):
        ar[row] += 0.3 * ar[row - 1]
    # At the scale that the guard gives correlated noise: sqrt(1 + rho) / (1 - rho) x the scale of differences.
    yield "AR(0.3)", ar / (math.sqrt(1.3) / 0.7)


def bound_step(masses: Array, z: Array) -> Array:
    """One step of `Evidence` for many streams at once; masses (5, streams), z (streams,)."""
    a = np.array(BETS)[:, None] * np.minimum(z, UPPER_CLIP)
    even, odd = 1.0 + 0.5 * a * a, a
    gain = np.where(a >= 0.0, even + odd, 1.0 / (even - odd))
    return np.minimum(CAP, (masses + 1.0) * np.exp(-0.5 * VARIANCE * np.array(BETS) ** 2)[:, None] * gain)


def bound(scale: float) -> None:
    """Alarms of the certified test, one side, mean exactly at the gate: at most one in 1e6 steps is proved."""
    streams, block = 2000, 1000
    blocks = max(1, round(20 * scale))
    check = np.random.default_rng(1).standard_normal(500) + 0.5
    masses, evidence = np.zeros((len(BETS), 1)), Evidence()
    for z in check.tolist():
        masses, one = bound_step(masses, np.array([z])), evidence.update(z)
    print(f"vectorised against Evidence after 500 steps: {masses.mean() / one:.4f}")
    for factor in (1.0, math.sqrt(3.0)):
        alarms: dict[str, int] = {}
        held: dict[str, Array] = {}
        rng = np.random.default_rng(0)
        for _ in range(blocks):
            for name, noise in noises(rng, (block, streams)):
                masses = held.get(name, np.zeros((len(BETS), streams)))
                for z in factor * noise:
                    masses = bound_step(masses, z)
                    over = masses.mean(axis=0) >= ALARM
                    if over.any():
                        alarms[name] = alarms.get(name, 0) + int(over.sum())
                        masses[:, over] = 0.0
                held[name] = masses
        # AR(0.3) of variance 3 after the correction does not meet the assumption: it is told for completeness.
        steps = blocks * block * streams
        for name in held:
            print(f"{name:14s} variance {factor**2:.0f}: {alarms.get(name, 0)} alarms in {steps:,} steps")


SECTIONS = {f.__name__: f for f in (faults, healthy, spike176, quiet, delays, paired, sine, bound)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", default=list(SECTIONS))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the runs of each section, default 1")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for section in arguments.sections:
        print(f"\n== {section}: {SECTIONS[section].__doc__}", flush=True)
        SECTIONS[section](arguments.scale)
