"""Feed damaged files of our own formats to their readers until the time is up; any other error than ours is a find.

    python tests/benchmarks/fuzz_files.py [SECONDS_PER_FORMAT] [SEED]

Fit, plan, ladder manifest, event log, guard state and the state of a watch; `fuzz_logs.py` does the same to the logs of
trainers. A file is damaged in its bytes, or keeps its form and gets one wrong value. What is read is also used: a fit
forecasts, a state goes on judging. The first input that fails is written to ./fuzz_found.bin and ends the run.
"""

import contextlib
import copy
import json
import logging
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import numpy as np  # noqa: E402
from fuzz_logs import mutated  # noqa: E402

from trajectory_guard.commands import describe  # noqa: E402
from trajectory_guard.detect.events import Severity  # noqa: E402
from trajectory_guard.errors import TrajectoryGuardError  # noqa: E402
from trajectory_guard.fit import load_fit  # noqa: E402
from trajectory_guard.forecast import Forecast  # noqa: E402
from trajectory_guard.guard import TrajectoryGuard  # noqa: E402
from trajectory_guard.logs import LogFollower  # noqa: E402
from trajectory_guard.lr_schedule import LRSchedule  # noqa: E402
from trajectory_guard.manifest import read_manifest  # noqa: E402
from trajectory_guard.picture import RunRecord  # noqa: E402
from trajectory_guard.plan import RunPlan  # noqa: E402
from trajectory_guard.recipe import Recipe  # noqa: E402
from trajectory_guard.report import write_report  # noqa: E402
from trajectory_guard.sinks.console import event_line  # noqa: E402
from trajectory_guard.sinks.jsonl import JsonlSink, read_events  # noqa: E402
from trajectory_guard.watch import LogWatch  # noqa: E402

JUNK: list[Any] = [None, True, 0, -1, 3, 2.5, 1e308, -1e308, 1e-320, 2**70, "", "x", "1", [], [[]], [None], [1, 2], {}]
JUNK += [{"a": 1}, [[1, 2], [3]], "nan", 10**6]

MANIFEST = """
[recipe]
tokenizer = "a"
vocab_size = 3
[plan]
total_steps = 10
schedule = { shape = "linear", warmup = 0.1 }
[read]
unit = "nats"
[[rung]]
name = "a"
active_params = 100
tokens_per_step = 5
log = "a.csv"
[[rung]]
name = "b"
active_params = 200
tokens_per_step = [[1, 10], [5, 20]]
log = ["b.csv"]
"""

PLAN = RunPlan(
    total_steps=900,
    tokens_per_step=((1, 64), (500, 128)),
    active_params=1e4,
    schedule=LRSchedule(shape="wsd", warmup=0.02, decay_start=0.8),
    recipe=Recipe(tokenizer="a", vocab_size=256, data_phases=(0.5,), software={"python": "3"}),
)


def forecast() -> Forecast:
    g = np.linspace(0.02, 1, 50)
    return Forecast(PLAN, progress=g, loss=1 + g**-0.2, half_widths={0.8: 0.01, 0.95: 0.02})


def loss(step: int, rng: random.Random) -> float:
    """A run with a NaN at step 30 and a jump after 620."""
    expected = float(np.nan_to_num(forecast_of_run.loss(step), nan=4.0))
    return float("nan") if step == 30 else expected * (1.1 if step > 620 else 1.0) + rng.gauss(0.0, 0.02)


forecast_of_run = forecast()


def silent_guard(**keywords: Any) -> TrajectoryGuard:
    return TrajectoryGuard(forecast_of_run, actions={severity: () for severity in Severity}, **keywords)


def seeds(folder: Path) -> dict[str, bytes]:
    """Return one valid file of each format; what they refer to lies in the folder."""
    rng = random.Random(1)
    for name in ("a", "b"):
        (folder / f"{name}.csv").write_text("step,loss\n" + "".join(f"{s},{3 - 0.1 * s}\n" for s in range(1, 11)))
    rows = [(step, loss(step, rng)) for step in range(1, 701)]
    (folder / "run.csv").write_text("step,loss\n" + "".join(f"{step},{value}\n" for step, value in rows))
    PLAN.save(folder / "plan.json")
    guard = silent_guard(sinks=[JsonlSink(folder / "events.jsonl")])
    for step, value in rows:
        guard.observe(step, value, channels={"grad_norm": 1.0 + 0.1 * rng.random()})
    state = guard.state_dict()
    guard.close()
    watch = LogWatch(forecast_of_run, LogFollower(folder / "run.csv", plan=PLAN), state=folder / "watch.json")
    with contextlib.redirect_stderr(None):
        watch.poll()
    fits = sorted((ROOT / "examples" / "fits").glob("*.json"), key=lambda path: path.stat().st_size)
    return {
        **{f"fit {path.stem}": path.read_bytes() for path in fits},
        "plan": (folder / "plan.json").read_bytes(),
        "manifest": MANIFEST.encode(),
        "events": (folder / "events.jsonl").read_bytes(),
        "state": json.dumps(state).encode(),
        "watch": (folder / "watch.json").read_bytes(),
    }


