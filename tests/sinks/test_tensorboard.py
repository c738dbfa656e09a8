"""TensorBoardSink: read back with TensorBoard's own reader."""

import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.tensorboard import SummaryWriter

from trajectory_guard.detect.events import Event, Severity, Verdict
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.forecast import Forecast
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan
from trajectory_guard.recipe import RecipeCheck
from trajectory_guard.sinks.tensorboard import TensorBoardSink, forecast_card


def forecast(total_steps: int = 2000, check: RecipeCheck | None = None) -> Forecast:
    plan = RunPlan(
        total_steps=total_steps, tokens_per_step=64, active_params=1000, schedule=LRSchedule(shape="constant")
    )
    return Forecast(
        plan, progress=[0.1, 1.0], loss=[3.0, 2.0], half_widths={0.8: 0.02, 0.95: 0.04}, law="table_2", check=check
    )


def verdict(step: int, table: Forecast, loss: float = 2.5) -> Verdict:
    lower, upper = table.interval(step, level=0.95)
    return Verdict(
        step=step,
        loss=loss,
        forecast=table.loss(step),
        lower=float(lower),
        upper=float(upper),
        residual_nats=loss - table.loss(step),
        residual_sigma=0.5,
        stage="watching",
        statistic=3.0,
        threshold=16.0,
    )


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def layout_of(events: EventAccumulator) -> layout_pb2.Layout:
    proto = layout_pb2.Layout()
    proto.ParseFromString(events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
    return proto


def test_all_tags_share_identical_steps_and_every_chart_names_written_tags(tmp_path: Path):
    table = forecast()
    sink = TensorBoardSink(tmp_path)
    sink.start(table, resumed_step=None)
    for step in (50, 100, 250, 251):  # 50 and 100 are before the first forecast: NaN, and still written.
        sink.verdict(verdict(step, table))
    sink.close()
    events = read(tmp_path)
    tags = set(events.Tags()["scalars"])
    assert {tuple(s.step for s in events.Scalars(tag)) for tag in tags} == {(50, 100, 250, 251)}
    (category,) = layout_of(events).category
    charts = [(chart.title, chart.margin.series[0]) for chart in category.chart]
    assert [title[:2] for title, _ in charts] == ["3.", "2.", "1."]
    for _, series in charts:
        assert {series.value, series.lower, series.upper} <= tags


def test_the_forecast_lies_beside_the_loss_over_the_whole_horizon_under_the_same_tag(tmp_path: Path):
    table = forecast(total_steps=50_000)
    sink = TensorBoardSink(tmp_path, loss_tag="train/loss")
    sink.start(table, resumed_step=None)
    sink.close()
    runs = ("forecast", "forecast_lower", "forecast_upper")
    curves = {run: read(tmp_path / run).Scalars("train/loss") for run in runs}
    for points in curves.values():
        assert len(points) == 1000
        assert (points[0].step, points[-1].step) == (table.first_step, 50_000)
    assert curves["forecast"][-1].value == pytest.approx(2.0)
    lower, upper = table.interval(50_000, level=0.95)
    assert curves["forecast_lower"][-1].value == pytest.approx(lower)
    assert curves["forecast_upper"][-1].value == pytest.approx(upper)


@pytest.mark.parametrize("shared_writer", [False, True])
def test_a_resume_in_the_same_folder_doubles_nothing(tmp_path: Path, shared_writer: bool):
    table = forecast()
    for resumed, steps in ((None, range(200, 300, 10)), (249, range(250, 320, 10))):
        writer = SummaryWriter(str(tmp_path)) if shared_writer else None
        sink = TensorBoardSink(writer or tmp_path)
        sink.start(table, resumed_step=resumed)
        for step in steps:
            sink.verdict(verdict(step, table, loss=2.5 if resumed is None else 2.4))
        sink.close()
        if writer is not None:
            writer.close()
        time.sleep(1.1)  # Event files are ordered by the second in their names.
    points = read(tmp_path).Scalars("guard/loss")
    assert [p.step for p in points] == list(range(200, 320, 10))
    assert [p.value for p in points] == pytest.approx([2.5] * 5 + [2.4] * 7)
    assert len(read(tmp_path / "forecast").Scalars("guard/loss_and_forecast")) == 1000


def test_a_writer_that_was_handed_in_stays_open(tmp_path: Path):
    table = forecast()
    with SummaryWriter(str(tmp_path)) as writer:
        sink = TensorBoardSink(writer)
        sink.start(table, resumed_step=None)
        sink.close()
        writer.add_scalar("theirs", 1.0, 7)
    assert read(tmp_path).Scalars("theirs")[0].step == 7


def test_two_guards_on_one_writer_share_one_layout_and_no_tag(tmp_path: Path):
    table = forecast()
    with SummaryWriter(str(tmp_path)) as writer:
        for name in ("guard", "guard_val"):
            sink = TensorBoardSink(writer, name=name)
            sink.start(table, resumed_step=None)
            sink.verdict(verdict(300, table))
            sink.close()
    events = read(tmp_path)
    assert [c.title for c in layout_of(events).category] == ["Trajectory (guard)", "Trajectory (guard_val)"]
    assert len(events.Scalars("guard/loss")) == len(events.Scalars("guard_val/loss")) == 1


def test_event_sentences_and_the_forecast_card_are_text_and_the_flag_marks_the_steps(tmp_path: Path):
    table = forecast(check=RecipeCheck(warnings=("data: fit 'a|b', plan '<i>c</i>'",)))
    sink = TensorBoardSink(tmp_path)
    sink.start(table, resumed_step=None)
    sink.verdict(verdict(500, table))
    flagged = Event(
        kind="spike",
        severity=Severity.WARNING,
        state="open",
        onset=505,
        detected=507,
        rollback_step=400,
        sentence="3 of 5 steps above 5 sigma",
    )
    sink.event(flagged, step=507)
    sink.verdict(verdict(507, table))
    # No close: what a person must see is on disk when the process dies now.
    events = read(tmp_path)
    (text,) = events.Tensors("guard/events/text_summary")
    assert text.step == 507
    assert b"3 of 5 steps above 5 sigma Roll back to step 400." in text.tensor_proto.string_val[0]
    (card,) = events.Tensors("guard/forecast/text_summary")
    assert b"table\\_2" in card.tensor_proto.string_val[0]
    sink.close()
    assert [(s.step, s.value) for s in read(tmp_path).Scalars("guard/flag")] == [(500, 0.0), (507, 1.0)]


def test_the_card_tells_law_horizon_interval_and_recipe_check():
    card = forecast_card(forecast(check=RecipeCheck(warnings=("data: fit 'a', plan '<i>'",), unknown=("optimizer",))))
    for part in ("2,000 steps", "128,000 tokens", "2.0000", "95% interval", "1.9216 to 2.0816", "optimizer"):
        assert part in card
    assert "<i>" not in card.replace("\\<i\\>", "")


def test_a_target_that_is_neither_folder_nor_writer_is_refused():
    with pytest.raises(TrajectoryGuardError, match="SummaryWriter"):
        TensorBoardSink(42)  # type: ignore[arg-type]


def test_a_sink_that_was_not_started_says_so(tmp_path: Path):
    with pytest.raises(TrajectoryGuardError, match="start"):
        TensorBoardSink(tmp_path).verdict(verdict(300, forecast()))
