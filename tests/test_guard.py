"""TrajectoryGuard: stages, verdicts, events, actions, sinks, state, and input that is not what it should be."""

import json
import logging
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajectory_guard.channel import ChannelCourse
from trajectory_guard.detect.events import Event, Severity, Verdict
from trajectory_guard.errors import DivergenceError, TrajectoryGuardError
from trajectory_guard.forecast import Forecast
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.paired import PairedReference
from trajectory_guard.plan import RunPlan
from trajectory_guard.recipe import Recipe

STEPS = 3000
NOISE = 0.03


def make_forecast(steps: int = STEPS, *, first: float = 0.01, widths: tuple[float, float] = (0.01, 0.02)) -> Forecast:
    plan = RunPlan(
        total_steps=steps,
        tokens_per_step=4096,
        active_params=70_000,
        schedule=LRSchedule(shape="linear", warmup=0.03),
        recipe=Recipe(vocab_size=256),
    )
    progress = np.linspace(first, 1.0, 400)
    return Forecast(
        plan, progress=progress, loss=1.6 + 0.6 * progress**-0.35, half_widths={0.8: widths[0], 0.95: widths[1]}
    )


def make_losses(forecast: Forecast, seed: int = 0, noise: float = NOISE) -> np.ndarray:
    rng = np.random.default_rng(seed)
    steps = np.arange(1, forecast.plan.total_steps + 1)
    loss = np.nan_to_num(np.asarray(forecast.loss(steps)), nan=5.5) + noise * rng.standard_normal(len(steps))
    loss[0] = math.log(256)
    return loss


def watch(guard: TrajectoryGuard, losses: np.ndarray, first_step: int = 1) -> list[Verdict]:
    return [guard.observe(step, float(loss)) for step, loss in enumerate(losses, first_step)]


def warnings_of(guard: TrajectoryGuard) -> list[Event]:
    return [event for event in guard.events if event.severity >= Severity.WARNING]


class Recorder:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def start(self, forecast, *, resumed_step):
        self.calls.append(("start", resumed_step))

    def verdict(self, verdict):
        self.calls.append(("verdict", verdict.step))

    def event(self, event, *, step):
        self.calls.append(("event", event.kind, event.state, step))

    def flush(self):
        self.calls.append(("flush",))

    def close(self):
        self.calls.append(("close",))

    def named(self, name: str) -> list[tuple]:
        return [call for call in self.calls if call[0] == name]


def test_stages_follow_forecast_warm_up_and_calibration():
    forecast = make_forecast()
    guard = TrajectoryGuard(forecast)
    verdicts = watch(guard, make_losses(forecast))
    stages = [verdict.stage for verdict in verdicts]
    assert forecast.first_step == 30
    assert set(stages[:29]) == {"no_forecast"}
    assert set(stages[29:90]) == {"warm_up"}
    # 400 observations after warm-up calibrate; the step after them is watched.
    assert set(stages[90:490]) == {"calibrating"} and set(stages[490:]) == {"watching"}