def use_fit(path: Path, rng: random.Random) -> None:
    fit = load_fit(path)
    describe(fit)
    if fit.rungs:
        made = fit.forecast(fit.rungs[-1].plan, override_recipe=True)
        made.interval(made.plan.total_steps)
    fit.save(path.with_name("again.json"))


def use_plan(path: Path, rng: random.Random) -> None:
    plan = RunPlan.load(path)
    if not (np.isfinite(plan.total_flops) and plan.identity() and np.all(np.isfinite(plan.progress([0, 1, 10])))):
        raise ValueError("a plan was read that is not finite")


def use_manifest(path: Path, rng: random.Random) -> None:
    read_manifest(path)


def use_events(path: Path, rng: random.Random) -> None:
    found = read_events(path)
    for step, event in found:
        event_line(event, step)
    if rng.random() < 0.002:
        record = RunRecord(step=np.arange(1, 801), loss=np.full(800, 2.0), events=[event for _, event in found])
        write_report(path.with_name("report.html"), forecast_of_run, record)


def use_state(path: Path, rng: random.Random) -> None:
    try:
        state = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    guard = silent_guard()
    guard.load_state_dict(state)
    for step in (701, 702, 704, 650):
        guard.observe(step, loss(step, rng), channels={"grad_norm": 1.0})
    json.dumps(guard.state_dict())


def use_watch(path: Path, rng: random.Random) -> None:
    LogWatch(forecast_of_run, LogFollower(path.with_name("run.csv"), plan=PLAN), state=path).poll()


USES: dict[str, Callable[[Path, random.Random], None]] = {
    "fit": use_fit,
    "plan": use_plan,
    "manifest": use_manifest,
    "events": use_events,
    "state": use_state,
    "watch": use_watch,
}


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return a copy with damaged bytes, or for JSON with one or two wrong, missing or additional values."""
    if rng.random() < 0.4:
        return mutated(data, rng)
    try:
        lines = [json.loads(data)]
    except ValueError:
        try:
            lines = [json.loads(line) for line in data.splitlines()]
        except ValueError:
            return mutated(data, rng)
    for _ in range(rng.choice((1, 1, 2))):
        holder: Any = lines
        key: Any = rng.randrange(len(lines))
        while isinstance(holder[key], (dict, list)) and holder[key] and rng.random() < 0.9:
            holder = holder[key]
            key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        match rng.randrange(5):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder["unknown"] = copy.deepcopy(holder[key])
            case _:
                holder[key] = copy.deepcopy(rng.choice(JUNK))
        if not lines:
            break
    return "\n".join(json.dumps(line) for line in lines).encode()


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 120.0
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    warnings.simplefilter("error")
    # A detector that breaks is reported once and switched off: that is no find.
    logging.disable(logging.CRITICAL)
    # Numbers like 1e308 overflow in numpy, with a warning: they are finite, and nonsense shows as such.
    with tempfile.TemporaryDirectory() as name, np.errstate(all="ignore"):
        folder = Path(name)
        found = seeds(folder)
        share = seconds / max(1, sum(kind.startswith("fit ") for kind in found))
        for kind, seed in found.items():
            use = USES[kind.split()[0]]
            path = folder / "damaged"
            path.write_bytes(seed)
            use(path, rng)
            end, count = time.monotonic() + (share if kind.startswith("fit ") else seconds), 0
            while time.monotonic() < end:
                data = damaged(seed, rng)
                path.write_bytes(data)
                try:
                    use(path, rng)
                except TrajectoryGuardError:
                    pass
                except Exception:
                    Path("fuzz_found.bin").write_bytes(data)
                    traceback.print_exc()
                    sys.exit(f"{kind}: found after {count} inputs; the input is in fuzz_found.bin")
                count += 1
            print(f"{kind:24} {count:7} inputs, nothing found", flush=True)


if __name__ == "__main__":
    main()
