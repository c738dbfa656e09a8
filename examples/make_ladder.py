"""Train the ladder's rungs, write their logs and manifest, and fit them.

    python examples/make_ladder.py            # about 5 minutes on two cores; rewrites examples/ladder and the fit
    python examples/make_ladder.py --fit-only # fit the committed logs again, seconds

Another machine or Python gives logs that differ in the last digits, or by tenths of a percent where the standard
library differs; the fit then is one for that corpus.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from corpus import standard_library
from faults import Fault
from recipe import RUNG_SEEDS, SCHEDULE, Training, run_of

HERE = Path(__file__).resolve().parent
LADDER = HERE / "ladder"
FIT = HERE / "fits" / "moe_tiny.json"


def log_path(width: int, seed: int) -> Path:
    """Where one run's log stands."""
    return LADDER / f"d{width}_seed{seed}.csv"


def train_and_log(width: int, seed: int, path: Path) -> str:
    """Train one run of the recipe on one thread and write its log; returns a line to print."""
    torch.set_num_threads(1)
    run = run_of(width)
    training = Training(run, corpus=standard_library(), seed=seed, fault=Fault())
    losses = [training.step(step) for step in range(1, run.steps + 1)]
    rows = ["step,tokens,lr,loss"]
    for step, loss in enumerate(losses, start=1):
        lr = run.peak_lr * float(SCHEDULE.ratio(step / run.steps))
        rows.append(f"{step},{step * run.tokens_per_step},{lr:.4g},{loss.item():.4f}")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text("\n".join(rows) + "\n")
    os.replace(scratch, path)
    last = torch.stack(losses[-run.steps // 50 :]).mean().item()
    balance = training.model.router_metrics()["router/max_violation"]
    return f"d{width} seed {seed}: {run.steps} steps, last 2 % at {last:.4f} nats, max violation {balance:.2f}"


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


if __name__ == "__main__":
    main()
