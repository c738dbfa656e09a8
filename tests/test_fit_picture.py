import dataclasses

import pytest

from trajectory_guard.__main__ import main
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.fit import fit_ladder
from trajectory_guard.fit_picture import draw_fit


@pytest.fixture(scope="module")
def fit(synthetic_ladder):
    return fit_ladder(synthetic_ladder, "matched-progress")


def test_rungs_fit_and_forecast_are_drawn_with_units_on_the_axes(fit, synthetic_rung):
    along, over = draw_fit(fit, synthetic_rung(1e5).plan).axes
    names = [text.get_text() for text in along.get_legend().get_texts()]
    assert {"n10000", "n40000", "forecast", "80% interval"} <= set(names)
    assert along.get_ylabel() == "loss (nats per token)"
    assert over.get_xlabel() == "compute of the full plan (FLOPs)"


def test_inspect_draws_to_a_file_and_refuses_an_unknown_ending(fit, tmp_path, capsys):
    fit.save(tmp_path / "fit.json")
    assert main(["inspect", str(tmp_path / "fit.json"), "--draw", str(tmp_path / "fit.png")]) == 0
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")
    assert main(["inspect", str(tmp_path / "fit.json"), "--draw", str(tmp_path / "fit.gif")]) == 2
    assert ".png or .svg" in capsys.readouterr().err


def test_a_fit_without_rungs_needs_a_plan(fit, synthetic_rung):
    bare = dataclasses.replace(fit, rungs=())
    with pytest.raises(TrajectoryGuardError, match="name a plan"):
        draw_fit(bare)
    assert len(draw_fit(bare, synthetic_rung(1e5).plan).axes) == 2
