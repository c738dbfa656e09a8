"""What the report of a run of a million steps costs, part by part, and how large it is.

    python tests/benchmarks/report_cost.py [STEPS]

A made-up run around the example's forecast, as CSV of step, loss and learning rate. CPU seconds.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import trajectory_guard.report as report  # noqa: E402
from trajectory_guard.__main__ import main as command  # noqa: E402
from trajectory_guard.fit import load_fit  # noqa: E402

FIT = ROOT / "examples" / "fits" / "moe_tiny.json"


def write_run(folder: Path, steps: int) -> None:
    """Write log and plan of a run whose losses lie 1 % around the forecast."""
    fit = load_fit(FIT)
    largest = fit.rungs[-1].plan
    plan = dataclasses.replace(largest, total_steps=steps, tokens_per_step=max(1, largest.total_tokens // steps))
    plan.save(folder / "plan.json")
    step = np.arange(1, steps + 1)
    expected = np.nan_to_num(np.asarray(fit.forecast(plan, override_recipe=True).loss(step)), nan=5.5)
    loss = expected * np.exp(0.01 * np.random.default_rng(0).standard_normal(steps))
    with (folder / "run.csv").open("w") as file:
        file.write("step,loss,lr\n")
        file.writelines(f"{s},{value:.6g},0.001\n" for s, value in zip(step.tolist(), loss.tolist(), strict=True))


def timed(name: str, spent: dict[str, float]) -> None:
    """Replace a function of the report's module by one that adds up its CPU seconds."""
    call: Callable[..., Any] = getattr(report, name)

    @functools.wraps(call)
    def measured(*args: Any, **keywords: Any) -> Any:
        began = time.process_time()
        try:
            return call(*args, **keywords)
        finally:
            spent[name] = spent.get(name, 0.0) + time.process_time() - began

    setattr(report, name, measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="?", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    spent: dict[str, float] = {}
    for name in ("open_log", "replay", "write_report"):
        timed(name, spent)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, steps)
        words = ["report", str(FIT), str(folder / "run.csv"), "--plan", str(folder / "plan.json"), "--override-recipe"]
        began = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert command([*words, "-o", str(folder / "report.html")]) == 0
        whole, size = time.process_time() - began, (folder / "report.html").stat().st_size
    print(f"{steps:,} steps: {whole:.1f} s of CPU, report of {size / 1e6:.2f} MB")
    for name, words_ in (("open_log", "read the log"), ("replay", "replay"), ("write_report", "draw and write")):
        print(f"  {words_:16} {spent[name]:6.1f} s")


if __name__ == "__main__":
    main()