def test_a_verdict_holds_forecast_interval_and_residual():
    forecast = make_forecast()
    guard = TrajectoryGuard(forecast)
    verdict = watch(guard, make_losses(forecast))[1999]
    lower, upper = forecast.interval(2000, 0.95)
    assert verdict.step == 2000
    assert verdict.forecast == pytest.approx(forecast.loss(2000), abs=0)
    assert (verdict.lower, verdict.upper) == pytest.approx((float(lower), float(upper)))
    assert verdict.residual_nats == verdict.loss - verdict.forecast
    # The scale is learnt from 512 differences: its own error is about 5 %.
    assert verdict.residual_sigma == pytest.approx(verdict.residual_nats / NOISE, rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_run_is_silent(seed):
    forecast = make_forecast()
    guard = TrajectoryGuard(forecast)
    watch(guard, make_losses(forecast, seed))
    assert warnings_of(guard) == [] and not guard.should_stop and guard.open_events == ()


@pytest.mark.parametrize(
    ("shift", "kind", "within"),
    [(0.03, "change_up", 120), (-0.03, "change_down", 120), (0.05, "change_up", 40)],
)
def test_a_level_shift_is_flagged_with_its_onset(shift, kind, within):
    forecast = make_forecast()
    losses = make_losses(forecast)
    losses[1499:] *= 1.0 + shift
    guard = TrajectoryGuard(forecast)
    watch(guard, losses)
    (event,) = warnings_of(guard)[:1]
    assert event.kind == kind
    assert 1500 <= event.detected <= 1500 + within
    assert abs(event.onset - 1500) <= 20
    assert math.copysign(1.0, event.size_nats) == math.copysign(1.0, shift)
    assert event.state == "open"
    assert f"step {event.onset}" in event.sentence and ">=" in event.sentence


def test_a_large_shift_is_certified():
    forecast = make_forecast()
    losses = make_losses(forecast)
    losses[1499:] *= 1.05
    guard = TrajectoryGuard(forecast)
    watch(guard, losses)
    assert max(event.severity for event in guard.events) >= Severity.CERTIFIED


def test_a_run_above_its_forecast_from_the_start_is_certified_while_calibrating():
    forecast = make_forecast()
    guard = TrajectoryGuard(forecast)
    verdicts = watch(guard, make_losses(forecast) * 1.08)
    (event,) = warnings_of(guard)
    assert (event.kind, event.severity) == ("off_forecast", Severity.CERTIFIED)
    assert verdicts[event.detected - 1].stage == "calibrating"
    assert event.size_percent == pytest.approx(8.0, abs=2.0)


def test_a_bias_inside_the_interval_is_silent():
    forecast = make_forecast(widths=(0.02, 0.04))
    guard = TrajectoryGuard(forecast)
    watch(guard, make_losses(forecast) * 1.015)
    assert warnings_of(guard) == []


def test_nan_is_critical_at_once_and_leaves_the_state_finite():
    forecast = make_forecast()
    losses = make_losses(forecast)
    losses[1000:1003] = math.nan
    losses[1003] = math.inf
    guard = TrajectoryGuard(forecast, actions={"critical": "stop"})
    watch(guard, losses[:1001])
    assert guard.should_stop
    (event,) = guard.open_events
    assert (event.kind, event.severity, event.onset, event.detected) == ("non_finite", Severity.CRITICAL, 1001, 1001)
    watch(guard, losses[1001:], 1002)
    json.dumps(guard.state_dict(), allow_nan=False)
    (event,) = [event for event in guard.events if event.kind == "non_finite"]
    assert event.state == "closed"
    assert len(warnings_of(guard)) == 1


def test_a_lone_nan_under_a_loss_scaler_informs_and_a_run_of_them_is_critical():
    forecast = make_forecast()
    losses = make_losses(forecast)
    losses[1000] = math.nan
    guard = TrajectoryGuard(forecast, loss_scaler=True)
    watch(guard, losses[:1200])
    assert [event.severity for event in guard.events if event.kind == "non_finite"] == [Severity.INFO]
    for step in range(1201, 1204):
        verdict = guard.observe(step, math.nan)
    assert verdict.severity == Severity.CRITICAL


def test_nan_before_the_forecast_begins_is_seen():
    guard = TrajectoryGuard(make_forecast())
    assert guard.observe(1, math.nan).severity == Severity.CRITICAL


def test_one_outlier_informs_and_three_of_five_warn():
    forecast = make_forecast()
    losses = make_losses(forecast)
    losses[999] *= 1.25
    losses[1499:1502] *= 1.25
    guard = TrajectoryGuard(forecast)
    watch(guard, losses)
    outlier, spike = (event for event in guard.events if event.kind in ("outlier", "spike") and event.detected != 1500)
    assert (outlier.severity, outlier.detected) == (Severity.INFO, 1000)
    assert (spike.severity, spike.onset, spike.detected, spike.state) == (Severity.WARNING, 1500, 1502, "closed")
    assert "over: height" in spike.sentence
    assert warnings_of(guard) == [spike]


def test_a_loss_that_cannot_be_true_is_critical():
    forecast = make_forecast()
    guard = TrajectoryGuard(forecast)
    watch(guard, make_losses(forecast)[:600])
    verdict = guard.observe(601, 0.0)
    assert (verdict.events[0].kind, verdict.severity) == ("too_good", Severity.CRITICAL)


def test_a_lost_run_becomes_critical():
    forecast = make_forecast()
    losses = make_losses(forecast)
    losses[1499:] += 2.0
    guard = TrajectoryGuard(forecast)
    watch(guard, losses)
    assert guard.open_events[0].severity == Severity.CRITICAL
    assert "runaway" in guard.open_events[0].sentence


def test_rollback_is_the_newest_checkpoint_well_before_the_onset():
    forecast = make_forecast()
    losses = make_losses(forecast)
    losses[1499:] *= 1.08
    guard = TrajectoryGuard(forecast)
    for step, loss in enumerate(losses, 1):
        guard.observe(step, float(loss))
        if step % 250 == 0:
            guard.note_checkpoint(step)
    # 1500 - 100 excludes 1500; 1250 is the newest before.
    assert warnings_of(guard)[0].rollback_step == 1250


def test_an_excursion_that_ends_is_closed_with_its_height():
    forecast = make_forecast()
    losses = make_losses(forecast)
    losses[1499:1800] *= 1.05
    guard = TrajectoryGuard(forecast)
    watch(guard, losses)
    event = warnings_of(guard)[0]
    assert event.state == "closed" and 1800 <= event.closed <= 2000
    assert event.size_percent == pytest.approx(5.0, abs=1.5)
    assert "over: height" in event.sentence
    assert guard.open_events == ()


def test_first_loss_in_bits_is_named():
    guard = TrajectoryGuard(make_forecast())
    verdict = guard.observe(1, 8.0)
    assert [event.kind for event in verdict.events] == ["first_loss"]
    assert "bits" in verdict.events[0].sentence


def test_loss_that_turns_to_bits_is_named():
    forecast = make_forecast()
    losses = make_losses(forecast)
    losses[1499:] /= math.log(2.0)
    guard = TrajectoryGuard(forecast)
    watch(guard, losses)
    assert any("bits" in event.sentence for event in warnings_of(guard))


def test_by_default_nothing_stops_and_warnings_are_logged(caplog):
    guard = TrajectoryGuard(make_forecast())
    with caplog.at_level(logging.INFO, logger="trajectory_guard"):
        guard.observe(1, math.nan)
    assert not guard.should_stop and not guard.checkpoint_requested
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "non_finite" in caplog.text


def test_actions_by_severity_reach_everything_above_it():
    seen = []
    guard = TrajectoryGuard(make_forecast(), actions={Severity.WARNING: ["checkpoint", seen.append]})
    guard.observe(1, math.nan)
    assert guard.checkpoint_requested and [event.kind for event in seen] == ["non_finite"]
    guard.note_checkpoint(1)
    assert not guard.checkpoint_requested


def test_raise_comes_after_the_sinks_were_written():
    sink = Recorder()
    guard = TrajectoryGuard(make_forecast(), actions={"non_finite": "raise"}, sinks=[sink])
    with pytest.raises(DivergenceError) as caught:
        guard.observe(1, math.nan)
    assert caught.value.event.kind == "non_finite"
    assert sink.calls == [
        ("start", None),
        ("event", "non_finite", "open", 1),
        ("verdict", 1),
        ("flush",),
    ]


def test_a_failing_callable_harms_nothing(caplog):
    guard = TrajectoryGuard(make_forecast(), actions={"critical": lambda event: 1 / 0})
    guard.observe(1, math.nan)
    assert "training goes on" in caplog.text


@pytest.mark.parametrize("actions", [{"bad": "stop"}, {"warning": "halt"}, {"warning": ["stop", 3]}, {7: "stop"}])
def test_unknown_actions_are_refused(actions):
    with pytest.raises(TrajectoryGuardError, match=r"action|severity"):
        TrajectoryGuard(make_forecast(), actions=actions)


def test_sinks_get_verdicts_at_the_interval_and_at_events():
    forecast = make_forecast()
    losses = make_losses(forecast)
    losses[1109] = math.nan
    sink = Recorder()
    with TrajectoryGuard(forecast, sinks=[sink], log_every_n_steps=100) as guard:
        watch(guard, losses[:1200])
    logged = [step for _, step in sink.named("verdict")]
    assert logged == [1, *range(100, 1101, 100), 1110, 1174, 1200]
    assert sink.named("close") == [("close",)]


def test_a_failing_sink_is_switched_off(caplog):
    class Broken(Recorder):
        def verdict(self, verdict):
            raise OSError("no space left on device")

    guard = TrajectoryGuard(make_forecast(), sinks=[Broken()], log_every_n_steps=1)
    watch(guard, make_losses(make_forecast())[:20])
    assert caplog.text.count("switched off") == 1


def test_a_failing_detector_is_switched_off_and_the_rest_goes_on(caplog, monkeypatch):
    forecast = make_forecast()
    guard = TrajectoryGuard(forecast)
    monkeypatch.setattr(type(guard._watcher.judge), "observe", lambda *a, **k: 1 / 0)
    watch(guard, make_losses(forecast)[:200])
    assert caplog.text.count("'judge' failed") == 1
    assert guard.observe(201, math.nan).severity == Severity.CRITICAL


def test_exceptions_pass_through_the_context_manager():
    sink = Recorder()
    with pytest.raises(KeyError), TrajectoryGuard(make_forecast(), sinks=[sink]) as guard:
        guard.observe(1, 5.5)
        raise KeyError("user's own")
    assert sink.named("close")


class OneElement:
    """What a tensor looks like to a library that does not import torch."""

    def __init__(self, value: float, shape: tuple[int, ...]) -> None:
        self.value, self.shape = value, shape

    def item(self) -> float:
        return self.value


@pytest.mark.parametrize(
    "loss", [5.5, 5, np.float32(5.5), np.array(5.5), np.array([5.5]), OneElement(5.5, ()), OneElement(5.5, (1, 1))]
)
def test_numbers_and_one_element_arrays_are_losses(loss):
    assert TrajectoryGuard(make_forecast()).observe(1, loss).loss in (5.5, 5.0)


@pytest.mark.parametrize("loss", ["5.5", None, np.array([5.5, 5.4]), [5.5], True, 1j, np.array("x"), object()])
def test_anything_else_is_refused_with_a_way_out(loss):
    with pytest.raises(TrajectoryGuardError, match="loss must be"):
        TrajectoryGuard(make_forecast()).observe(1, loss)


def test_a_1d_loss_says_to_take_the_mean():
    with pytest.raises(TrajectoryGuardError, match=r"shape \(2,\); pass its mean"):
        TrajectoryGuard(make_forecast()).observe(1, np.array([5.5, 5.4]))


@pytest.mark.parametrize("step", [0, -1, 1.5, "1", None, True, math.nan])
def test_steps_that_cannot_be_are_refused(step):
    with pytest.raises(TrajectoryGuardError, match="step must be"):
        TrajectoryGuard(make_forecast()).observe(step, 5.5)


@pytest.mark.parametrize("tokens", [0, -5, math.nan, math.inf, "many"])
def test_tokens_that_cannot_be_are_refused(tokens):
    with pytest.raises(TrajectoryGuardError, match="tokens"):
        TrajectoryGuard(make_forecast()).observe(1, 5.5, tokens=tokens)


def test_numpy_integer_steps_are_steps():
    assert TrajectoryGuard(make_forecast()).observe(np.int64(7), 5.5).step == 7


def test_a_negative_loss_is_too_good():
    forecast = make_forecast()
    guard = TrajectoryGuard(forecast)
    watch(guard, make_losses(forecast)[:600])
    assert guard.observe(601, -0.5).events[0].kind == "too_good"


def test_a_repeated_step_is_not_judged_twice():
    forecast = make_forecast()
    losses = make_losses(forecast)
    once, twice = TrajectoryGuard(forecast), TrajectoryGuard(forecast)
    for step, loss in enumerate(losses[:1000], 1):
        once.observe(step, float(loss))
        twice.observe(step, float(loss))
        twice.observe(step, float(loss))
    assert once.observe(1001, 2.0) == twice.observe(1001, 2.0)


def test_skipped_steps_are_fine_and_said():
    forecast = make_forecast(20_000)
    losses = make_losses(forecast)
    guard = TrajectoryGuard(forecast)
    for step in range(10, 20_001, 10):
        guard.observe(step, float(losses[step - 1]))
    assert warnings_of(guard) == []
    assert [event.kind for event in guard.events if event.kind == "sparse_log"] == ["sparse_log"]


def test_steps_beyond_the_horizon_have_no_forecast_and_say_so_once():
    forecast = make_forecast()
    guard = TrajectoryGuard(forecast)
    verdicts = watch(guard, np.concatenate([make_losses(forecast), [2.2] * 100]))
    assert verdicts[-1].stage == "no_forecast" and math.isnan(verdicts[-1].forecast)
    assert [event.detected for event in guard.events if event.kind == "beyond_horizon"] == [3001]


def test_going_back_is_said_and_the_same_losses_pass():
    forecast = make_forecast()
    losses = make_losses(forecast)
    guard = TrajectoryGuard(forecast)
    watch(guard, losses[:1500])
    watch(guard, losses[1199:], 1200)
    assert [event.kind for event in guard.events if event.kind != "outlier"] == ["rewound"]
    assert warnings_of(guard) == []


def test_other_losses_on_the_same_data_after_going_back_are_a_warning():
    forecast = make_forecast()
    losses = make_losses(forecast)
    guard = TrajectoryGuard(forecast)
    watch(guard, losses[:1500])
    watch(guard, losses[1199:1300] + 0.01, 1200)
    (event,) = warnings_of(guard)
    assert event.kind == "replayed_differs" and event.size_nats == pytest.approx(0.01)


def test_another_data_order_after_going_back_is_only_said():
    forecast = make_forecast()
    guard = TrajectoryGuard(forecast)
    watch(guard, make_losses(forecast)[:1500])
    watch(guard, make_losses(forecast, seed=1)[1199:1300], 1200)
    assert warnings_of(guard) == []
    assert "data_order_differs" in [event.kind for event in guard.events]


def test_a_first_observation_far_into_the_run_is_said():
    forecast = make_forecast(60_000)
    losses = make_losses(forecast)
    guard = TrajectoryGuard(forecast)
    watch(guard, losses[39_999:42_000], 40_000)
    assert [event.kind for event in guard.events if event.kind != "outlier"] == ["late_start"]


def test_cumulative_tokens_are_noticed_and_ignored():
    forecast = make_forecast()
    guard = TrajectoryGuard(forecast)
    for step, loss in enumerate(make_losses(forecast), 1):
        guard.observe(step, float(loss), tokens=4096 * step)
    assert [event.kind for event in guard.events if event.kind != "outlier"] == ["tokens_mismatch"]


def test_fewer_tokens_per_loss_widen_the_noise():
    forecast = make_forecast()
    losses = make_losses(forecast, noise=0.02)
    centre = np.nan_to_num(np.asarray(forecast.loss(np.arange(1, STEPS + 1))), nan=5.5)
    losses[1500:] = centre[1500:] + 3.0 * (losses[1500:] - centre[1500:])
    guard = TrajectoryGuard(forecast)
    for step, loss in enumerate(losses, 1):
        verdict = guard.observe(step, float(loss), tokens=4096 if step <= 1500 else 4096 / 9)
        if step == 1510:
            assert verdict.residual_nats / verdict.residual_sigma == pytest.approx(0.06, rel=0.15)
    assert warnings_of(guard) == []


def test_bf16_losses_are_named_and_raise_no_alarm():
    forecast = make_forecast()
    losses = np.round(make_losses(forecast, noise=0.004) * 64) / 64
    guard = TrajectoryGuard(forecast)
    watch(guard, losses)
    assert warnings_of(guard) == []
    assert "quantised_loss" in [event.kind for event in guard.events]


def test_a_smoothed_loss_is_named_and_raises_no_alarm():
    forecast = make_forecast()
    raw = make_losses(forecast)
    steps = np.arange(1, STEPS + 1)
    centre = np.nan_to_num(np.asarray(forecast.loss(steps)), nan=5.5)
    smooth = np.zeros(STEPS)
    for i in range(1, STEPS):
        smooth[i] = 0.95 * smooth[i - 1] + 0.05 * (raw[i] - centre[i])
    guard = TrajectoryGuard(forecast)
    watch(guard, centre + smooth)
    assert warnings_of(guard) == []
    assert "smoothed_loss" in [event.kind for event in guard.events]


def faulty_losses(forecast: Forecast) -> np.ndarray:
    """A run with everything in it: spike, NaN, shift up that ends, shift down that stays."""
    losses = make_losses(forecast)
    losses[699:703] *= 1.3
    losses[899] = math.nan
    losses[1199:1400] *= 1.06
    losses[2000:] *= 0.95
    return losses


def everything(forecast: Forecast) -> TrajectoryGuard:
    """A guard with every detector at work: a reference that is lost, and two declared changes."""
    residual = 2.0 * np.random.default_rng(0).standard_normal(STEPS)
    residual[:1700] *= NOISE / 2.0
    guard = TrajectoryGuard(forecast, paired=PairedReference(step=np.arange(1, STEPS + 1), residual=residual))
    guard.expect(1500, "new data")
    guard.expect(2500, "another loss", kind="loss_definition")
    return guard


def watch_everything(guard: TrajectoryGuard, losses: np.ndarray, first_step: int = 1) -> list[str]:
    said = []
    for step, loss in enumerate(losses.tolist(), first_step):
        norm = 1.0 + 0.1 * math.sin(step * step) + (5.0 if 1200 <= step < 1210 else 0.0)
        tokens = 4096 if step < 1800 else 2048
        said.append(repr(guard.observe(step, loss, tokens=tokens, channels={"grad_norm": norm, "x": -norm})))
        if step % 300 == 0:
            guard.note_checkpoint(step)
    return said


@settings(max_examples=8, deadline=None)
@given(st.integers(1, STEPS - 1))
def test_a_resumed_guard_gives_the_verdicts_of_one_that_never_stopped(k):
    course = ChannelCourse(progress=[0.2, 1.0], value=[-1.0, -1.1], logarithmic=False, error=0.05)
    forecast = with_channels(make_forecast(), x=course)
    losses = faulty_losses(forecast)
    whole = everything(forecast)
    expected = watch_everything(whole, losses)
    first = everything(forecast)
    watch_everything(first, losses[:k])
    state = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    second = TrajectoryGuard(forecast, paired=first._watcher._paired)
    second.load_state_dict(state)
    assert watch_everything(second, losses[k:], k + 1) == expected[k:]
    assert second.events == whole.events
    assert second.state_dict() == whole.state_dict()
    kinds = {event.kind for event in whole.events}
    assert {"spike", "non_finite", "planned_change", "channel/grad_norm", "pairing_lost"} <= kinds


def test_the_state_is_small_and_loads_with_weights_only(tmp_path):
    torch = pytest.importorskip("torch")
    forecast = make_forecast()
    guard = TrajectoryGuard(forecast)
    watch(guard, faulty_losses(forecast))
    state = guard.state_dict()
    assert len(json.dumps(state, allow_nan=False)) < 200_000
    torch.save(state, tmp_path / "guard.pt")
    assert torch.load(tmp_path / "guard.pt", weights_only=True) == state


def test_sinks_learn_that_a_run_was_resumed():
    forecast = make_forecast()
    guard = TrajectoryGuard(forecast)
    watch(guard, make_losses(forecast)[:700])
    sink = Recorder()
    resumed = TrajectoryGuard(forecast, sinks=[sink])
    resumed.load_state_dict(guard.state_dict())
    resumed.observe(701, 2.3)
    assert sink.calls[0] == ("start", 700)


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.update(version=99),
        lambda state: state.update(format="other"),
        lambda state: state.pop("watcher"),
        lambda state: state["watcher"]["judge"].pop("level"),
        lambda state: state["watcher"]["onlookers"].update(last_step="900"),
        lambda state: state["watcher"].update(channels="x"),
        lambda state: state["watcher"]["course"]["counts"].pop(),
        lambda state: state["watcher"]["course"].update(at=200),
        lambda state: state.update(next_log=math.inf),
        lambda state: state["events"].append({"kind": "x"}),
    ],
)
def test_a_damaged_or_newer_state_is_refused(damage):
    forecast = make_forecast()
    state = TrajectoryGuard(forecast).state_dict()
    damage(state)
    with pytest.raises(TrajectoryGuardError, match="state"):
        TrajectoryGuard(forecast).load_state_dict(state)


