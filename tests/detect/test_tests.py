"""The small tests: baseline, CUSUM, spikes, runaway, units, replayed steps, excursions, channels, pairing."""

import math

import numpy as np
import pytest

from trajectory_guard.detect.baseline import Baseline, robust_level
from trajectory_guard.detect.change import Cusum
from trajectory_guard.detect.channels import ChannelWatch
from trajectory_guard.detect.events import Event, Severity
from trajectory_guard.detect.excursion import Excursion, rollback_step
from trajectory_guard.detect.level import CALIBRATION, LevelWatch
from trajectory_guard.detect.nonfinite import NonFiniteWatch
from trajectory_guard.detect.paired import Pairing
from trajectory_guard.detect.plateau import Course
from trajectory_guard.detect.replayed import MEMORY, PAIRS, SLACK, Replayed
from trajectory_guard.detect.runaway import Runaway
from trajectory_guard.detect.spike import Spikes
from trajectory_guard.detect.units import first_loss_problem, ratio_hint


def test_the_level_is_robust_to_skewed_outliers():
    rng = np.random.default_rng(0)
    values = 0.3 + 0.01 * rng.standard_normal(400)
    values[::40] += 1.0
    assert robust_level(values.tolist(), 0.01) == pytest.approx(0.3, abs=0.003)


def test_the_baseline_never_sees_the_latest_320_observations():
    baseline = Baseline()
    baseline.calibrate([0.0] * 400, 1.0)
    for _ in range(40):
        baseline.add(8.0, 8)
    assert baseline.level == 0.0
    for _ in range(4):
        baseline.add(8.0, 8)
    assert baseline.level == pytest.approx(32 / 432)


def test_cusum_equals_its_definition_and_knows_its_onset():
    values = np.random.default_rng(0).standard_normal(500).tolist() + [1.0] * 50
    cusum, up, down = Cusum(), 0.0, 0.0
    for step, value in enumerate(values, 1):
        up, down = max(0.0, up + value - 0.3), max(0.0, down - value - 0.3)
        assert cusum.update(step, value - 0.3, -value - 0.3, value) == pytest.approx(max(up, down))
        assert (cusum.up, cusum.down) == pytest.approx((up, down))
    partial = [sum(value - 0.3 for value in values[i:]) for i in range(len(values))]
    # Page's maximum-likelihood onset: where the sum to the end is largest.
    onset = 1 + int(np.argmax(partial))
    assert cusum.onset(1) == onset and cusum.count(1) == len(values) - onset + 1
    assert cusum.mean(1) == pytest.approx(np.mean(values[onset - 1 :]))


def test_three_outliers_of_five_are_a_spike_with_their_first_as_onset():
    spikes = Spikes()
    assert [spikes.add(10 + i, i) for i in (1, 3, 5)] == [False, False, True]
    assert spikes.steps == [11, 13, 15]
    assert spikes.add(16, 6) and not spikes.add(20, 10) and spikes.steps == [16, 20]
    assert not spikes.add(31, 1) and not spikes.add(32, 2) and spikes.steps == [31, 32]


def test_an_accelerating_rise_is_a_runaway_and_a_linear_one_is_not():
    def fires(excess) -> bool:
        runaway = Runaway()
        return any(runaway.update(excess(t), 0.0, 0.03, math.nan) for t in range(400))

    assert fires(lambda t: 0.01 * 2 ** (t / 30))
    assert not fires(lambda t: 0.01 * t)


@pytest.mark.parametrize(
    ("ratio", "words"), [(1.4427, "bits"), (0.6931, "twice"), (8.0, "sum over 8"), (0.25, "divided once more by 4")]
)
def test_ratios_are_named(ratio, words):
    assert words in ratio_hint(ratio)
    assert first_loss_problem(ratio * 10.0, 10.0)[0] == pytest.approx(ratio)


@pytest.mark.parametrize("ratio", [1.0, 1.2, 0.95, 1.3, 0.0, -1.0, math.nan])
def test_other_ratios_are_not(ratio):
    assert ratio_hint(ratio) is None


def test_usual_initial_losses_pass():
    assert first_loss_problem(10.99, math.log(50304)) is None


def test_replayed_losses_within_tolerance_are_silent():
    replayed = Replayed()
    losses = np.random.default_rng(0).normal(3.0, 0.05, 100)
    for step, loss in enumerate(losses, 1):
        replayed.remember(step, float(loss))
    replayed.begin(1)
    assert all(replayed.compare(step, float(loss) + 2e-4) is None for step, loss in enumerate(losses, 1))


