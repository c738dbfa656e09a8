"""replay: a guard over a finished log, from Python and from the command line."""

import dataclasses

import numpy as np
import pytest

from trajectory_guard.__main__ import main
from trajectory_guard.detect.events import Severity
from trajectory_guard.fit import fit_ladder
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.ladder import Ladder
from trajectory_guard.logs.read import read_log
from trajectory_guard.replay import replay
from trajectory_guard.sinks.jsonl import read_events

STEPS = 3000


@pytest.fixture(scope="module")
def channel_folder(tmp_path_factory, channel_ladder, channel_rung):
    """Fits of a ladder with a gradient norm that triples and without, a healthy run, one whose norm jumps by 60 %."""
    folder = tmp_path_factory.mktemp("channels")
    bare = Ladder(rungs=tuple(dataclasses.replace(rung, channels={}) for rung in channel_ladder.rungs))
    fit_ladder(bare, "matched-progress").save(folder / "bare.json")
    fit_ladder(channel_ladder, "matched-progress").save(folder / "fit.json")
    rung = channel_rung(8e4, steps=1200)
    rung.plan.save(folder / "plan.json")
    norm = rung.channels["grad_norm"][0].value
    jump = np.where(rung.curves[0].step >= 500, 1.6, 1.0) * norm
    for name, value in (("healthy", norm), ("jump", jump)):
        rows = zip(rung.curves[0].step, rung.curves[0].loss, value, strict=True)
        lines = [f"{step},{loss:.6g},{each:.6g}" for step, loss, each in rows]
        (folder / f"{name}.csv").write_text("step,loss,grad_norm\n" + "\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(("log", "fit", "said"), [("healthy", "fit", 0), ("jump", "fit", 1), ("healthy", "bare", 1)])
def test_a_channel_is_watched_against_the_course_of_its_ladder(channel_folder, capsys, log, fit, said):
    plan = str(channel_folder / "plan.json")
    files = [str(channel_folder / f"{fit}.json"), str(channel_folder / f"{log}.csv")]
    assert main(["replay", *files, "--plan", plan, "--channel", "grad_norm"]) == 0
    out = capsys.readouterr().out
    assert out.count("INFO channel/grad_norm") == said
    if log == "jump":
        assert "against its ladder's course since about step 50" in out


@pytest.fixture(scope="module")
def folder(tmp_path_factory, synthetic_ladder, synthetic_rung):
    """A fit, a plan, and the logs of a healthy run, of one that jumps at step 2000 and of one that dies at 2500."""
    folder = tmp_path_factory.mktemp("replay")
    fit_ladder(synthetic_ladder, "matched-progress").save(folder / "fit.json")
    rung = synthetic_rung(8e4, noise=0.03, steps=STEPS)
    rung.plan.save(folder / "plan.json")
    loss = rung.curves[0].loss.copy()
    write(folder / "healthy.csv", rung, loss)
    loss[1999:] *= 1.15
    write(folder / "jump.csv", rung, loss)
    loss[2499:] = np.nan
    write(folder / "dead.csv", rung, loss)
    return folder


def write(path, rung, loss):
    rows = zip(rung.curves[0].step, rung.curves[0].tokens, loss, strict=True)
    lines = [f"{step},{tokens:.0f},{value:.6g},{1 + 0.1 * (step % 7):.3g}" for step, tokens, value in rows]
    path.write_text("step,tokens,loss,grad_norm\n" + "\n".join(lines) + "\n")


def words(folder, log, *more):
    return ["replay", str(folder / "fit.json"), str(folder / log), *map(str, more)]


def test_a_replay_gives_what_the_guard_said_live(folder, synthetic_rung, synthetic_ladder):
    log = read_log(folder / "jump.csv")
    forecast = fit_ladder(synthetic_ladder, "matched-progress").forecast(synthetic_rung(8e4, steps=STEPS).plan)
    result = replay(forecast, log.rows())
    guard = TrajectoryGuard(forecast)
    for step, loss in zip(log.step.tolist(), log.loss.tolist(), strict=True):
        guard.observe(step, loss)
    assert result.guard.events == guard.events and result.rows == STEPS
    first = next(event for _, event in result.said if event.severity >= Severity.WARNING)
    assert abs(first.onset - 2000) <= 20 and first.detected <= 2050


def test_the_command_prints_the_events_and_when(folder, capsys):
    assert main(words(folder, "jump.csv", "--plan", folder / "plan.json")) == 0
    out = capsys.readouterr().out
    assert "WARNING change_up" in out and "3000 rows judged" in out and "at 20" in out


def test_a_healthy_log_has_nothing_to_warn_of(folder, capsys):
    assert main(words(folder, "healthy.csv", "--plan", folder / "plan.json", "--quiet", "--channel", "grad_norm")) == 0
    assert "warning" not in capsys.readouterr().out


def test_non_finite_rows_are_seen(folder, capsys):
    assert main(words(folder, "dead.csv", "--plan", folder / "plan.json", "--quiet")) == 0
    assert "at 2500: step 2500: CRITICAL non_finite" in capsys.readouterr().out


def test_without_a_plan_the_log_gives_the_horizon(folder, capsys):
    assert main(words(folder, "healthy.csv", "--active-params", 80_000)) == 0
    assert "horizon is taken to be the last step, 3000" in capsys.readouterr().err


def test_without_plan_and_size_it_says_what_to_give(folder, capsys):
    assert main(words(folder, "healthy.csv")) == 2
    assert "--active-params" in capsys.readouterr().err


def test_events_are_written_and_an_old_log_is_not_overwritten(folder, tmp_path, capsys):
    events = tmp_path / "events.jsonl"
    assert main(words(folder, "jump.csv", "--plan", folder / "plan.json", "--events", events)) == 0
    assert any(event.severity >= Severity.CERTIFIED for _, event in read_events(events))
    assert main(words(folder, "jump.csv", "--plan", folder / "plan.json", "--events", events)) == 2
    assert "exists already" in capsys.readouterr().err


def test_an_unknown_channel_is_refused(folder, capsys):
    assert main(words(folder, "healthy.csv", "--plan", folder / "plan.json", "--channel", "gnorm")) == 2
    assert "grad_norm" in capsys.readouterr().err


def test_a_twin_of_the_run_sharpens_it(folder, capsys):
    arguments = words(folder, "jump.csv", "--plan", folder / "plan.json", "--paired", folder / "healthy.csv")
    assert main(arguments) == 0
    assert "paired with the reference run" in capsys.readouterr().out
