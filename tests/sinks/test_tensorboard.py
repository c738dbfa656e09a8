"""TensorBoardSink: read back with TensorBoard's own reader."""

import dataclasses
import itertools
import math
import time
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.tensorboard import SummaryWriter

from trajectory_guard.detect.events import Event, Severity, Verdict
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.forecast import Forecast
from trajectory_guard.guard import TrajectoryGuard
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
    # The tab draws them in reverse.
    assert [title[:2] for title, _ in charts] == ["4.", "3.", "2.", "1."]
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
        steps = [point.step for point in points]
        assert steps == sorted(set(steps)) and 150 < len(steps) <= 200
        assert (steps[0], steps[-1]) == (table.first_step, 50_000)
        # Straight lines between them stay within a tenth of a percent of the forecast.
        between = [(a + b) / 2 for a, b in itertools.pairwise(steps)]
        assert np.interp(between, steps, [p.value for p in curves["forecast"]]) == pytest.approx(
            np.asarray(table.loss(between)), rel=1e-3
        )
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
    steps = [point.step for point in read(tmp_path / "forecast").Scalars("guard/loss_and_forecast")]
    assert steps == sorted(set(steps)) and steps[-1] == 2000


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


def cards_of(events: EventAccumulator) -> list[tuple[str, list[str]]]:
    """Title and tags of every card of the first guard, in the order in which the tab shows them."""
    charts = reversed(layout_of(events).category[0].chart)
    return [(c.title, [c.margin.series[0].value, c.margin.series[0].lower, c.margin.series[0].upper]) for c in charts]


def watch(sink: TensorBoardSink, table: Forecast, steps: range, state: dict | None = None) -> TrajectoryGuard:
    """A guard whose run lies 1 % above the forecast, with a gradient norm that is missing at odd steps."""
    guard = TrajectoryGuard(table, sinks=[sink], log_every_n_steps=5)
    if state is not None:
        guard.load_state_dict(state)
    for step in steps:
        expected = np.nan_to_num(float(table.loss(step)), nan=3.0)
        noise = 0.03 * math.sin(12.9898 * step)
        channels = {} if step % 2 else {"grad_norm": 2.0 + step / 1000}
        guard.observe(step, 1.01 * expected + noise, channels=channels)
    return guard


def test_cards_stand_in_reading_order_with_their_units_and_the_channels_come_last(tmp_path: Path):
    table = forecast()
    watch(TensorBoardSink(tmp_path), table, range(1, 1001)).close()
    cards = cards_of(read(tmp_path))
    assert [title for title, _ in cards] == [
        "1. Loss, mean of last 1 % of the run (nats)",
        "2. Residual, mean of last 1 % of the run (%)",
        "3. Change statistic over threshold (alarm at 1)",
        "4. Outlook: final loss, given the run so far (nats)",
        "5. Channel grad_norm",
    ]
    # About what fits over a card in a window of 1,400 pixels.
    assert max(len(title) for title, _ in cards) <= 52
    tags = set(read(tmp_path).Tags()["scalars"])
    assert {tag for _, names in cards for tag in names} <= tags


def test_the_residual_card_shows_a_mean_over_single_steps_and_the_outlook_card_the_guards_outlook(tmp_path: Path):
    table = forecast()
    guard = watch(TensorBoardSink(tmp_path), table, range(1, 1001))
    seen = guard.outlook(level=0.95)
    guard.close()
    events = read(tmp_path)
    single, mean = ({p.step: p.value for p in events.Scalars(f"guard/{k}")} for k in TAGS)
    late = [step for step in single if step > 300]
    assert np.std([single[step] for step in late]) > 0.5
    assert [mean[step] for step in late] == pytest.approx([1.0] * len(late), abs=0.3)
    means = {p.step: p.value for p in events.Scalars("guard/loss_mean")}
    assert [means[s] for s in late] == pytest.approx([table.loss(s) * (1 + mean[s] / 100) for s in late])
    outlook = {p.step: p.value for p in events.Scalars("guard/outlook")}
    # Nothing is foretold before 15 % of training.
    assert all(math.isnan(value) == (step < 300) for step, value in outlook.items())
    assert seen is not None
    assert outlook[1000] == pytest.approx(seen.loss)
    assert events.Scalars("guard_bands/outlook_lower")[-1].value == pytest.approx(seen.lower)
    assert events.Scalars("guard_bands/outlook_upper")[-1].value == pytest.approx(seen.upper)