def test_an_older_state_says_which_version_it_has_and_what_to_do():
    state = {**TrajectoryGuard(make_forecast()).state_dict(), "version": 1}
    with pytest.raises(TrajectoryGuardError, match="has version 1, this release reads 2; resume with the release"):
        TrajectoryGuard(make_forecast()).load_state_dict(state)


def test_a_declared_change_is_absorbed_and_its_size_reported():
    forecast = make_forecast()
    losses = make_losses(forecast)
    losses[1499:] *= 1.018
    guard = TrajectoryGuard(forecast)
    guard.expect(1500, "data phase 2")
    watch(guard, losses)
    assert warnings_of(guard) == []
    (event,) = [event for event in guard.events if event.kind == "planned_change"]
    assert event.size_percent == pytest.approx(1.8, abs=0.3)
    assert "data phase 2" in event.sentence and event.detected == 1899


def test_a_change_in_the_plan_is_known_from_the_start():
    forecast = make_forecast()
    plan = RunPlan.from_dict(
        {**forecast.plan.to_dict(), "changes": [{"step": 1500, "reason": "more code", "kind": "data"}]}
    )
    assert RunPlan.from_dict(plan.to_dict()) == plan
    progress = np.linspace(0.01, 1.0, 400)
    planned = Forecast(plan, progress=progress, loss=1.6 + 0.6 * progress**-0.35, half_widths={0.8: 0.01, 0.95: 0.02})
    losses = make_losses(forecast)
    losses[1499:] *= 0.985
    guard = TrajectoryGuard(planned)
    watch(guard, losses)
    assert warnings_of(guard) == []
    assert "planned_change" in [event.kind for event in guard.events]


