"""The options that every training example shares."""

import argparse
import importlib.util
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from corpus import Corpus, standard_library
from faults import Fault, FaultKind
from recipe import TARGET_SEED, TARGET_WIDTH, Run, plan_of, run_of

from trajectory_guard import RunPlan

FIT = Path(__file__).resolve().parent / "fits" / "moe_tiny.json"
"""The committed fit: made from the rungs alone by make_ladder.py."""


ACTIONS = {"warning": "stop", "channel": "warn"}
"""What the guards of the examples do: the loss may stop a run, the experts' loads are only told of."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run of the target as the command line asks for it."""

    run: Run
    plan: RunPlan
    corpus: Corpus
    seed: int
    fault: Fault
    fit: Path
    folder: Path
    """Where events, TensorBoard files and checkpoints go."""
    last_step: int
    """The run ends here; the plan, schedule and forecast do not change."""
    resume: Path | None = None
    checkpoint_every: int = 500
    """Steps between checkpoints, where the script writes them."""

    @property
    def report(self) -> Path | None:
        """Where the report of the run goes; none without matplotlib, which draws it."""
        return self.folder / "report.html" if importlib.util.find_spec("matplotlib") else None


def parse(description: str, *, resumable: bool = False, argv: list[str] | None = None) -> Setup:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=get_args(FaultKind), default="none", help="what goes wrong")
    parser.add_argument("--fault-step", type=int, help="first step it acts on; by default half of training")
    parser.add_argument("--seed", type=int, default=TARGET_SEED)
    parser.add_argument("--fit", type=Path, default=FIT, help="by default the committed fit")
    parser.add_argument("--out", type=Path, help="folder of the run; by default a new one under runs")
    parser.add_argument("--steps-limit", type=int, help="end early, with the plan as it is")
    if resumable:
        parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    run, corpus = run_of(TARGET_WIDTH), standard_library()
    resume = args.resume if resumable else None
    return Setup(
        run=run,
        plan=plan_of(run, corpus),
        corpus=corpus,
        seed=args.seed,
        fault=Fault(kind=args.fault, step=args.fault_step or run.steps // 2),
        fit=args.fit,
        folder=args.out or (resume.parent.parent if resume else _new_folder(f"{args.fault}-seed{args.seed}")),
        last_step=min(args.steps_limit or run.steps, run.steps),
        resume=resume,
    )


def _new_folder(name: str) -> Path:
    """runs/<name>, or with a number behind it where that exists: two runs in one folder would mix their curves."""
    folders = (Path("runs") / f"{name}{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
    return next(folder for folder in folders if not folder.exists())