TAGS = ("residual_percent", "residual_mean_percent")


def test_a_loss_that_is_not_finite_shows_in_the_loss_card_though_it_is_no_part_of_the_mean(tmp_path: Path):
    guard = watch(TensorBoardSink(tmp_path), forecast(), range(1, 500))
    for step, loss in ((500, math.nan), (505, math.inf), (510, 2.5)):
        guard.observe(step, loss)
    guard.close()
    events = read(tmp_path)
    shown = {p.step: p.value for p in events.Scalars("guard/loss_mean")}
    assert math.isnan(shown[500]) and math.isinf(shown[505]) and 2.5 < shown[510] < 3.0
    residual = {p.step: p.value for p in events.Scalars("guard/residual_mean_percent")}
    assert math.isfinite(residual[500]) and math.isfinite(residual[505])


def test_a_channel_is_written_at_every_verdict_once_it_was_seen(tmp_path: Path):
    watch(TensorBoardSink(tmp_path), forecast(), range(1, 200)).close()
    events = read(tmp_path)
    values = {p.step: p.value for p in events.Scalars("guard/channel/grad_norm")}
    assert set(values) == {p.step for p in events.Scalars("guard/loss") if p.step >= 10}
    assert all(math.isnan(v) if step % 2 else v == pytest.approx(2.0 + step / 1000) for step, v in values.items())


def test_cards_means_and_outlook_go_on_after_a_resume_as_if_nothing_had_happened(tmp_path: Path):
    table = forecast()
    watch(TensorBoardSink(tmp_path / "whole"), table, range(1, 1001)).close()
    half = watch(TensorBoardSink(tmp_path / "parts"), table, range(1, 501))
    state = half.state_dict()
    for step in range(501, 600):  # Seen, then lost: the run goes on from step 500.
        half.observe(step, 9.0)
    half.close()
    time.sleep(1.1)  # Event files are ordered by the second in their names.
    watch(TensorBoardSink(tmp_path / "parts"), table, range(501, 1001), state).close()
    whole, parts = read(tmp_path / "whole"), read(tmp_path / "parts")
    assert cards_of(whole) == cards_of(parts)
    assert whole.Tags()["scalars"] == parts.Tags()["scalars"]
    for tag in whole.Tags()["scalars"]:
        # That a channel is missing is known once it was seen in this process: its first NaN may not be there.
        a, b = (
            [(p.step, p.value) for p in events.Scalars(tag) if not math.isnan(p.value)] for events in (whole, parts)
        )
        assert a == b and len(a) > (0 if "alarm_ratio" in tag else 50), tag


def test_a_run_of_a_million_steps_is_thinned_by_steps_and_never_at_events(tmp_path: Path):
    table = forecast(total_steps=1_000_000)
    sink = TensorBoardSink(tmp_path)
    sink.start(table, resumed_step=None)
    flagged = Event(kind="spike", severity=Severity.WARNING, state="open", onset=1, detected=1, sentence="3 of 5 steps")
    at_events = {step: dataclasses.replace(flagged, detected=step) for step in (200_013, 200_014, 777_777)}
    for step in sorted([*range(50, 1_000_001, 50), *at_events]):
        given = verdict(step, table)
        if step in at_events:
            given.events = (at_events[step],)
        sink.verdict(given)
    sink.close()
    steps = [point.step for point in read(tmp_path).Scalars("guard/loss")]
    assert set(at_events) <= set(steps)
    assert steps[-1] >= 1_000_000 - 250 and 3900 < len(steps) < 4100
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 300
    assert sum(file.stat().st_size for file in tmp_path.rglob("*tfevents*")) < 5e6