def test_a_changed_definition_of_the_loss_moves_the_forecast():
    forecast = make_forecast()
    losses = make_losses(forecast)
    losses[1499:] += 0.5
    guard = TrajectoryGuard(forecast)
    guard.expect(1500, "z-loss is now included", kind="loss_definition")
    verdicts = watch(guard, losses)
    assert warnings_of(guard) == []
    assert verdicts[2500].forecast == pytest.approx(forecast.loss(2501) + 0.5, abs=0.02)


def test_a_declared_batch_size_has_the_noise_learnt_anew():
    forecast = make_forecast()
    losses = make_losses(forecast, noise=0.01)
    centre = np.nan_to_num(np.asarray(forecast.loss(np.arange(1, STEPS + 1))), nan=5.5)
    losses[1500:] = centre[1500:] + 4.0 * (losses[1500:] - centre[1500:])
    guard = TrajectoryGuard(forecast)
    guard.expect(1501, "batch / 16", kind="batch_size")
    verdict = watch(guard, losses)[-1]
    assert warnings_of(guard) == []
    assert verdict.residual_nats / verdict.residual_sigma == pytest.approx(0.04, rel=0.15)


def test_a_fault_after_a_declared_change_is_still_found():
    forecast = make_forecast()
    losses = make_losses(forecast)
    losses[999:] *= 1.01
    losses[1999:] *= 1.05
    guard = TrajectoryGuard(forecast)
    guard.expect(tokens=999 * 4096, reason="new data")
    watch(guard, losses)
    assert guard.events[0].kind == "planned_change"
    assert abs(warnings_of(guard)[0].onset - 2000) <= 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reason": "x"}, "step or tokens"),
        ({"step": 5, "tokens": 5, "reason": "x"}, "step or tokens"),
        ({"step": 5}, "reason"),
        ({"step": 5, "reason": "x", "kind": "moon"}, "kind of change"),
        ({"step": 0, "reason": "x"}, "at least 1"),
    ],
)
def test_changes_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(TrajectoryGuardError, match=message):
        TrajectoryGuard(make_forecast()).expect(**arguments)


