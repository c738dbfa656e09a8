"""Train the ladder's rungs, write their logs and manifest, and fit them.

    python examples/make_ladder.py            # about 5 minutes on two cores; rewrites examples/ladder and the fit
    python examples/make_ladder.py --fit-only # fit the committed logs again, seconds

Another machine or Python gives logs that differ in the last digits, or by tenths of a percent where the standard
library differs; the fit then is one for that corpus.
"""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from corpus import standard_library
from faults import Fault
from recipe import RUNG_SEEDS, SCHEDULE, TARGET_WIDTH, Training, plan_of, run_of

from trajectory_guard.fit import fit_ladder
from trajectory_guard.manifest import read_manifest

HERE = Path(__file__).resolve().parent
LADDER = HERE / "ladder"
MANIFEST = LADDER / "manifest.toml"
FIT = HERE / "fits" / "moe_tiny.json"


def log_path(width: int, seed: int) -> Path:
    """Where one run's log stands."""
    return LADDER / f"d{width}_seed{seed}.csv"


def train_and_log(width: int, seed: int, path: Path) -> str:
    """Train one run of the recipe on one thread and write its log; returns a line to print."""
    torch.set_num_threads(1)
    run = run_of(width)
    training = Training(run, corpus=standard_library(), seed=seed, fault=Fault())
    losses = [training.step(step).item() for step in range(1, run.steps + 1)]
    rows = ["step,tokens,lr,loss"]
    for step, loss in enumerate(losses, start=1):
        lr = run.peak_lr * float(SCHEDULE.ratio(step / run.steps))
        rows.append(f"{step},{step * run.tokens_per_step},{lr:.4g},{loss:.4f}")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text("\n".join(rows) + "\n")
    os.replace(scratch, path)
    window = losses[-(run.steps // 50) :]
    balance = training.model.router_metrics()["router/max_violation"]
    final = sum(window) / len(window)
    return f"d{width} seed {seed}: {run.steps} steps, last 2 % at {final:.4f} nats, max violation {balance:.2f}"


def write_manifest(path: Path) -> None:
    """Write the TOML file that lists the rungs, their plans and logs."""
    corpus = standard_library()
    plan = plan_of(run_of(TARGET_WIDTH), corpus).to_dict()
    lines = [
        "# Written by make_ladder.py. The target is not in it: its loss is what the fit has to forecast.",
        'format = "trajectory-guard-ladder"',
        "version = 1",
        "",
        "[recipe]",
        *(f"{name} = {_toml(value)}" for name, value in plan["recipe"].items()),
        "",
        "[plan]",
        f"schedule = {_toml(plan['schedule'])}",
        f"flops_convention = {_toml(plan['flops_convention'])}",
        f"metric = {_toml(plan['metric'])}",
        f"split = {_toml(plan['split'])}",
    ]
    for width, seeds in RUNG_SEEDS.items():
        run = run_of(width)
        lines += [
            "",
            "[[rung]]",
            f'name = "d{width}"',
            f"log = {_toml([log_path(width, seed).name for seed in seeds])}",
            f"total_steps = {run.steps}",
            f"tokens_per_step = {run.tokens_per_step}",
            f"active_params = {run.active_parameters}",
            f"total_params = {run.total_parameters}",
        ]
    path.write_text("\n".join(lines) + "\n")


def _toml(value: object) -> str:
    """The few kinds of value a recipe holds; JSON writes strings, numbers and lists as TOML does."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + " }"
    return json.dumps(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit-only", action="store_true", help="fit the logs that are there")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at once, one thread each")
    args = parser.parse_args()
    if not args.fit_only:
        # Largest first, so that no worker ends up alone with the longest run.
        jobs = [(width, seed) for width in sorted(RUNG_SEEDS, reverse=True) for seed in RUNG_SEEDS[width]]
        with ProcessPoolExecutor(args.workers) as pool:
            futures = [pool.submit(train_and_log, width, seed, log_path(width, seed)) for width, seed in jobs]
            for future in futures:
                print(future.result(), flush=True)
        write_manifest(MANIFEST)
    fit = fit_ladder(read_manifest(MANIFEST).ladder)
    FIT.parent.mkdir(exist_ok=True)
    fit.save(FIT)
    forecast = fit.forecast(plan_of(run_of(TARGET_WIDTH), standard_library()))
    last = forecast.plan.total_steps
    lower, upper = forecast.interval(last, level=0.95)
    print(f"{FIT}: law {fit.law}; the target should end at {forecast.loss(last):.4f} [{lower:.4f}, {upper:.4f}] nats")


if __name__ == "__main__":
    main()