def test_replayed_losses_tell_another_model_from_other_data():
    rng = np.random.default_rng(0)
    losses = rng.normal(3.0, 0.05, 100)

    def findings(again):
        replayed = Replayed()
        for step, loss in enumerate(losses, 1):
            replayed.remember(step, float(loss))
        replayed.begin(1)
        return [replayed.compare(step, float(loss)) for step, loss in enumerate(again, 1)]

    assert findings(losses + 0.01)[PAIRS - 1][0] == "replayed_differs"
    assert findings(rng.permutation(losses))[PAIRS - 1][0] == "data_order_differs"


def test_memory_of_replayed_losses_is_bounded():
    replayed = Replayed()
    for step in range(1, 10_000):
        replayed.remember(step, 3.0)
        kept = replayed.steps
        assert len(kept) <= MEMORY + SLACK
        assert kept == list(range(max(1, step - len(kept) + 1), step + 1)) and len(kept) >= min(step, MEMORY)


def test_rollback_needs_a_checkpoint_well_before_the_onset():
    assert rollback_step([], 1000, 1010) is None
    assert rollback_step([950], 1000, 1010) is None
    # A slow fault: twice its delay of 300.
    assert rollback_step([300, 500, 800], 1000, 1300) == 300


def test_an_excursion_closes_after_64_calm_observations():
    excursion = Excursion()
    excursion.open(kind="change_up", sign=1, onset=90, step=100, size=0.3, origin=0.0)
    over = [excursion.update(step, 0.0, 0.0, 0.03, 0.01, 1.0, 0.5) for step in range(101, 400)]
    first = over.index(True)
    # The smoothed excess falls from 0.3 below 0.36 sigma in 32 ln(0.3 / 0.0108) = 106 observations.
    assert 101 + first == pytest.approx(100 + 106 + 64, abs=3)
    assert excursion.peak == 0.3


def test_a_loss_scaler_is_allowed_lone_overflows_only():
    watch = NonFiniteWatch(loss_scaler=True)
    events: list[Event] = []
    for step in range(1, 400):
        events += watch.update(step, math.inf if step % 100 == 0 else 3.0) or []
    assert {event.severity for event in events} == {Severity.INFO}
    for step in range(400, 420):
        events += watch.update(step, math.nan if step % 2 else 3.0) or []
    assert max(event.severity for event in events) == Severity.CRITICAL


def test_a_nan_goes_back_to_the_newest_checkpoint_whose_weights_gave_a_finite_loss():
    watch = NonFiniteWatch()
    assert watch.update(50, 3.0, [40, 48, 49]) is None
    (event,) = watch.update(51, math.nan, [40, 48, 49, 50]) or []
    # The weights of step 50 gave the NaN of step 51, those of step 49 the finite loss of step 50.
    assert (event.onset, event.rollback_step) == (51, 49)
    closed = [event for step in range(52, 150) for event in watch.update(step, 3.0, [49, 50, 60, 100]) or []]
    assert [(event.state, event.rollback_step) for event in closed] == [("closed", 49)]
    (again,) = watch.update(200, math.nan, [199]) or []
    assert again.rollback_step is None


def test_a_lone_overflow_under_a_loss_scaler_asks_for_no_rollback():
    (event,) = NonFiniteWatch(loss_scaler=True).update(51, math.inf, [10]) or []
    assert (event.severity, event.rollback_step) == (Severity.INFO, None)


def test_a_plateau_is_named_only_while_the_loss_stands_still():
    rng = np.random.default_rng(0)
    flat, falling = Course(), Course()
    for step in range(1, 1001):
        forecast = 3.0 - 1e-4 * step
        flat.add(step, 1, 3.0 + 0.03 * float(rng.standard_normal()), forecast)
        falling.add(step, 1, forecast + 0.03 * float(rng.standard_normal()), forecast)
    assert flat.plateau(100, 0.03).startswith("plateau")
    assert falling.plateau(100, 0.03) is None


def test_pairing_finds_slope_and_correlation():
    rng = np.random.default_rng(0)
    reference = rng.standard_normal(600)
    own = 0.7 * reference + 0.05 * rng.standard_normal(600)
    pairing = Pairing()
    paired = [pairing.update(float(a), float(b)) for a, b in zip(own, reference, strict=True)]
    assert paired[:64] == [None] * 64 and pairing.active
    assert pairing.slope == pytest.approx(0.7, abs=0.02)
    assert np.std([p for p in paired if p is not None]) == pytest.approx(0.05, rel=0.15)


def test_unrelated_runs_are_not_paired():
    rng = np.random.default_rng(0)
    pairing = Pairing()
    assert [pairing.update(*pair) for pair in rng.standard_normal((600, 2)).tolist()] == [None] * 600