def paired_runs(forecast: Forecast, noise: float = 0.08) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    steps = np.arange(1, forecast.plan.total_steps + 1)
    centre = np.nan_to_num(np.asarray(forecast.loss(steps)), nan=5.5)
    shared = noise * rng.standard_normal(len(steps))
    return steps, centre + shared + 0.06 * noise * rng.standard_normal(len(steps)), shared * 1.2


def test_a_paired_reference_shows_a_small_shift_within_ten_steps():
    forecast = make_forecast()
    steps, losses, residual = paired_runs(forecast)
    losses[1999:] *= 1.01
    guard = TrajectoryGuard(forecast, paired=PairedReference(step=steps, residual=residual))
    watch(guard, losses)
    event = warnings_of(guard)[0]
    assert event.kind == "change_up" and 2000 <= event.detected <= 2010 and abs(event.onset - 2000) <= 5
    assert "paired with the reference run" in event.sentence


def test_a_reference_on_another_data_order_is_dropped_and_the_guard_goes_on():
    forecast = make_forecast()
    steps, losses, residual = paired_runs(forecast)
    residual[1499:] = np.random.default_rng(5).permutation(residual[1499:])
    losses[2499:] *= 1.10
    guard = TrajectoryGuard(forecast, paired=PairedReference(step=steps, residual=residual))
    watch(guard, losses)
    assert [event.kind for event in guard.events if event.kind == "pairing_lost"] == ["pairing_lost"]
    assert all(event.onset >= 2480 for event in warnings_of(guard)) and warnings_of(guard)


