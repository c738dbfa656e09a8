"""Public per-step logs, labelled faults, and faults injected into real residuals, for detection.py."""

import csv
import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.forecast import Forecast
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan
from trajectory_guard.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("TRAJECTORY_GUARD_DATA", ROOT.parent / "shared" / "data"))
Array = NDArray[np.float64]

FULL_BATCH = 524_288
MICRO_BATCH = 65_536


@dataclass(frozen=True, kw_only=True)
class Log:
    """One run: steps from 1, its losses, tokens averaged in each."""

    name: str
    recipe: str
    loss: Array
    tokens: int
    channels: dict[str, Array]


def smooth(loss: Array, *, width: float = 0.15, shortest: int = 100) -> Array:
    """Local linear fit, tricube weights, of the finite losses; half-width `width` of the step, at least `shortest`."""
    n = len(loss)
    finite = np.isfinite(loss)
    at = np.flatnonzero(finite).astype(np.float64)
    values = loss[finite]
    grid = np.unique(np.concatenate([np.geomspace(1, n, 300), np.linspace(1, n, 200)]).round())
    fitted = np.empty_like(grid)
    for i, x in enumerate(grid):
        half = max(shortest, width * x)
        near = np.abs(at - x) < half
        t, y = (at[near] - x) / half, values[near]
        weight = (1.0 - np.abs(t) ** 3) ** 3
        # Clip against the median: lone outliers of healthy logs reach 30 sigma.
        middle = np.median(y)
        spread = 1.4826 * np.median(np.abs(y - middle)) + 1e-9
        y = np.clip(y, middle - 4 * spread, middle + 4 * spread) if x > 200 else y
        a, b = np.sum(weight * t), np.sum(weight * t * t)
        w = np.sum(weight)
        fitted[i] = (b * np.sum(weight * y) - a * np.sum(weight * t * y)) / (w * b - a * a + 1e-12)
    return np.interp(np.arange(n), grid, fitted)


def make_forecast(
    curve: Array,
    *,
    tokens: int = FULL_BATCH,
    half_width: float = 0.01,
    first: int = 300,
    total: int = 0,
    warmup: int = 0,
    vocab: int | None = None,
) -> Forecast:
    """A forecast that follows `curve` (one value per step), with 80 % half-width `half_width` and twice it at 95 %."""
    total = total or len(curve)
    plan = RunPlan(
        total_steps=total,
        tokens_per_step=tokens,
        active_params=1e8,
        schedule=LRSchedule(shape="constant", warmup=warmup / total),
        recipe=Recipe(vocab_size=vocab),
    )
    steps = np.arange(first, total + 1)
    values = np.interp(steps, np.arange(1, len(curve) + 1), curve)
    return Forecast(plan, progress=steps / total, loss=values, half_widths={0.8: half_width, 0.95: 2 * half_width})


def fault_logs() -> dict[str, tuple[dict[str, str], Log]]:
    folder = DATA / "faults" / "local"
    with (folder / "labels.csv").open() as file:
        labels = list(csv.DictReader(file))
    logs = {}
    for label in labels:
        table = np.genfromtxt(folder / label["file"], delimiter=",", names=True)
        name = label["file"].removesuffix(".csv")
        channels = {"grad_norm": np.asarray(table["grad_norm"], np.float64)}
        log = Log(name=name, recipe="local", loss=np.asarray(table["loss"], np.float64), tokens=4096, channels=channels)
        logs[name] = (label, log)
    return logs


def healthy_logs() -> list[Log]:
    """Training losses of the public healthy logs, with the tokens that each averages."""
    with gzip.open(DATA / "steps" / "modded_nanogpt_runs.csv.gz", "rt") as file:
        about = {row["run"]: row for row in csv.DictReader(file)}
    losses: dict[str, list[tuple[int, float]]] = {}
    with gzip.open(DATA / "steps" / "modded_nanogpt.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            if "#" not in row["run"] and row["loss"]:
                losses.setdefault(row["run"], []).append((int(row["step"]), float(row["loss"])))
    logs = []
    for run, points in losses.items():
        micro = int(about[run]["microbatch_tokens"])
        batch = int(about[run]["batch_tokens"])
        values = np.array([loss for _, loss in sorted(points)])
        recipe = run.split("/")[0]
        logs.append(Log(name=run, recipe=recipe, loss=values, tokens=micro or batch, channels={}))
    return logs


def residual_pool(logs: list[Log], tokens: int) -> list[Array]:
    """Relative residuals loss / smooth - 1 of the runs that log so many tokens, the first 500 steps left out."""
    pools = []
    for log in logs:
        if (log.tokens == FULL_BATCH) == (tokens == FULL_BATCH) and len(log.loss) > 2000:
            pools.append((log.loss / smooth(log.loss, width=0.04, shortest=100) - 1.0)[500:])
    return pools


def bootstrap(pools: list[Array], n: int, rng: np.random.Generator, block: int = 200) -> Array:
    """`n` residuals in blocks of neighbours, drawn from all runs."""
    weights = np.array([len(pool) for pool in pools], np.float64)
    parts = []
    for _ in range(n // block + 1):
        pool = pools[rng.choice(len(pools), p=weights / weights.sum())]
        start = rng.integers(0, len(pool) - block)
        parts.append(pool[start : start + block])
    return np.concatenate(parts)[:n]


def course(n: int, horizon: int = 100_000) -> Array:
    """A loss curve like a 124M run's, 3.3 nats at the end, slowly falling over `horizon` steps."""
    g = np.arange(1, n + 1) / horizon
    return 2.9 + 0.4 * g**-0.3


FAULTS = {
    "level +0.5 %": lambda t, f: f * 0.005,
    "level -0.5 %": lambda t, f: f * -0.005,
    "level +1 %": lambda t, f: f * 0.01,
    "level -1 %": lambda t, f: f * -0.01,
    "level +2 %": lambda t, f: f * 0.02,
    "level -2 %": lambda t, f: f * -0.02,
    "level +5 %": lambda t, f: f * 0.05,
    "level -5 %": lambda t, f: f * -0.05,
    "drift .1 %/100": lambda t, f: f * 1e-5 * t,
    "spike 5 %": lambda t, f: f * 0.05 * (t < 3),
    "spike 20 %": lambda t, f: f * 0.20 * (t < 3),
    # The excess doubles every 100 steps from 0.05 % on.
    "LR divergence": lambda t, f: f * 0.0005 * np.minimum(2.0 ** (t / 100.0), 1e3),
    # The forecast falls 0.09 % per 100 steps, the loss stays where it was.
    "plateau": lambda t, f: f * 9e-6 * t,
}
"""Excess in nats at t steps after the fault, for a forecast f."""
