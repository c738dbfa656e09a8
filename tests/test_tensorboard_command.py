"""`trajectory-guard tensorboard`: a run that was logged without a guard gets what a guard would have written."""

import math
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch.utils.tensorboard")
from torch.utils.tensorboard.writer import SummaryWriter

from trajectory_guard import fit_ladder
from trajectory_guard.__main__ import main
from trajectory_guard.logs.tensorboard import read_tensorboard
from trajectory_guard.sinks.tensorboard import TensorBoardSink

STEPS = 1200


@pytest.fixture(scope="module")
def source(tmp_path_factory, synthetic_ladder, synthetic_rung) -> Path:
    """A fit, a plan, and a run whose loss jumps by 20 % at step 900, logged from step 0 as Lightning does."""
    folder = tmp_path_factory.mktemp("source")
    fit_ladder(synthetic_ladder, "matched-progress").save(folder / "fit.json")
    rung = synthetic_rung(8e4, noise=0.03, steps=STEPS)
    rung.plan.save(folder / "plan.json")
    loss = rung.curves[0].loss.copy()
    loss[899:] *= 1.2
    with SummaryWriter(str(folder / "run")) as writer:
        for step, value in enumerate(loss.tolist()):
            writer.add_scalar("train/loss", value, step)
            writer.add_scalar("grad_norm", 1.0 + step / STEPS, step)
    return folder


@pytest.fixture
def run(source: Path, tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    for file in (source / "run").iterdir():
        (tmp_path / "run" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "run"


def words(source: Path, run: Path, *more: str) -> list[str]:
    return ["tensorboard", str(source / "fit.json"), str(run), "--plan", str(source / "plan.json"), *more]


def tags_of(folder: Path) -> dict:
    return {name: column.values for name, column in read_tensorboard(folder).columns.items()}


def test_the_guards_cards_and_forecast_stand_in_a_sub_run(source, run, capsys):
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    assert main(words(source, run)) == 0
    assert {name: (run / name).read_bytes() for name in before} == before
    assert {path.name for path in run.iterdir()} == {*before, "guard"}
    tags = tags_of(run / "guard")
    assert {"guard/loss", "guard_bands/lower", "guard_bands/upper", "guard/residual_percent", "guard/flag"} <= set(tags)
    assert tags["guard/flag"].max() == 1.0 and len(tags["guard/loss"]) >= STEPS
    assert np.nanmedian(tags["guard/residual_percent"][1000:]) > 10
    assert tags["guard/residual_mean_percent"][-1] > 10
    # An outlook from 15 % of training on, and one that has seen the jump at the end.
    known = tags["guard/outlook"][np.isfinite(tags["guard/outlook"])]
    assert 1000 < len(known) <= 1200 and known[-1] > 1.03 * known[0]
    for curve in ("forecast", "forecast_lower", "forecast_upper"):
        assert "train/loss" in tags_of(run / "guard" / curve)
    assert "events of WARNING and above" in capsys.readouterr().out
    assert oct(os.stat(run / "guard").st_mode)[-3:] == "755"


def test_channels_that_are_named_get_their_cards(source, run, capsys):
    assert main(words(source, run, "--channel", "entropy")) == 2
    assert "no columns ['entropy']; it has" in capsys.readouterr().err
    assert main(words(source, run, "--channel", "grad_norm")) == 0
    assert tags_of(run / "guard")["guard/channel/grad_norm"][-1] == pytest.approx(2.0, abs=0.01)


def test_sentences_of_events_are_there(source, run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main(words(source, run, "--name", "check")) == 0
    read = EventAccumulator(str(run / "check"), size_guidance={"tensors": 0}).Reload()
    texts = [event.tensor_proto.string_val[0].decode() for event in read.Tensors("check/events/text_summary")]
    assert any("warning" in text or "certified" in text or "critical" in text for text in texts)


def test_it_is_refused_where_it_was_done_already(source, run, capsys):
    assert main(words(source, run)) == 0
    again = sorted(path.name for path in (run / "guard").iterdir())
    assert main(words(source, run)) == 2
    assert "exists" in capsys.readouterr().err
    assert sorted(path.name for path in (run / "guard").iterdir()) == again
    assert main(words(source, run, "--name", "second")) == 0


def test_it_is_refused_where_a_guard_watched_the_run(source, tmp_path, capsys):
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(100):
            writer.add_scalar("loss", 3.0, step)
            writer.add_scalar("guard/loss", 3.0, step)
    assert main(words(source, tmp_path)) == 2
    assert "guard of that name watched it" in capsys.readouterr().err


def test_a_folder_above_the_runs_is_refused_with_their_names(source, run, capsys):
    assert main(words(source, run.parent)) == 2
    assert str(run) in capsys.readouterr().err


def test_a_failure_leaves_nothing_behind(source, run, capsys, monkeypatch):
    def broken(*args, **keywords):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoardSink, "verdict", broken)
    before = sorted(path.name for path in run.iterdir())
    assert main(words(source, run)) == 2
    assert "No space left" in capsys.readouterr().err
    assert sorted(path.name for path in run.iterdir()) == before


@pytest.mark.parametrize("name", ["..", "../other", "a/../../b", "."])
def test_a_name_cannot_lead_out_of_the_folder(source, run, name, capsys):
    assert main(words(source, run, "--name", name)) == 2
    assert not (run.parent / "other").exists() and "--name" in capsys.readouterr().err


def test_a_loss_logged_in_bits_gets_a_card_in_nats_of_its_own(source, tmp_path, synthetic_rung):
    rung = synthetic_rung(8e4, noise=0.03, steps=STEPS)
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("train/loss", 8.0, 0)  # log2 of the vocabulary of 256, which gives the unit away.
        for step, value in enumerate((rung.curves[0].loss[1:] / math.log(2)).tolist(), start=1):
            writer.add_scalar("train/loss", value, step)
    assert main(words(source, tmp_path)) == 0
    assert "guard/loss_and_forecast" in tags_of(tmp_path / "guard" / "forecast")
    assert "train/loss" not in tags_of(tmp_path / "guard" / "forecast")