def test_a_gradient_norm_that_spikes_warns_and_its_level_changes_inform():
    forecast = make_forecast()
    losses = make_losses(forecast)
    rng = np.random.default_rng(7)
    norm = np.exp(0.15 * rng.standard_normal(STEPS))
    norm[1499:1504] *= 5.0
    norm[1999:] *= 1.8
    guard = TrajectoryGuard(forecast)
    for step, (loss, value) in enumerate(zip(losses, norm, strict=True), 1):
        guard.observe(step, float(loss), channels={"grad_norm": float(value)})
    spike, change = (event for event in guard.events if event.kind == "channel/grad_norm")
    assert (spike.severity, spike.detected, spike.state) == (Severity.WARNING, 1502, "closed")
    assert (change.severity, abs(change.onset - 2000) <= 10) == (Severity.INFO, True)
    assert "channel grad_norm" in change.sentence


def test_channels_survive_a_resume_and_bad_values():
    forecast = make_forecast()
    losses = make_losses(forecast)
    whole, first = TrajectoryGuard(forecast), TrajectoryGuard(forecast)

    def feed(guard: TrajectoryGuard, start: int, stop: int) -> list[str]:
        rng = np.random.default_rng(start)
        seen = []
        for step in range(start, stop):
            value = math.nan if step == 700 else 1.0 + 0.1 * rng.standard_normal()
            seen.append(repr(guard.observe(step, float(losses[step]), channels={"a": value, "b": -value})))
        return seen

    feed(whole, 1, 600)
    feed(first, 1, 600)
    resumed = TrajectoryGuard(forecast)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert feed(whole, 600, 1200) == feed(resumed, 600, 1200)
    assert {event.kind for event in resumed.events if event.detected == 700} == {"channel/a", "channel/b"}


