"""Lag-1 autocorrelation of public training logs, which sets the limit above which a log is called smoothed.

    python tests/benchmarks/log_checks.py [DATA]

DATA is the folder of public logs (default: ../shared/data or $TRAJECTORY_GUARD_DATA). Prints one line per file: runs,
quantiles of the autocorrelation, and the part of runs called smoothed. Also the speed of the readers.
"""

import csv
import gzip
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from trajectory_guard.logs import read_log  # noqa: E402
from trajectory_guard.logs.stitch import SMOOTHED_AUTOCORRELATION, residual_autocorrelation  # noqa: E402

FILES = {
    "steps/modded_nanogpt.csv.gz": "raw, every step",
    "ladders/hagele_train.csv.gz": "raw, one micro-batch of every 50th step",
    "ladders/losscast_steplaw.csv.gz": "sparse",
    "ladders/losscast_nanochat.csv.gz": "exponential mean, weight 0.9",
    "ladders/mpl.csv.gz": "smoothed, by its README",
}


def main() -> None:
    data = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("TRAJECTORY_GUARD_DATA", ROOT / "../shared/data"))
    print(f"{'file':34} {'what':42} runs    5 %   50 %   95 %  called smoothed")
    for name, what in FILES.items():
        if not (data / name).exists():
            print(f"{name:34} absent")
            continue
        runs: dict[str, list[tuple[float, float]]] = defaultdict(list)
        with gzip.open(data / name, "rt") as file:
            for row in csv.DictReader(file):
                if row["loss"] and not row["run"].endswith("#val"):
                    runs[row["run"]].append((float(row["step"]), float(row["loss"])))
        found = []
        for points in runs.values():
            loss = np.array([value for _, value in sorted(points)])
            value = residual_autocorrelation(loss[np.isfinite(loss)])
            if value is not None:
                found.append(value)
        low, middle, high = np.quantile(found, [0.05, 0.5, 0.95])
        called = np.mean(np.array(found) > SMOOTHED_AUTOCORRELATION)
        print(f"{name:34} {what:42} {len(found):4} {low:6.2f} {middle:6.2f} {high:6.2f}  {called:.1%}")
    speed()


def speed() -> None:
    """Time the readers on synthetic logs of five columns."""
    rows = 300_000
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("csv", "jsonl"):
            path = Path(folder) / f"log.{kind}"
            with open(path, "w") as file:
                if kind == "csv":
                    file.write("step,tokens,loss,lr,grad_norm\n")
                for step in range(1, rows + 1):
                    cells = {"step": step, "tokens": step * 8, "loss": 2 + 1 / step, "lr": 1e-3, "grad_norm": 0.5}
                    file.write((",".join(map(str, cells.values())) if kind == "csv" else json.dumps(cells)) + "\n")
            start = time.perf_counter()
            log = read_log(path)
            taken = time.perf_counter() - start
            print(f"{kind}: {len(log.step) / taken:,.0f} rows/s")


if __name__ == "__main__":
    main()
