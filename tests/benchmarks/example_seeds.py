"""Three other seeds of the example's target beside the committed fit: errors, interval, events.

    python tests/benchmarks/example_seeds.py                  # healthy runs, about six minutes on two cores
    python tests/benchmarks/example_seeds.py --seeds 7 8      # other seeds
    python tests/benchmarks/example_seeds.py --faults         # the three faults at half of training instead

Bounds: within 3 % at every 2 % window after 10 % of training, 1.2 % on average, and no warning; a fault is flagged at
once (nan) or within 50 steps (lr, data), its onset within 20 steps of the truth. Exits with 1 when one is missed.
"""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch  # noqa: E402
from corpus import standard_library  # noqa: E402
from faults import Fault, FaultKind  # noqa: E402
from options import ACTIONS, FIT  # noqa: E402
from recipe import TARGET_WIDTH, Training, plan_of, run_of  # noqa: E402
from table import compare  # noqa: E402

from trajectory_guard import Severity, TrajectoryGuard, load_fit  # noqa: E402

SEEDS = (101, 102, 103)
MAX_PERCENT, MEAN_PERCENT = 3.0, 1.2
DELAY = {"nan": 0, "lr": 50, "data": 50}
ONSET_ERROR = 20


def watch(seed: int, kind: FaultKind) -> tuple[str, bool]:
    """Train one target run on one thread under the guard; returns what to print and whether it held."""
    torch.set_num_threads(1)
    run, corpus = run_of(TARGET_WIDTH), standard_library()
    fault = Fault(kind=kind, step=run.steps // 2)
    training = Training(run, corpus=corpus, seed=seed, fault=fault)
    guard = TrajectoryGuard(load_fit(FIT).forecast(plan_of(run, corpus)), actions=ACTIONS)
    losses = []
    with guard:
        for step in range(1, run.steps + 1):
            losses.append(training.step(step).item())
            guard.observe(step, losses[-1], tokens=run.tokens_per_step, channels=training.model.expert_loads())
            if kind != "none" and guard.should_stop:
                break
    seen = compare(losses, guard.forecast)
    flags = [event for event in guard.events if event.severity >= Severity.WARNING]
    said = [f"  {e.severity.name} {e.kind}, detected {e.detected}, onset {e.onset}: {e.sentence}" for e in guard.events]
    head = f"seed {seed}, fault {kind}: mean {seen.mean_percent:.2f} %, largest {seen.max_percent:.2f} %"
    if kind == "none":
        held = seen.mean_percent <= MEAN_PERCENT and seen.max_percent <= MAX_PERCENT and not flags
        return "\n".join([head + f", {len(flags)} warnings", seen.table, *said]), held
    first = next((event for event in flags if not event.kind.startswith("channel/")), None)
    held = (
        first is not None
        and first.onset is not None
        and 0 <= first.detected - fault.step <= DELAY[kind]
        and abs(first.onset - fault.step) <= ONSET_ERROR
    )
    return "\n".join([f"{head}; fault at step {fault.step}, stopped at {len(losses)}", *said]), held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--faults", action="store_true", help="faulted runs instead of healthy ones")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    kinds: tuple[FaultKind, ...] = ("lr", "data", "nan") if args.faults else ("none",)
    missed = 0
    with ProcessPoolExecutor(args.workers) as pool:
        for future in [pool.submit(watch, seed, kind) for seed in args.seeds for kind in kinds]:
            text, held = future.result()
            missed += not held
            print(text, "" if held else "  MISSED a bound", sep="\n", flush=True)
    print(f"{missed} of {len(args.seeds) * len(kinds)} runs missed a bound")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
