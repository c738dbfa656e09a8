"""The picture of a run: it is drawn from any record, however short, and written only under endings it can write."""

from pathlib import Path

import numpy as np
import pytest

from trajectory_guard.detect.events import Event, Severity
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.forecast import Forecast
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.picture import RunRecord, draw_run, save_picture
from trajectory_guard.plan import RunPlan


@pytest.fixture
def forecast() -> Forecast:
    plan = RunPlan(total_steps=1000, tokens_per_step=64, active_params=1e4, schedule=LRSchedule(shape="linear"))
    g = np.linspace(0.02, 1, 50)
    return Forecast(plan, progress=g, loss=1 + g**-0.2, half_widths={0.8: 0.01, 0.95: 0.02})


@pytest.mark.parametrize("steps", [1, 7, 1000])
def test_a_run_of_any_length_is_drawn_with_its_events(forecast: Forecast, steps: int, tmp_path: Path) -> None:
    step = np.arange(1, steps + 1)
    event = Event(kind="change_up", severity=Severity.WARNING, state="open", onset=5, detected=7, sentence="up")
    record = RunRecord(step=step, loss=np.full(steps, 2.0), statistic=step * 1.0, threshold=step * 2.0, events=[event])
    figure = draw_run(forecast, record, title="a run")
    assert [axis.get_ylabel() for axis in figure.axes] == [
        "loss (nats per token)",
        "residual (% of forecast)",
        "statistic (sigmas)",
    ]
    assert {5.0, 7.0} <= {line.get_xdata()[0] for line in figure.axes[0].lines}
    save_picture(figure, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_known_statistic_is_drawn(forecast: Forecast) -> None:
    unknown = np.full(9, np.nan)
    record = RunRecord(step=np.arange(30, 39), loss=np.full(9, 2.0), statistic=unknown, threshold=unknown)
    assert draw_run(forecast, record).axes[2].get_legend() is None


def test_the_drawn_mean_is_the_mean_of_the_observed_losses(forecast: Forecast) -> None:
    rng = np.random.default_rng(0)
    loss = rng.normal(2.0, 0.1, 1000)
    loss[500] = np.nan
    figure = draw_run(forecast, RunRecord(step=np.arange(1, 1001), loss=loss))
    line = next(line for line in figure.axes[0].lines if line.get_label() == "observed, mean")
    assert np.mean(line.get_ydata()) == pytest.approx(np.nanmean(loss), abs=1e-3)


def drawn_mean(forecast: Forecast, step: np.ndarray, loss: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    figure = draw_run(forecast, RunRecord(step=step, loss=loss))
    line = next(line for line in figure.axes[0].lines if line.get_label() == "observed, mean")
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def test_means_are_over_half_a_percent_of_the_horizon_however_far_the_run_has_come(forecast: Forecast) -> None:
    step = np.arange(1, 401)
    at, mean = drawn_mean(forecast, step, 2.0 + 0.1 * (step % 5))
    assert len(at) == 80 and np.allclose(np.diff(at), 5) and np.allclose(mean, 2.2)


def test_points_that_lie_wider_apart_before_a_resume_keep_their_places(forecast: Forecast) -> None:
    step = np.concatenate([np.arange(3, 500, 5), np.arange(501, 1001)])
    at, mean = drawn_mean(forecast, step, step / 1000)
    assert len(at) >= 190 and np.max(np.diff(at)) <= 10 and np.allclose(mean, at / 1000)


def test_a_run_without_a_finite_loss_cannot_be_drawn(forecast: Forecast) -> None:
    with pytest.raises(TrajectoryGuardError, match="no finite loss"):
        draw_run(forecast, RunRecord(step=np.array([1]), loss=np.array([np.nan])))


def test_a_picture_of_an_unknown_ending_is_refused(forecast: Forecast, tmp_path: Path) -> None:
    figure = draw_run(forecast, RunRecord(step=np.array([50]), loss=np.array([2.0])))
    with pytest.raises(TrajectoryGuardError, match=r"\.png or \.svg"):
        save_picture(figure, tmp_path / "run.bmp")
    assert not list(tmp_path.iterdir())
