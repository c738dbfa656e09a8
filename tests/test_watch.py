"""watch: a guard beside a growing log, ended and started again at will."""

import json
import sys

import numpy as np
import pytest

from trajectory_guard.__main__ import main
from trajectory_guard.detect.events import Severity
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.fit import fit_ladder
from trajectory_guard.logs.follow import LogFollower
from trajectory_guard.watch import LogWatch, run_on_event

STEPS = 2000


@pytest.fixture(scope="module")
def fit(synthetic_ladder):
    return fit_ladder(synthetic_ladder, "matched-progress")


@pytest.fixture(scope="module")
def rung(synthetic_rung):
    return synthetic_rung(8e4, noise=0.03, steps=STEPS)


@pytest.fixture(scope="module")
def losses(rung):
    """Jumps by 15 % at step 1200."""
    loss = rung.curves[0].loss.copy()
    loss[1199:] *= 1.15
    return loss


def rows(losses: np.ndarray, first: int, last: int) -> str:
    return "".join(f"{step},{losses[step - 1]:.6g}\n" for step in range(first, last + 1))


def test_a_watch_that_is_started_again_says_what_one_that_never_stopped_says(fit, rung, losses, tmp_path):
    forecast = fit.forecast(rung.plan)
    log, state = tmp_path / "log.csv", tmp_path / "state.json"
    log.write_text("step,loss\n" + rows(losses, 1, STEPS))
    whole = LogWatch(forecast, LogFollower(log))
    while whole.poll():
        pass

    log.write_text("step,loss\n")
    for first in range(1, STEPS, 500):
        with log.open("a") as file:
            file.write(rows(losses, first, first + 499))
        watch = LogWatch(forecast, LogFollower(log), state=state)
        while watch.poll():
            pass
    assert watch.guard.last_step == STEPS
    assert watch.guard.events == whole.guard.events
    assert whole.worst >= Severity.CERTIFIED


def test_a_run_that_restarts_is_followed_back(fit, rung, losses, tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("step,loss\n" + rows(losses, 1, 1100) + rows(losses, 901, 1150))
    watch = LogWatch(fit.forecast(rung.plan), LogFollower(log))
    while watch.poll():
        pass
    assert [event.kind for event in watch.guard.events if event.kind != "outlier"] == ["rewound"]
    assert watch.guard.last_step == 1150


def arguments(fit, rung, folder, *more):
    fit.save(folder / "fit.json")
    rung.plan.save(folder / "plan.json")
    paths = [str(folder / "fit.json"), str(folder / "log.csv"), "--plan", str(folder / "plan.json")]
    return ["watch", *paths, "--poll", "0.01", "--idle", "0", *map(str, more)]


def test_the_command_ends_with_status_3_or_4_when_asked_to(fit, rung, losses, tmp_path):
    words = arguments(fit, rung, tmp_path, "--exit-on", "certified")
    (tmp_path / "log.csv").write_text("step,loss\n" + rows(losses, 1, 1100))
    assert main(words) == 0
    # A jump by 8 % is certified; one that eats a tenth of the progress is a runaway, and ends with 4.
    small = losses.copy()
    small[1199:] *= 1.08 / 1.15
    (tmp_path / "log.csv").write_text("step,loss\n" + rows(small, 1, 1300))
    assert main(words) == 3
    (tmp_path / "log.csv").write_text("step,loss\n" + rows(losses, 1, 1100) + "1101,nan\n1102,nan\n")
    assert main(words) == 4


def test_the_command_ends_at_the_horizon(fit, rung, losses, tmp_path, capsys):
    (tmp_path / "log.csv").write_text("step,loss\n" + rows(losses, 1, STEPS))
    words = [word for word in arguments(fit, rung, tmp_path) if word not in ("--idle", "0")]
    assert main([*words, "--events", str(tmp_path / "events.jsonl")]) == 0
    assert "CERTIFIED" in capsys.readouterr().out


def test_a_command_gets_each_warning_as_json(fit, rung, losses, tmp_path):
    (tmp_path / "log.csv").write_text("step,loss\n" + rows(losses, 1, 1400))
    seen = tmp_path / "seen.jsonl"
    script = tmp_path / "take.py"
    script.write_text("import sys\nopen(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')\n")
    assert main(arguments(fit, rung, tmp_path, "--on-event", f"'{sys.executable}' '{script}' '{seen}'")) == 0
    events = [json.loads(text) for text in seen.read_text().splitlines()]
    assert events and {event["severity"] for event in events} <= {"warning", "certified", "critical"}
    assert all(1200 <= event["detected"] <= 1400 for event in events)


def test_a_command_that_fails_ends_nothing(caplog):
    class Plain:
        def to_dict(self):
            return {}

    run_on_event(f"'{sys.executable}' -c 'import sys; sys.exit(5)'")(Plain())
    run_on_event("/no/such/program")(Plain())
    assert caplog.text.count("watching goes on") == 2


@pytest.mark.parametrize("command", ["", "'open"])
def test_commands_that_cannot_be_are_refused(command):
    with pytest.raises(TrajectoryGuardError, match="on-event"):
        run_on_event(command)


def test_a_state_that_is_none_is_refused(fit, rung, tmp_path, capsys):
    (tmp_path / "log.csv").write_text("step,loss\n")
    (tmp_path / "state.json").write_text("{}")
    assert main(arguments(fit, rung, tmp_path, "--state", tmp_path / "state.json")) == 2
    assert "state.json" in capsys.readouterr().err


@pytest.mark.parametrize("more", [("--poll", "-1"), ("--idle", "nan")])
def test_times_that_cannot_be_are_refused(fit, rung, tmp_path, more):
    assert main(arguments(fit, rung, tmp_path, *more)) == 2
