"""Kill -9 at random moments of a checkpointed run: does it go on as if nothing had happened?

python tests/benchmarks/kill_nine.py               # twenty kills of one run, two to four minutes

One run trains to its end undisturbed; the other is killed at random steps and at a random moment within them, and goes
on from its newest checkpoint each time. Then: after every kill the event log is readable; every verdict that the killed
run ever gave, replayed steps included, equals the undisturbed one's; so do its events; and its TensorBoard points are
the same, none twice. The run has a NaN, and a change of level that ends again.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from trajectory_guard import TrajectoryGuard
from trajectory_guard.detect.events import Event
from trajectory_guard.forecast import Forecast
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan
from trajectory_guard.sinks.jsonl import JsonlSink, read_events
from trajectory_guard.sinks.tensorboard import TensorBoardSink

STEPS, SAVE_EVERY, BATCH = 1500, 25, 256
NAN_AT, SHIFT = 700, range(900, 1150)
PATIENCE_S = 120.0


def child(folder: Path) -> None:
    """Train from the newest checkpoint, or from the start, to the end."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    plan = RunPlan(total_steps=STEPS, tokens_per_step=BATCH, active_params=9, schedule=LRSchedule(shape="constant"))
    forecast = Forecast(plan, progress=[0.02, 1.0], loss=[1.01, 1.01], half_widths={0.8: 0.02, 0.95: 0.04})
    sinks = [JsonlSink(folder / "events.jsonl"), TensorBoardSink(folder / "tensorboard")]
    first, checkpoint = 1, folder / "checkpoint.pt"
    with (
        open(folder / "verdicts.txt", "ab", buffering=0) as verdicts,
        TrajectoryGuard(forecast, sinks=sinks, log_every_n_steps=5) as guard,
    ):
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            guard.load_state_dict(saved["guard"])
            guard.note_checkpoint(saved["step"])
            first = saved["step"] + 1
        for step in range(first, STEPS + 1):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH, 8, generator=generator)
            noise = torch.randn(BATCH, 1, generator=generator) * (1.2 if step in SHIFT else 1.0)
            loss = ((model(x) - x.sum(dim=1, keepdim=True) - noise) ** 2).mean()
            if step == NAN_AT:
                loss = loss * float("nan")
            else:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            verdict = guard.observe(step, loss.item(), tokens=BATCH)
            verdicts.write(f"{step}\t{verdict!r}\n".encode())
            if step % SAVE_EVERY == 0:
                content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save({**content, "guard": guard.state_dict()}, folder / "new.pt")
                os.replace(folder / "new.pt", checkpoint)
                guard.note_checkpoint(step)
            time.sleep(0.001)  # So that the other process can see a step pass.


def start(folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-W", "ignore", __file__, "--child", str(folder)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    try:
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    if process.returncode != 0:
        raise SystemExit(f"the run failed by itself:\n{said}")


def newest_step(folder: Path, offset: int) -> int:
    """Step of the newest verdict written beyond `offset` bytes; 0 when there is none."""
    path = folder / "verdicts.txt"
    if not path.exists() or path.stat().st_size <= offset:
        return 0
    with path.open("rb") as file:
        file.seek(offset)
        lines = file.read().split(b"\n")[:-1]
    return int(lines[-1].split(b"\t")[0]) if lines else 0


def kill(folder: Path, at: int, delay_s: float) -> int:
    """Start or go on with the run, kill it `delay_s` after step `at`, and return the last step it judged."""
    path = folder / "verdicts.txt"
    offset = path.stat().st_size if path.exists() else 0
    process = start(folder)
    give_up = time.monotonic() + PATIENCE_S
    while newest_step(folder, offset) < at and process.poll() is None and time.monotonic() < give_up:
        time.sleep(0.002)
    time.sleep(delay_s)
    process.kill()
    _, said = process.communicate()
    if process.returncode not in (-9, 0):
        raise SystemExit(f"the run failed by itself:\n{said}")
    return newest_step(folder, offset)


def verdicts_of(folder: Path) -> list[tuple[int, str]]:
    """(step, verdict) of every whole line, in the order of writing."""
    lines = (folder / "verdicts.txt").read_text().split("\n")[:-1]
    return [(int(step), verdict) for step, verdict in (line.split("\t", 1) for line in lines)]


def events_of(folder: Path) -> list[tuple[int, Event]]:
    path = folder / "events.jsonl"
    return read_events(path) if path.exists() else []


def points_of(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """(step, value) of every scalar tag, in order; values as text, so that NaN equals NaN."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    tags = found.Tags()["scalars"]
    return {tag: [(point.step, repr(point.value)) for point in found.Scalars(tag)] for tag in tags}


def check(kills: int, folder: Path, *, seed: int = 0) -> dict[str, int]:
    """Run undisturbed and killed, and compare; returns what was counted.

    Raises:
        AssertionError: something differs, is unreadable, or stands twice.
    """
    rng = random.Random(seed)
    whole, killed = folder / "whole", folder / "killed"
    reference = start(whole)
    for at in sorted(rng.sample(range(5, STEPS - 5), kills)):
        last = kill(killed, at, rng.uniform(0.0, 0.01))
        lines = len(events_of(killed))  # Raises where the log cannot be read.
        print(f"killed after step {last:5,} (wanted {at:5,}); the event log reads: {lines} lines", flush=True)
    finish(start(killed))
    finish(reference)
    expected, got = dict(verdicts_of(whole)), verdicts_of(killed)
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert {step for step, _ in got} == set(expected)
    for step, verdict in got:
        assert verdict == expected[step], f"step {step}:\n  killed {verdict}\n  whole  {expected[step]}"
    replayed = len(got) - STEPS
    events = events_of(whole)
    assert events_of(killed) == events
    assert {event.kind for _, event in events} >= {"non_finite", "spike", "off_forecast"}, events
    points, others = points_of(whole), points_of(killed)
    assert set(points) == set(others) and points
    for tag, values in others.items():
        steps = [step for step, _ in values]
        assert len(steps) == len(set(steps)), f"{tag}: points stand twice"
        assert values == points[tag], f"{tag}: points differ"
    return {
        "kills": kills,
        "steps": STEPS,
        "replayed": replayed,
        "event_lines": len(events),
        "points": sum(len(values) for values in others.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        counted = check(args.kills, Path(folder), seed=args.seed)
    print(
        "{kills} kills of a run of {steps} steps: {replayed} steps were judged again, every verdict equal; "
        "{event_lines} lines in the event log, the same; {points} TensorBoard points, the same, none twice".format(
            **counted
        )
    )


if __name__ == "__main__":
    main()
