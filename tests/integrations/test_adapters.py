"""The same promises, kept by every adapter of the registry, in the real frameworks."""

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.intake import LossIntake

_path = Path(__file__).with_name("adapters.py")
_spec = importlib.util.spec_from_file_location("adapters", _path)
assert _spec is not None and _spec.loader is not None
registry = sys.modules["adapters"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(registry)
ADAPTERS, Job = registry.ADAPTERS, registry.Job

pytestmark = [
    pytest.mark.parametrize("name", ADAPTERS),
    # The frameworks' own warnings about loaders, checkpoints and versions are not under test.
    pytest.mark.filterwarnings("ignore"),
]


def means(losses: list[float], accumulation: int) -> list[float]:
    windows = [losses[i : i + accumulation] for i in range(0, len(losses), accumulation)]
    return [sum(window) / len(window) for window in windows]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_step_is_seen_once_with_its_number_and_the_mean_of_its_micro_batches(
    name: str, accumulation: int, tmp_path: Path
):
    result = ADAPTERS[name](Job(folder=tmp_path, accumulation=accumulation, stop_after=7))
    assert [v.step for v in result.verdicts] == list(range(1, 8))
    assert [v.loss for v in result.verdicts] == pytest.approx(means(result.losses, accumulation), rel=1e-6)


def test_a_watched_run_is_bit_identical(name: str, tmp_path: Path):
    plain = ADAPTERS[name](Job(folder=tmp_path, watched=False, stop_after=7))
    watched = ADAPTERS[name](Job(folder=tmp_path, stop_after=7))
    assert plain.losses == watched.losses
    assert all(torch.equal(a, b) for a, b in zip(plain.weights, watched.weights, strict=True))


def test_the_channels_of_every_step_reach_the_guard_and_a_source_that_fails_harms_nothing(name: str, tmp_path: Path):
    asked = []

    def norm() -> dict[str, torch.Tensor]:
        asked.append(len(asked) + 1)
        if len(asked) == 6:
            raise ArithmeticError("no norm to be had")
        return {"norm": torch.tensor(float(len(asked)))}

    watched = ADAPTERS[name](Job(folder=tmp_path, stop_after=8, channels=norm))
    # Of the forecast's first 200 observations a channel keeps every value, to learn its level from.
    assert watched.guard._watcher.channels["norm"].sample == pytest.approx([math.log(n) for n in range(1, 6)])
    assert asked == [1, 2, 3, 4, 5, 6] and watched.steps == 8 and len(watched.verdicts) == 8


def test_a_nan_stops_the_run_cleanly_at_its_step(name: str, tmp_path: Path):
    result = ADAPTERS[name](Job(folder=tmp_path, nan_at=5, actions={"critical": "stop"}))
    assert result.steps == 5
    assert [(e.kind, e.detected) for e in result.guard.events] == [("non_finite", 5)]


@pytest.mark.parametrize("end", ["last step", "flag", "exception"])
def test_a_report_is_there_when_the_run_ends_is_stopped_or_fails(name: str, end: str, tmp_path: Path):
    path = tmp_path / "report.html"
    job = Job(folder=tmp_path, report=path, actions={"critical": "stop"}, stop_after=20)
    if end == "exception":
        job.fails_at = 13
        with pytest.raises(ArithmeticError):
            ADAPTERS[name](job)
    else:
        job.nan_at = 5 if end == "flag" else 0
        assert ADAPTERS[name](job).steps == (5 if end == "flag" else 20)
    page = path.read_text()
    # A loader may fetch one step ahead, and then fails a step earlier.
    reached = {"last step": "20", "flag": "5", "exception": "1[12]"}[end]
    assert re.search(rf"\b{reached} of 30 steps", page)
    assert ("CRITICAL non_finite" in page) == (end == "flag")


def test_a_report_after_a_resume_shows_the_whole_run(name: str, tmp_path: Path):
    ADAPTERS[name](Job(folder=tmp_path, save_at=10, nan_at=7, stop_after=14))
    path = tmp_path / "report.html"
    ADAPTERS[name](Job(folder=tmp_path, save_at=10, nan_at=7, stop_after=20, resume=True, report=path))
    page = path.read_text()
    assert "up to step 10, before a resume, losses are means" in page
    assert "CRITICAL non_finite" in page and "20 of 30 steps" in page


def test_a_resumed_run_gives_the_verdicts_and_the_state_of_one_that_never_stopped(name: str, tmp_path: Path):
    whole = ADAPTERS[name](Job(folder=tmp_path, save_at=10, nan_at=13, stop_after=20))
    resumed = ADAPTERS[name](Job(folder=tmp_path, save_at=10, nan_at=13, stop_after=20, resume=True))
    assert [repr(v) for v in resumed.verdicts] == [repr(v) for v in whole.verdicts[10:]]
    assert resumed.guard.events == whole.guard.events
    assert resumed.state == whole.state


def test_the_state_of_its_run_goes_on_in_any_other_loop_exactly(name: str, tmp_path: Path):
    whole = ADAPTERS[name](Job(folder=tmp_path, stop_after=20))
    half = ADAPTERS[name](Job(folder=tmp_path, stop_after=12))
    watch = LossIntake(TrajectoryGuard(registry.make_forecast()))
    watch.load_state_dict(json.loads(json.dumps(half.state)))
    assert watch.step == 12
    for verdict in whole.verdicts[12:]:
        watch.add(verdict.loss)
        assert repr(watch.end_step()) == repr((verdict,))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All adapters on two gloo ranks; the frameworks are imported once."""
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(_path), "2", str(folder)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


def test_two_ranks_agree_on_every_number_and_stop_together(name: str, two_ranks: Path):
    first, second = (json.loads((two_ranks / f"{name}-{rank}.json").read_text()) for rank in range(2))
    for well, other in zip(first, second, strict=True):
        assert well["losses"] == other["losses"]
        assert well["steps"] == other["steps"]
        assert well["events"] == other["events"]
        assert well["collectives"] == other["collectives"]
    expected = [(a + b) / 2 for a, b in zip(means(first[0]["own"], 2), means(second[0]["own"], 2), strict=True)]
    assert [float(loss) for loss in first[0]["losses"]] == pytest.approx(expected, rel=1e-6)
    # The second rank alone got the NaN; both stopped at its step.
    assert first[1]["steps"] == second[1]["steps"] == 5
    assert first[1]["losses"][-1] == "nan"
