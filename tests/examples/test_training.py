import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from corpus import standard_library
from faults import Fault
from options import FIT, Setup, parse
from recipe import Training, plan_of, run_of

pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's own use of torch
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def setup_of(folder: Path, *, last_step: int, fault: Fault | None = None, width: int = 20) -> Setup:
    run, corpus = run_of(width), standard_library()
    return Setup(
        run=run,
        plan=plan_of(run, corpus),
        corpus=corpus,
        seed=11,
        fault=fault or Fault(),
        fit=FIT,
        folder=folder,
        last_step=last_step,
        checkpoint_every=100,
    )


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([value.flatten().float() for value in model.state_dict().values()])


def test_the_guard_changes_no_loss_and_no_weight(tmp_path):
    from train_lightning import train

    watched, guard = train(setup_of(tmp_path / "a", last_step=40))
    alone, none = train(setup_of(tmp_path / "b", last_step=40), watched=False)
    assert guard is not None and none is None
    assert torch.equal(watched.losses[:40], alone.losses[:40])
    assert torch.isfinite(watched.losses[:40]).all()
    assert torch.equal(weights(watched.model), weights(alone.model))


def test_lightning_and_the_plain_loop_train_the_same_run(tmp_path):
    from train_lightning import train

    module, _ = train(setup_of(tmp_path, last_step=20), watched=False)
    training = Training(run_of(20), corpus=standard_library(), seed=11, fault=Fault())
    assert module.losses[:20].tolist() == [training.step(step).item() for step in range(1, 21)]
    assert torch.equal(weights(module.model), weights(training.model))


@pytest.mark.parametrize("script", ["train_lightning", "train_raw"])
def test_a_nan_stops_the_run_at_its_step(script, tmp_path, capsys):
    setup = setup_of(tmp_path, last_step=40, fault=Fault(kind="nan", step=15))
    module = __import__(script)
    result, guard = module.train(setup)
    guard = getattr(guard, "guard", guard)
    [event] = [event for event in guard.events if event.kind == "non_finite"]
    assert (event.detected, event.onset) == (15, 15)
    losses = result if isinstance(result, list) else result.losses[:16].tolist()
    assert len([loss for loss in losses[:14] if loss == loss]) == 14
    assert guard.last_step == 15
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert any("non_finite" in line for line in lines)
    assert all(json.loads(line) for line in lines)
    assert "the loss is NaN at step 15" in capsys.readouterr().out


RESUMABLE = """
    import os, signal, sys
    from pathlib import Path
    sys.path[:0] = [{examples!r}, {root!r}, {here!r}]
    import dataclasses, json, torch
    import lightning as L
    import train_lightning
    from faults import Fault
    from test_training import setup_of
    from trajectory_guard.guard import TrajectoryGuard

    torch.set_num_threads(1)
    folder, killed_at, resume = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    setup = setup_of(folder, last_step=170, fault=Fault(kind="data", step=140))
    setup = dataclasses.replace(setup, resume=Path(resume) if resume else None)
    observe = TrajectoryGuard.observe

    def recorded(self, step, loss, **other):
        verdict = observe(self, step, loss, **other)
        with open(folder / "verdicts.txt", "a") as file:
            file.write(repr(verdict) + "\\n")
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return verdict

    TrajectoryGuard.observe = recorded
    train_lightning.train(setup)
"""


def test_a_killed_and_resumed_run_gets_the_verdicts_of_one_that_never_stopped(tmp_path):
    here = Path(__file__).resolve().parent
    code = textwrap.dedent(RESUMABLE).format(examples=str(EXAMPLES), root=str(here.parents[1]), here=str(here))

    def run(folder: Path, killed_at: int, resume: str) -> subprocess.CompletedProcess[str]:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-c", code, str(folder), str(killed_at), resume]
        return subprocess.run(command, capture_output=True, text=True)

    whole = run(tmp_path / "whole", -1, "")
    assert whole.returncode == 0, whole.stderr
    killed = run(tmp_path / "killed", 120, "")
    assert killed.returncode == -9
    resumed = run(tmp_path / "killed", -1, str(tmp_path / "killed" / "checkpoints" / "last.ckpt"))
    assert resumed.returncode == 0, resumed.stderr
    wanted = (tmp_path / "whole" / "verdicts.txt").read_text().splitlines()
    got = (tmp_path / "killed" / "verdicts.txt").read_text().splitlines()
    assert len(got) > 120
    assert got[:120] == wanted[:120]
    assert got[120:] == wanted[100:]
    assert "onset=140" in wanted[-1]  # both stopped at the flag of the fault


def test_options_default_to_half_of_training_and_the_committed_fit():
    setup = parse("", argv=["--fault", "lr", "--threads", "1"])
    assert setup.fault == Fault(kind="lr", step=setup.run.steps // 2)
    assert setup.fit == FIT
    assert setup.last_step == setup.run.steps
    assert parse("", argv=["--fault-step", "7", "--steps-limit", "9", "--threads", "1"]).last_step == 9


def test_the_committed_fit_is_that_of_the_committed_logs():
    import numpy as np
    from make_ladder import MANIFEST

    from trajectory_guard import fit_ladder, load_fit
    from trajectory_guard.manifest import read_manifest

    plan = plan_of(run_of(48), standard_library())
    kept, made = load_fit(FIT), fit_ladder(read_manifest(MANIFEST).ladder)
    assert kept.law == made.law
    steps = np.arange(100, plan.total_steps + 1, 100)
    one, other = (fit.forecast(plan, override_recipe=True) for fit in (kept, made))
    np.testing.assert_allclose(one.loss(steps), other.loss(steps), rtol=1e-6)
    np.testing.assert_allclose(one.half_width(steps, 0.95), other.half_width(steps, 0.95), rtol=1e-6)
    # The fit knows the rungs alone.
    assert {rung.name for rung in kept.rungs} == {"d20", "d24", "d28", "d32"}
