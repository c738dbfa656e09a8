"""The report: everything that is known of a run on one page, escaped, self-contained, from a log or from a live run."""

import importlib.util
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from trajectory_guard import Event, Forecast, LRSchedule, RunPlan, Severity, TrajectoryGuard, fit_ladder
from trajectory_guard.__main__ import main
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.laws.calibrate import calibrate, calibration_window
from trajectory_guard.picture import RunRecord
from trajectory_guard.record import KEPT_VERDICTS
from trajectory_guard.report import ReportSink, write_report
from trajectory_guard.report_figures import draw_linear, draw_logarithmic

STEPS = 1500
HOSTILE = '<script>alert(1)</script><img src=x onerror="a()"> & $x_{ -->'


@pytest.fixture(scope="module")
def folder(tmp_path_factory, synthetic_ladder, synthetic_rung):
    """A fit, a plan, the log of a run that jumps by 15 % at step 1000, and the event log of its guard."""
    folder = tmp_path_factory.mktemp("report")
    fit_ladder(synthetic_ladder, "matched-progress").save(folder / "fit.json")
    rung = synthetic_rung(8e4, noise=0.03, steps=STEPS)
    rung.plan.save(folder / "plan.json")
    loss = rung.curves[0].loss.copy()
    loss[999:] *= 1.15
    lines = [f"{step},{value:.6g}" for step, value in zip(rung.curves[0].step, loss, strict=True)]
    (folder / "jump.csv").write_text("step,loss\n" + "\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def page(folder) -> str:
    assert main(["report", *words(folder, "jump.csv", folder / "jump.html")]) == 0
    return (folder / "jump.html").read_text()


def words(folder, log, output, *more) -> list[str]:
    return [str(w) for w in (folder / "fit.json", folder / log, "--plan", folder / "plan.json", "-o", output, *more)]


@pytest.fixture
def forecast() -> Forecast:
    plan = RunPlan(total_steps=1000, tokens_per_step=64, active_params=1e4, schedule=LRSchedule(shape="linear"))
    g = np.linspace(0.02, 1, 50)
    return Forecast(plan, progress=g, loss=1 + g**-0.2, half_widths={0.8: 0.01, 0.95: 0.02})


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def links(text: str) -> list[str]:
    found = [str(value) for _, attrs in Tags(text).tags for name, value in attrs.items() if name in ("src", "href")]
    found += [str(value) for _, attrs in Tags(text).tags for name, value in attrs.items() if name == "xlink:href"]
    return [link for link in found if not link.startswith("#")]


def test_the_page_says_what_happened_and_holds_every_part(page):
    assert re.search(r"(CERTIFIED|CRITICAL) \w+ since about step 1,0\d\d, flagged at 1,0\d\d", page)
    for heading in ("The run", "Events", "logarithmic", "The forecast", "Recipe check", "Ladder and fit", "outlook"):
        assert heading in page
    assert page.count("<svg") == 3 and "nats (+" in page and "n40000" in page


def test_the_page_loads_and_runs_nothing(page):
    assert links(page) == []
    assert not {"script", "link", "iframe", "img", "object"} & {tag for tag, _ in Tags(page).tags}
    assert "default-src 'none'" in page and "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_the_page_knows_light_dark_and_print(page):
    assert "prefers-color-scheme: dark" in page and "@media print" in page
    for drawing in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ET.fromstring(drawing)
        assert "#010203" not in drawing and "currentColor" in drawing


def test_ids_of_several_drawings_do_not_collide(page):
    ids = [attrs["id"] for _, attrs in Tags(page).tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_nothing_that_is_shown_can_become_markup(forecast, tmp_path):
    event = Event(
        kind="change_up", severity=Severity.WARNING, state="open", onset=5, detected=7, sentence="up " + HOSTILE
    )
    info = Event(kind="outlier", severity=Severity.INFO, state="closed", onset=5, detected=9, sentence=HOSTILE)
    record = RunRecord(step=np.arange(1, 101), loss=np.full(100, 2.0), events=[event, info])
    write_report(tmp_path / "r.html", forecast, record, title=HOSTILE, notes=[HOSTILE])
    text = (tmp_path / "r.html").read_text()
    assert not {"script", "img"} & {tag for tag, _ in Tags(text).tags}
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 5


def test_names_of_a_fit_cannot_become_markup_or_mathematics(folder, tmp_path):
    text = (folder / "fit.json").read_text().replace('"n10000"', '"$\\\\frac{ </svg><script>"')
    assert "frac" in text
    (tmp_path / "fit.json").write_text(text)
    arguments = words(folder, "jump.csv", tmp_path / "r.html")
    assert main(["report", str(tmp_path / "fit.json"), *arguments[1:]]) == 0
    assert not {"script"} & {tag for tag, _ in Tags((tmp_path / "r.html").read_text()).tags}


def test_a_png_is_written_too(folder, tmp_path):
    assert main(["report", *words(folder, "jump.csv", tmp_path / "r.png")]) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["r.png"]


def test_events_of_the_live_guard_replace_those_of_the_replay(folder, tmp_path):
    assert main(["replay", *words(folder, "jump.csv", "")[:4], "--events", str(tmp_path / "e.jsonl")]) == 0
    text = (tmp_path / "e.jsonl").read_text().replace(" nats (", " nats, THE LIVE GUARD SAID (")
    (tmp_path / "e.jsonl").write_text(text)
    assert main(["report", *words(folder, "jump.csv", tmp_path / "r.html", "--events", tmp_path / "e.jsonl")]) == 0
    assert "THE LIVE GUARD SAID" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("ending", ["", ".pdf", ".svg"])
def test_another_ending_is_refused_before_the_replay(folder, tmp_path, ending, capsys):
    assert main(["report", *words(folder, "absent.csv", tmp_path / f"r{ending}")]) == 2
    assert ".html or .png" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("loss", [[2.0], [float("nan")], [2.0, float("inf"), float("nan")], [2.0] * 30])
def test_a_run_of_any_length_and_any_losses_gets_a_report(forecast, tmp_path, loss):
    record = RunRecord(step=np.arange(1, len(loss) + 1), loss=np.array(loss))
    for ending in ("html", "png"):
        write_report(tmp_path / f"r.{ending}", forecast, record)
        assert (tmp_path / f"r.{ending}").stat().st_size > 1000


def test_a_run_without_observations_is_refused(forecast, tmp_path):
    with pytest.raises(TrajectoryGuardError, match="no step"):
        write_report(tmp_path / "r.html", forecast, RunRecord(step=np.zeros(0, np.int64), loss=np.zeros(0)))


def test_the_calibrated_end_stands_beside_the_forecast_once_the_window_is_over(forecast, tmp_path):
    _, last = calibration_window(forecast.plan)
    step = np.arange(1, 1001)
    loss = np.nan_to_num(np.asarray(forecast.loss(step)), nan=4.0) + 0.02
    for reached, shown in ((last - 1, False), (last, True), (1000, True)):
        write_report(tmp_path / "r.html", forecast, RunRecord(step=step[:reached], loss=loss[:reached]))
        text = (tmp_path / "r.html").read_text()
        made = calibrate(forecast, step, loss)
        assert ("calibrated on the start of the run" in text) == shown
        assert (f"{made.forecast.loss(1000):.4f} nats; {made.describe()}; nothing is judged" in text) == shown
        assert f"{forecast.loss(1000):.4f} nats, 80% interval" in text
    assert made.forecast.loss(1000) > forecast.loss(1000)


def test_a_run_that_cannot_be_calibrated_says_why(forecast, tmp_path):
    write_report(tmp_path / "r.html", forecast, RunRecord(step=np.array([1, 50, 900]), loss=np.full(3, 2.0)))
    assert "none: calibration needs three losses in steps" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("dies", [False, True])
def test_a_live_guard_writes_it_at_the_end_and_at_a_stop(forecast, tmp_path, dies: bool):
    rng = np.random.default_rng(0)
    path = tmp_path / "run.html"
    with TrajectoryGuard(forecast, sinks=[ReportSink(path, title="live")], log_every_n_steps=1) as guard:
        for step in range(1, 601 if dies else 1001):
            guard.observe(step, 1.1 * float(np.nan_to_num(forecast.loss(step), nan=4.0)) + 0.02 * rng.standard_normal())
        assert not path.exists()
    text = path.read_text()
    assert "off_forecast" in text and f"{600 if dies else 1000:,} of 1,000 steps" in text


def test_what_a_sink_keeps_is_bounded_and_spread_over_the_run(forecast, tmp_path):
    sink = ReportSink(tmp_path / "run.html")
    with TrajectoryGuard(forecast, sinks=[sink], log_every_n_steps=1) as guard:
        for step in range(1, 2 * KEPT_VERDICTS + 2):
            guard.observe(step, 2.0)
    kept = sink.record().step
    assert len(kept) <= KEPT_VERDICTS + 1 and kept[0] <= 2 and kept[-1] >= 2 * KEPT_VERDICTS - 8
    assert np.max(np.diff(kept)) <= 8


def test_the_statistic_is_drawn_over_its_own_threshold(forecast):
    step = np.arange(1, 1001)
    threshold = np.where(step % 2, 16.0, 34.5)
    figure = draw_linear(
        forecast, RunRecord(step=step, loss=np.full(1000, 2.0), statistic=threshold / 2, threshold=threshold)
    )
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[-1].lines}
    assert np.allclose(lines["change statistic"], 0.5) and np.allclose(lines["threshold"], 1.0)


def test_the_logarithmic_means_are_those_of_the_losses(forecast):
    loss = np.random.default_rng(0).uniform(1.9, 2.1, 1000)
    loss[3] = np.nan
    figure = draw_logarithmic(forecast, RunRecord(step=np.arange(1, 1001), loss=loss))
    line = next(line for line in figure.axes[0].lines if line.get_label() == "observed, mean")
    assert list(line.get_xdata()[:3]) == [1, 2, 3] and list(line.get_ydata()[:3]) == pytest.approx(loss[:3])
    assert "observed, single steps" not in figure.axes[0].get_legend_handles_labels()[1]
    assert Path(figure.axes[0].get_xscale()).name == "log"


@pytest.mark.slow
def test_the_report_of_a_million_steps_is_small(tmp_path):
    path = Path(__file__).with_name("benchmarks") / "report_cost.py"
    spec = importlib.util.spec_from_file_location("report_cost", path)
    assert spec is not None and spec.loader is not None
    cost = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cost)
    cost.write_run(tmp_path, 1_000_000)
    words = ["report", str(cost.FIT), str(tmp_path / "run.csv"), "--plan", str(tmp_path / "plan.json")]
    assert main([*words, "--override-recipe", "-o", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text()
    assert "1,000,000 of 1,000,000 steps" in text and len(text) < 3e6
