"""Readers of the public ladders under ../shared/data (see its README): each run as a Rung with the plan it was given.

Tests and benchmarks import this; nothing in the package does. Every schedule is a named shape built from the published
recipe; `python tests/benchmarks/shared_ladders.py` prints how far it lies from the logged learning rate.
"""

import csv
import gzip
import io
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from trajectory_guard.curve import LossCurve  # noqa: E402
from trajectory_guard.ladder import Rung  # noqa: E402
from trajectory_guard.lr_schedule import LRSchedule  # noqa: E402
from trajectory_guard.plan import RunPlan  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Holdout:
    """One forecast exercise: rungs to fit, runs to forecast."""

    family: str
    case: str
    fit: list[Rung]
    targets: list[Rung]


def data_folder() -> Path:
    return Path(os.environ.get("TRAJECTORY_GUARD_DATA", ROOT.parent / "shared" / "data"))


def read(folder: Path, name: str) -> list[dict[str, str]]:
    path = folder / "ladders" / name
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return list(csv.DictReader(io.StringIO(text.decode())))


def by_run(rows: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    runs: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        runs[row["run"]].append(row)
    return {run: sorted(points, key=lambda row: int(row["step"])) for run, points in runs.items()}


def rung(
    name: str,
    points: list[dict[str, str]],
    *,
    steps: int,
    batch: int,
    params: float,
    schedule: LRSchedule,
    split: str = "train",
    drop_last: bool = False,
) -> Rung | None:
    """Build a Rung from rows of step, loss; None where the log is empty or not finite."""
    kept: dict[int, tuple[float, float]] = {}
    for row in points[:-1] if drop_last else points:
        step, loss = int(row["step"]), float(row["loss"])
        if 0 < step <= steps and np.isfinite(loss):
            kept[step] = (loss, float(row["lr"] or "nan") if row.get("lr") else float("nan"))
    if len(kept) < 3:
        return None
    at = np.array(sorted(kept))
    loss, lr = np.transpose([kept[step] for step in at.tolist()])
    curve = LossCurve(step=at, tokens=at * float(batch), loss=loss, lr=lr if np.all(np.isfinite(lr)) else None)
    plan = RunPlan(
        total_steps=steps,
        tokens_per_step=batch,
        active_params=params,
        schedule=schedule,
        split=split,  # pyright: ignore[reportArgumentType]
    )
    return Rung(name=name, plan=plan, curves=(curve,))


def olmo(folder: Path) -> dict[str, Rung]:
    """OLMo ladder, C4 validation. Warm-up over as many tokens as parameters; cosine or a last linear tenth, to .1."""
    runs = by_run(read(folder, "olmo.csv.gz"))
    out = {}
    for run, points in runs.items():
        size, horizon = run.removeprefix("olmo-").removesuffix("-rerun").split("-")[-2:]
        batch, params = int(points[0]["batch_tokens"]), float(points[0]["params"])
        steps = max(int(r["step"]) for r in runs[f"olmo-{size}-{horizon}"])
        warmup = params / batch / steps
        if "decay" in run:
            schedule = LRSchedule(shape="wsd", warmup=warmup, decay_start=0.9, final=0.1)
        elif "const" in run:
            schedule = LRSchedule(shape="constant", warmup=warmup)
        else:
            schedule = LRSchedule(shape="cosine", warmup=warmup, final=0.1)
        made = rung(run, points, steps=steps, batch=batch, params=params, schedule=schedule, split="validation")
        if made:
            out[run] = made
    return out


def mpl(folder: Path) -> dict[str, Rung]:
    """Luo et al. 2025: 25M and 100M on nine schedules; warm-up 2160 steps; the loss is smoothed."""
    out = {}
    for run, points in by_run(read(folder, "mpl.csv.gz")).items():
        _, size, kind, *rest = run.split("_")
        steps = int(rest[-1]) if kind != "wsdcon" else (int(points[-1]["step"]) // 1000 + 1) * 1000
        warmup = 2160 / steps
        if kind == "cosine":
            schedule = LRSchedule(shape="cosine", warmup=warmup, final=0.1)
        elif kind == "constant":
            schedule = LRSchedule(shape="constant", warmup=warmup)
        elif kind == "wsdcon":
            drop = 8000 / steps
            schedule = LRSchedule(shape="steps", warmup=warmup, points=((drop, float(points[-1]["lr"]) / 3e-4),))
        else:
            decay = "exponential" if kind == "wsd" else "linear"
            start = int(rest[0]) / steps
            schedule = LRSchedule(shape="wsd", warmup=warmup, decay_start=start, decay_shape=decay, final=0.1)
        made = rung(run, points, steps=steps, batch=524288, params=float(size[:-1]) * 1e6, schedule=schedule)
        if made:
            out[run] = made
    return out


def haegele(folder: Path) -> dict[str, Rung]:
    """Haegele et al. 2024, SlimPajama, validation loss, the default recipe of each size."""
    recipes = {
        r["id"]: r
        for r in read(folder, "hagele_runs.csv.gz")
        if r["dataset"] == "slimpajama" and r["decay_type"] == "" and r["sched"] in ("cos", "wsd")
    }
    out = {}
    for run, points in by_run(read(folder, "hagele_val.csv.gz")).items():
        if run not in recipes:
            continue
        r = recipes[run]
        steps, decay = int(r["iters"]), float(r["fract_decay"])
        warmup = 300 / steps
        if r["sched"] == "cos":
            schedule = LRSchedule(shape="cosine", warmup=warmup, final=0.1)
        elif decay:
            schedule = LRSchedule(shape="wsd", warmup=warmup, decay_start=1 - decay)
        else:
            schedule = LRSchedule(shape="constant", warmup=warmup)
        made = rung(
            run, points, steps=steps, batch=102400, params=float(r["N"]), schedule=schedule, split="validation",
            drop_last=True,
        )  # fmt: skip
        if made:
            out[run] = made
    return out


def losscast(folder: Path, source: str, *, plain: bool = False) -> dict[tuple[str, ...], list[Rung]]:
    """Runs of losscast-bench of one source, grouped by recipe: equal in all but size and horizon.

    `plain` leaves out nanochat's runs of another width-to-depth ratio, attention window or embedding rate.
    """
    keys = {
        "nanochat": ("lr", "wd", "warmdown_ratio", "final_lr_ratio"),
        "marin": ("opt", "beta1", "beta2", "lr", "wd", "batch_tokens", "warmup", "sched", "final_lr_ratio"),
        "steplaw": ("lr", "batch_tokens", "warmup"),
    }[source]
    curves = by_run(read(folder, f"losscast_{source}.csv.gz"))
    groups: dict[tuple[str, ...], list[Rung]] = defaultdict(list)
    for r in read(folder, "losscast_runs.csv.gz"):
        if r["source"] != source or r["id"] not in curves:
            continue
        steps, batch = int(r["total_steps"]), int(r["batch_tokens"])
        warmup = int(r["warmup"]) / steps
        width = int(r["d_model"])
        # Non-embedding parameters and the output matrix, one convention for all.
        params = 12.0 * int(r["n_layers"]) * width**2 + int(r["vocab"]) * width
        if warmup >= 0.45:
            continue
        final = float(r["final_lr_ratio"])
        if r["sched"] == "warmup_stable_warmdown":
            ratio = float(r["warmdown_ratio"])
            schedule = LRSchedule(shape="wsd", warmup=warmup, decay_start=1 - ratio, final=final)
        elif r["sched"] == "linear":
            schedule = LRSchedule(shape="linear", warmup=warmup, final=final)
        else:
            schedule = LRSchedule(shape="cosine", warmup=warmup, final=final)
        made = rung(r["id"], curves[r["id"]], steps=steps, batch=batch, params=params, schedule=schedule)
        if plain and any(word in r["run"] for word in ("_ar", "_wp", "_elr", "_test")):
            continue
        if made and healthy(made):
            groups[tuple(r[key] for key in keys)].append(made)
    return dict(groups)


def mixture(folder: Path) -> tuple[list[Rung], RunPlan]:
    """The published mixture-of-experts ladder, d768 to d2048, and the plan of its 535B target."""
    points = defaultdict(list)
    for row in read(folder, "hero_ladder_eval_grid.csv"):
        points[row["rung"]].append(row)
    rungs, plans = [], {}
    for facts in read(folder, "hero_ladder_rungs.csv"):
        batch = int(facts["batch_seqs_4096"]) * 4096
        plans[facts["rung"]] = RunPlan(
            total_steps=int(facts["total_steps"]),
            tokens_per_step=batch,
            active_params=float(facts["active_params"]),
            schedule=LRSchedule(shape="linear"),
            flops_per_token=float(facts["flops_per_step_excl_lm_head"]) / batch,
            flops_convention="per-token-excluding-lm-head",
            split="validation",
        )
    for name in ("d768", "d1024", "d1536", "d2048"):
        step = np.array([int(row["step"]) + 1 for row in points[name]])  # the source counts from 0
        loss = np.array([float(row["loss_eval_dropless_paloma_macro"]) for row in points[name]])
        curve = LossCurve(step=step, tokens=plans[name].tokens(step), loss=loss)
        rungs.append(Rung(name=name, plan=plans[name], curves=(curve,)))
    return rungs, next(plan for name, plan in plans.items() if "hero" in name)


def healthy(run: Rung) -> bool:
    """Finished, and ends within half a percent of its lowest loss: a diverged run tests no forecast."""
    curve = run.curves[0]
    finished = curve.step[-1] >= 0.97 * run.plan.total_steps
    return bool(finished and np.median(curve.loss[-3:]) <= 1.005 * curve.loss.min())


def by_size(runs: list[Rung]) -> dict[float, list[Rung]]:
    sizes: dict[float, list[Rung]] = defaultdict(list)
    for run in runs:
        sizes[run.plan.active_params].append(run)
    return dict(sorted(sizes.items()))


def evaluated(run: Rung) -> tuple[np.ndarray, np.ndarray]:
    """(progress, loss) of the points a forecast is judged on: after max(5 % of training, twice the warm-up)."""
    curve = run.curves[0]
    g = run.plan.progress(curve.step)
    kept = g >= max(0.05, 2 * run.plan.schedule.warmup) - 1e-12
    return g[kept], curve.loss[kept]


def holdouts(folder: Path, *, most: int = 12) -> Iterator[Holdout]:
    """Every exercise of the accuracy tables; at most so many recipes of each large sweep, those with most runs."""
    runs = olmo(folder)
    size = {name: run.plan.active_params for name, run in runs.items()}
    small = [run for name, run in runs.items() if size[name] < 1e9]
    yield Holdout(family="olmo", case="<=760M -> 1B", fit=small, targets=[runs[n] for n in runs if size[n] > 1e9])
    pair = [run for name, run in runs.items() if size[name] < 5e8]
    yield Holdout(
        family="olmo", case="190M+370M -> 760M, 1B", fit=pair, targets=[runs[n] for n in runs if size[n] > 5e8]
    )
    for millions in ("25M", "100M"):
        every = {name: run for name, run in mpl(folder).items() if f"_{millions}_" in name}
        known = [f"mpl_{millions}_{kind}" for kind in ("cosine_24000", "constant_24000", "wsdcon_9")]
        fit = [every[name] for name in known]
        targets = [run for name, run in every.items() if name not in known]
        yield Holdout(family="mpl", case=f"{millions} unseen schedules", fit=fit, targets=targets)
    every = list(haegele(folder).values())
    small = [run for run in every if run.plan.active_params < 1e8]
    yield Holdout(
        family="haegele", case="<=93M -> 124M, 152M", fit=small,
        targets=[run for run in every if run.plan.active_params > 1e8],
    )  # fmt: skip
    for source, plain in (("nanochat", True), ("nanochat", False), ("marin", False), ("steplaw", False)):
        ladders = [(key, by_size(group)) for key, group in losscast(folder, source, plain=plain).items()]
        usable = [(key, sizes) for key, sizes in ladders if len(sizes) >= 2]
        # Most sizes first, then most runs to fit, then the name: the same choice every time.
        usable.sort(key=lambda item: (-len(item[1]), -sum(map(len, item[1].values())), item[0]))
        for key, sizes in usable[:most]:
            *fit, targets = sizes.values()
            case = "d8 -> d12 " * plain + "/".join(key)
            yield Holdout(
                family=f"{source} d8 -> d12" if plain else source,
                case=case,
                fit=[run for group in fit for run in group],
                targets=targets,
            )


if __name__ == "__main__":
    where = data_folder()
    named: list[tuple[str, Rung]] = [*olmo(where).items(), *mpl(where).items()]
    for source in ("nanochat", "marin", "steplaw"):
        named += [(f"{source} {run.name}", run) for group in losscast(where, source).values() for run in group]
    for name, run in named:
        curve = run.curves[0]
        if curve.lr is not None and curve.lr.max() > 0:
            g = run.plan.progress(curve.step)
            ratio = run.plan.schedule.ratio(g)
            peak = curve.lr.max() / ratio.max()
            gap = np.abs(curve.lr / peak - ratio)
            if gap.max() > 0.02:
                at = int(gap.argmax())
                print(f"{name}: {run.plan.schedule.describe()}: off by {gap[at]:.3f} at progress {g[at]:.3f}")