def with_channels(forecast: Forecast, **channels: ChannelCourse) -> Forecast:
    progress, loss, widths = forecast.table
    return Forecast(forecast.plan, progress=progress, loss=loss, half_widths=widths, channels=channels)


def test_a_channel_with_a_course_is_watched_against_it():
    forecast = make_forecast()
    losses = make_losses(forecast)
    course = ChannelCourse(progress=[0.0, 1.0], value=[1.0, 9.0])
    expected = course.at(forecast.plan.progress(np.arange(STEPS + 1)))
    rng = np.random.default_rng(0)
    guard = TrajectoryGuard(with_channels(forecast, weight_rms=course))
    for step, loss in enumerate(losses, 1):
        value = expected[step] * math.exp(0.02 * rng.standard_normal()) * (1.8 if step >= 2000 else 1.0)
        guard.observe(step, float(loss), channels={"weight_rms": value})
    (event,) = [event for event in guard.events if event.kind.startswith("channel")]
    assert abs(event.onset - 2000) <= 2
    assert "against its ladder's course" in event.sentence


def test_a_course_that_begins_late_or_comes_with_a_resume_has_the_level_learnt_anew():
    plain = make_forecast()
    losses = make_losses(plain)
    course = ChannelCourse(progress=[0.5, 1.0], value=[50.0, 90.0], error=0.02)
    guided = with_channels(plain, a=course)

    def feed(guard: TrajectoryGuard, start: int, stop: int) -> list[Event]:
        rng = np.random.default_rng(start)
        for step in range(start, stop):
            guard.observe(step, float(losses[step - 1]), channels={"a": math.exp(0.1 * rng.standard_normal())})
        return [event for event in guard.events if event.kind == "channel/a"]

    late = TrajectoryGuard(guided)
    assert feed(late, 1, STEPS // 2 + 300) == []
    before = TrajectoryGuard(plain)
    feed(before, 1, 1200)
    resumed = TrajectoryGuard(with_channels(plain, a=ChannelCourse(progress=[0.0, 1.0], value=[5.0, 5.0])))
    state = before.state_dict()
    del state["watcher"]["channels"]["a"]["guided"]  # As an earlier release wrote it.
    resumed.load_state_dict(state)
    assert feed(resumed, 1200, 2000) == []


def test_an_open_channel_event_is_closed_where_its_scale_changes():
    forecast = make_forecast()
    losses = make_losses(forecast)
    guard = TrajectoryGuard(forecast)
    for step in range(1, 1200):
        value = 1.0 + 0.01 * (step % 7) if step < 1000 else 10.0 if step < 1100 else -1.0
        guard.observe(step, float(losses[step - 1]), channels={"a": value})
    first = next(event for event in guard.events if event.kind == "channel/a")
    assert (first.state, first.closed) == ("closed", 1100) and "another scale" in first.sentence


@pytest.mark.parametrize("course", [{"a": 1.0}, {"a": Forecast}])
def test_a_channel_course_of_another_type_is_refused(course):
    forecast = make_forecast()
    with pytest.raises(TrajectoryGuardError, match="channel 'a' needs a ChannelCourse"):
        with_channels(forecast, **course)


@pytest.mark.parametrize("value", ["1.0", None, np.array([1.0, 2.0])])
def test_channels_that_are_no_numbers_are_refused(value):
    with pytest.raises(TrajectoryGuardError, match="channel grad_norm must be"):
        TrajectoryGuard(make_forecast()).observe(1, 5.5, channels={"grad_norm": value})


@pytest.mark.parametrize(("before", "after"), [(4096, 409.6), (409.6, 4096), (4096, None)])
def test_tokens_that_turn_wrong_by_ten_raise_no_warning(before, after):
    forecast = make_forecast()
    guard = TrajectoryGuard(forecast)
    for step, loss in enumerate(make_losses(forecast), 1):
        verdict = guard.observe(step, float(loss), tokens=before if step <= 1500 else after)
    assert warnings_of(guard) == []
    assert verdict.residual_nats / verdict.residual_sigma == pytest.approx(NOISE, rel=0.15)


def test_a_batch_ramp_of_the_plan_rescales_the_noise():
    plan = RunPlan(
        total_steps=STEPS,
        tokens_per_step=((1, 4096), (1501, 65_536)),
        active_params=70_000,
        schedule=LRSchedule(shape="constant"),
    )
    forecast = Forecast(plan, progress=[0.0, 1.0], loss=[3.0, 2.5], half_widths={0.8: 0.01, 0.95: 0.02})
    rng = np.random.default_rng(0)
    guard = TrajectoryGuard(forecast)
    for step in range(1, STEPS + 1):
        noise = 0.04 if step <= 1500 else 0.01
        verdict = guard.observe(step, forecast.loss(step) + noise * float(rng.standard_normal()))
        if step == 1600:
            assert verdict.residual_nats / verdict.residual_sigma == pytest.approx(0.01, rel=0.25)
    assert warnings_of(guard) == []


def test_actions_of_channels_are_given_for_one_or_for_all():
    for key in ("channel", "channel/grad_norm"):
        guard = TrajectoryGuard(make_forecast(), actions={key: "stop"})
        guard.observe(100, 3.0, channels={"loss_scale": 1.0})
        assert not guard.should_stop
        guard.observe(101, 3.0, channels={"grad_norm": math.nan})
        assert guard.should_stop
