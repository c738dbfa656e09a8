"""Feed damaged logs to every reader and to the follower until the time is up; any error but the library's is a find.

    python tests/benchmarks/fuzz_logs.py [SECONDS_PER_READER] [SEED]

Each reader gets mutations of a valid log of its kind: bytes flipped, removed, doubled, replaced by numbers and words
that logs hold, lines shuffled and cut. The first input that fails is written to ./fuzz_found.bin and ends the run.
"""

import gzip
import json
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from trajectory_guard.errors import TrajectoryGuardError  # noqa: E402
from trajectory_guard.logs import LogFollower, read_log, schedule_from_lr  # noqa: E402
from trajectory_guard.lr_schedule import LRSchedule  # noqa: E402
from trajectory_guard.plan import RunPlan  # noqa: E402
from trajectory_guard.recipe import Recipe  # noqa: E402

PLAN = RunPlan(
    total_steps=100,
    tokens_per_step=((1, 10), (51, 30)),
    active_params=1e6,
    schedule=LRSchedule(shape="cosine"),
    recipe=Recipe(vocab_size=256),
)

WORDS = [b"nan", b"NaN", b"Infinity", b"-inf", b"1e999", b"-1", b"0", b"9" * 40, b"1_0", b"", b'"', b"\x00", b"\xff"]
WORDS += [
    b"\xef\xbb\xbf",
    b",",
    b";",
    b"\t",
    b"\n",
    b"\r",
    b"step",
    b"loss",
    b"run",
    b"split",
    b"{",
    b"}",
    b"[",
    b"null",
]
WORDS += [b" - ", b"log_history", b"true", b"\x1f\x8b", b"1.5", b"9007199254740993", b"{" * 30, b'{"a":' * 20]


def seeds() -> dict[str, bytes]:
    """Return one valid log a reader."""
    rows = [(s, s * 10, 5 - s / 100, 1e-3, 0.5 + s) for s in range(1, 101)]
    entries = [dict(zip(("step", "tokens", "loss", "lr", "grad_norm"), row, strict=True)) for row in rows]
    plain = "step,tokens,loss,lr,grad_norm\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)
    wandb = '"Step","a - loss","a - loss__MIN","b - loss"\n' + "".join(f'"{r[0]}","{r[2]}","{r[2]}",""\n' for r in rows)
    labelled = "run,split,step,loss\n" + "".join(f"a,train,{r[0]},{r[2]}\na,val,{r[0]},{r[2]}\n" for r in rows)
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    history = [{"step": e["step"], "loss": e["loss"], "learning_rate": e["lr"]} for e in entries]
    found = {
        "csv": plain.encode(),
        "wandb": wandb.encode(),
        "labelled": labelled.encode(),
        "jsonl": lines.encode(),
        "trainer_state": json.dumps({"logging_steps": 1, "log_history": history}, indent=1).encode(),
        "gzip": gzip.compress(plain.encode()),
    }
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("tensorboard or torch is absent: event files are not fuzzed")
        return found
    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            for entry in entries:
                for name in ("loss", "lr"):
                    writer.add_scalar(name, entry[name], entry["step"])
        found["events"] = next(Path(folder).iterdir()).read_bytes()
    return found


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return a copy with one to a dozen damages."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 2, 4, 12))):
        at = rng.randrange(len(content) + 1)
        match rng.randrange(7):
            case 0 if content:
                content[min(at, len(content) - 1)] = rng.randrange(256)
            case 1:
                del content[at : at + rng.choice((1, 8, 200))]
            case 2:
                content[at:at] = content[at : at + rng.choice((4, 60, 900))]
            case 3 | 4:
                word = rng.choice(WORDS)
                content[at : at + rng.choice((0, len(word)))] = word
            case 5:
                parts = content.split(b"\n")
                rng.shuffle(parts)
                content = bytearray(b"\n".join(parts))
            case 6:
                # A whole cell, so that numbers stay numbers.
                ends = [content.find(mark, at) for mark in b",:\n"]
                start = min((end for end in ends if end >= 0), default=at)
                stop = content.find(b",", start + 1)
                if stop > start:
                    content[start + 1 : stop] = rng.choice(WORDS)
    return bytes(content)


def attempt(path: Path, rng: random.Random) -> None:
    """Read a file in every way; the library's own errors are what a damaged log deserves."""
    calls: list[Callable[[], object]] = [
        lambda: list(read_log(path, plan=PLAN).rows()),
        lambda: read_log(path, plan=PLAN, axis="tokens", unit="bits"),
        lambda: read_log(path, plan=PLAN, split="validation", run="a"),
        lambda: schedule_from_lr(read_log(path, plan=PLAN).curve, PLAN) if rng.random() < 0.02 else None,
        lambda: follow(path, rng),
    ]
    for call in calls:
        try:
            call()
        except TrajectoryGuardError:
            continue


def follow(path: Path, rng: random.Random) -> None:
    """Follow the file as it grows, with a restart of the follower in between."""
    data = path.read_bytes()
    grown = path.with_name("grown." + path.name)
    grown.write_bytes(data[: rng.randrange(len(data) + 1)])
    follower = LogFollower(grown, plan=PLAN)
    follower.poll()
    grown.write_bytes(data)
    other = LogFollower(grown, plan=PLAN)
    other.load_state_dict(json.loads(json.dumps(follower.state_dict(), allow_nan=False)))
    other.poll()
    other.poll()


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 120.0
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    warnings.simplefilter("error")
    for kind, seed in seeds().items():
        with tempfile.TemporaryDirectory() as folder:
            name = "events.out.tfevents.1.host" if kind == "events" else f"log.{kind}"
            path = Path(folder) / name
            end, count = time.monotonic() + seconds, 0
            while time.monotonic() < end:
                data = mutated(seed, rng)
                path.write_bytes(data)
                try:
                    attempt(path, rng)
                except Exception:
                    Path("fuzz_found.bin").write_bytes(data)
                    traceback.print_exc()
                    sys.exit(f"{kind}: found after {count} inputs; the input is in fuzz_found.bin")
                count += 1
            print(f"{kind:14} {count:7} inputs, nothing found", flush=True)


if __name__ == "__main__":
    main()
