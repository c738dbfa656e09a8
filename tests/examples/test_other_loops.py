"""Fabric, Transformers and two DDP ranks train the run of the plain loop, and a NaN stops each."""

import csv
import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import torch
from corpus import standard_library
from faults import Fault
from options import FIT, Setup
from recipe import Training, plan_of, run_of

from trajectory_guard.sinks.jsonl import read_events

STEPS = 20
FAULT_STEP = 15
# The frameworks' own warnings about versions are not under test.
pytestmark = pytest.mark.filterwarnings("ignore")


def setup_of(folder: Path, *, fault: Fault | None = None) -> Setup:
    run, corpus = run_of(20), standard_library()
    folder.mkdir(exist_ok=True)
    return Setup(
        run=run,
        plan=plan_of(run, corpus),
        corpus=corpus,
        seed=11,
        fault=fault or Fault(),
        fit=FIT,
        folder=folder,
        last_step=STEPS,
    )


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain_losses() -> list[float]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    training = Training(run_of(20), corpus=standard_library(), seed=11, fault=Fault())
    losses = [training.step(step).item() for step in range(1, STEPS + 1)]
    torch.set_num_threads(before)
    return losses


def told_losses(folder: Path) -> list[float]:
    with (folder / "losses.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def check_nan(folder: Path) -> None:
    lines = (folder / "events.jsonl").read_text().splitlines()
    assert all(json.loads(line) for line in lines)
    [(step, event)] = [(step, event) for step, event in read_events(folder / "events.jsonl") if event.severity >= 2]
    assert (step, event.kind, event.onset) == (FAULT_STEP, "non_finite", FAULT_STEP)


@pytest.mark.parametrize("script", ["train_fabric", "train_hf"])
def test_a_framework_trains_the_run_of_the_plain_loop(script: str, tmp_path: Path, plain_losses: list[float]):
    losses, guard = importlib.import_module(script).train(setup_of(tmp_path))
    assert guard.last_step == STEPS
    if script == "train_fabric":
        assert losses == plain_losses
    else:  # Transformers clips over another order of parameters, and the order of a sum decides its last bits.
        assert losses == pytest.approx(plain_losses, rel=1e-5)


@pytest.mark.parametrize("script", ["train_fabric", "train_hf"])
def test_a_nan_stops_a_framework_at_its_step(script: str, tmp_path: Path):
    setup = setup_of(tmp_path, fault=Fault(kind="nan", step=FAULT_STEP))
    losses, guard = importlib.import_module(script).train(setup)
    assert guard.last_step == len(losses) == FAULT_STEP
    check_nan(tmp_path)


@pytest.mark.slow
def test_two_ranks_with_unequal_halves_train_the_run_of_the_plain_loop_and_stop_together_at_a_nan(
    tmp_path: Path, plain_losses: list[float]
):
    from train_ddp import launch

    setup = setup_of(tmp_path / "well")
    assert setup.run.batch % 2 == 1  # One rank has a sequence more than the other.
    launch(setup)
    assert told_losses(setup.folder) == pytest.approx(plain_losses, rel=1e-4)
    setup = dataclasses.replace(
        setup, folder=tmp_path / "nan", fault=Fault(kind="nan", step=FAULT_STEP), last_step=STEPS
    )
    launch(setup)
    assert len(told_losses(setup.folder)) == FAULT_STEP
    check_nan(setup.folder)