def run_channel(values: np.ndarray) -> list[Event]:
    watch, events = ChannelWatch(), []
    for step, value in enumerate(values.tolist(), 1):
        events += watch.update("x", step, value, math.nan) or []
    return events


@pytest.mark.parametrize("seed", range(3))
def test_a_steady_and_a_slowly_falling_channel_are_silent(seed):
    noise = np.exp(0.2 * np.random.default_rng(seed).standard_normal(5000))
    assert run_channel(noise) == []
    assert run_channel(noise * np.linspace(2.0, 1.0, 5000)) == []


def run_guided(values: np.ndarray, course: np.ndarray, error: float, *, logarithmic: bool = True) -> list[Event]:
    watch, events = ChannelWatch(), []
    for step, (value, expected) in enumerate(zip(values.tolist(), course.tolist(), strict=True), 1):
        events += watch.update("x", step, value, expected, error, logarithmic) or []
    return events


def test_a_bend_of_the_course_is_silent_and_a_departure_from_it_is_seen_sooner():
    steps = np.arange(5000)
    course = 3.0 ** (1.0 / (1.0 + np.exp(-(steps - 3000) / 20)))
    delays = []
    for seed in range(5):
        noise = 0.7 * np.exp(0.15 * np.random.default_rng(seed).standard_normal(5000))
        assert run_guided(noise * course, course, 0.03) == []
        assert run_channel(noise * course)[0].onset > 2800
        departs = noise * np.where(steps >= 2000, 1.6, 1.0) * course
        seen = [run_guided(departs, course, 0.03)[0], run_channel(departs)[0]]
        assert abs(seen[0].onset - 2001) <= 10
        delays.append([event.detected - 2000 for event in seen])
    assert max(own for own, _ in delays) <= 40
    assert all(own < without for own, without in delays)


def test_a_course_of_which_little_is_known_leaves_the_gate_of_a_channel_without_one():
    course = np.linspace(1.0, 2.0, 5000)
    values = course * np.exp(0.1 * np.random.default_rng(0).standard_normal(5000))
    values[2000:] *= 1.35
    assert run_guided(values, course, 0.02)[0].onset == pytest.approx(2001, abs=10)
    for error in (math.nan, 0.3):
        assert run_guided(values, course, error) == []


@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_a_course_of_both_signs_is_followed_on_the_channels_own_scale(offset):
    course = np.sin(np.linspace(0.0, 9.0, 5000)) * 6.0
    values = course + offset + np.random.default_rng(0).standard_normal(5000)
    assert run_guided(values, course, 0.1, logarithmic=False) == []
    values[2000:] += 4.0
    assert run_guided(values, course, 0.1, logarithmic=False)[0].onset == pytest.approx(2001, abs=10)


def test_a_positive_course_of_a_channel_that_turns_negative_is_followed_by_difference():
    course = np.linspace(5.0, 9.0, 4000)
    values = course + 0.1 * np.random.default_rng(0).standard_normal(4000)
    values[50] = -1.0
    assert run_guided(values, course, 0.02) == []
    values[2000:] += 1.0
    assert run_guided(values, course, 0.02)[0].onset == pytest.approx(2001, abs=10)


def test_a_channel_of_both_signs_is_watched_on_its_own_scale():
    values = np.random.default_rng(0).standard_normal(3000)
    assert run_channel(values) == []
    values[2000:] += 8.0
    events = run_channel(values)
    assert events and abs(events[0].onset - 2001) <= 10


def test_a_channel_that_stays_elsewhere_is_learnt_there():
    values = np.exp(0.1 * np.random.default_rng(0).standard_normal(5000))
    values[1500:] *= 3.0
    events = run_channel(values)
    assert [event.state for event in events] == ["open", "closed"]
    assert "new level" in events[-1].sentence


def test_a_level_watch_learns_nothing_while_frozen():
    rng = np.random.default_rng(0)
    watch = LevelWatch()
    for step in range(1, 1001):
        watch.update(step, 3.0, 0.03 * float(rng.standard_normal()), 0.01, 0.06)
    assert watch.observation > CALIBRATION
    before = (watch.level, watch.noise.state(), watch.baseline.state())
    for step in range(1001, 1500):
        watch.update(step, 3.0, 0.3 + 0.1 * float(rng.standard_normal()), 0.01, 0.06, frozen=True)
    assert (watch.level, watch.noise.state(), watch.baseline.state()) == before


def test_states_of_other_detectors_are_refused():
    with pytest.raises(ValueError, match="the state of Cusum has the fields"):
        Cusum().load_state(Spikes().state())
