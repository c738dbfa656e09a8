"""ChannelLaw: smoothed rung curves, and whether the nearest rung or the trend over sizes tells the next one."""

import json
import math

import numpy as np
import pytest

from trajectory_guard.channel import ChannelSeries
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.laws.channel import ChannelLaw, ChannelPoints, fit_channel, smooth_channel


def with_values(rung: Rung, value: np.ndarray, step: np.ndarray | None = None, name: str = "x") -> Rung:
    step = rung.curves[0].step if step is None else step
    series = {name: (ChannelSeries(step=step, value=value),)}
    return Rung(name=rung.name, plan=rung.plan, curves=rung.curves[:1], channels=series)


def law_of(curves: dict[float, np.ndarray], **errors: float | None) -> ChannelLaw:
    progress = tuple(np.linspace(0.1, 1.0, 10))
    points = tuple(ChannelPoints(name=f"{c}", flops=c, progress=progress, value=tuple(v)) for c, v in curves.items())
    return ChannelLaw(logarithmic=True, points=points, **{"error_nearest": None, "error_trend": None, **errors})


@pytest.mark.parametrize("name", ["grad_norm", "router/bias"])
def test_a_fitted_course_follows_the_truth_of_an_unseen_size(channel_ladder, channel_rung, channel_truth, name):
    law = fit_channel(channel_ladder, name)
    plan = channel_rung(8e4).plan
    course = law.course(plan.total_flops)
    g = np.linspace(0.02, 1.0, 200)
    truth = channel_truth(8e4, g)[name]
    assert law.logarithmic == course.logarithmic == (name == "grad_norm")
    error = np.log(course.at(g) / truth) if law.logarithmic else course.at(g) - truth
    bend = error - np.median(error)
    assert np.sqrt(np.mean(bend**2)) < 0.05
    assert 0.0 < course.error < 0.06


def test_spikes_and_a_bad_stretch_do_not_bend_the_curve(channel_rung):
    rung = channel_rung(2e4)
    value = rung.channels["grad_norm"][0].value.copy()
    clean = smooth_channel(rung, "grad_norm", logarithmic=True)[1]
    value[::17] *= 20.0
    value[400:412] *= 15.0
    progress, bent = smooth_channel(with_values(rung, value), "x", logarithmic=True)
    assert np.max(np.abs(bent - clean)[progress > 0.05]) < 0.12
    assert np.sqrt(np.mean((bent - clean) ** 2)) < 0.04


def test_a_long_series_is_thinned_by_medians(channel_rung, channel_truth):
    rung = channel_rung(2e4, steps=50_000)
    progress, y = smooth_channel(rung, "grad_norm", logarithmic=True)
    truth = np.log(channel_truth(2e4, progress)["grad_norm"])
    assert np.max(np.abs(y - truth)) < 0.08


def test_seeds_are_averaged_and_one_that_stopped_early_bends_nothing(channel_rung):
    rung = channel_rung(2e4, seeds=(0, 1), spread=0.0)
    first, second = rung.channels["grad_norm"]
    half = len(second.step) // 2
    short = ChannelSeries(step=second.step[:half], value=4.0 * second.value[:half])
    both = Rung(name="r", plan=rung.plan, curves=rung.curves, channels={"x": (first, short)})
    progress, y = smooth_channel(both, "x", logarithmic=True)
    alone = smooth_channel(with_values(rung, first.value), "x", logarithmic=True)[1]
    assert progress[-1] == 1.0
    np.testing.assert_allclose(y - alone, math.log(2.0), atol=2e-3)


@pytest.mark.parametrize("constant", [1.0, 65_536.0, 0.0, -3.0])
def test_a_constant_channel_stays_constant(channel_rung, constant):
    rungs = [channel_rung(n) for n in (1e4, 2e4, 4e4)]
    law = fit_channel(Ladder(rungs=tuple(with_values(r, np.full(1000, constant)) for r in rungs)), "x")
    np.testing.assert_allclose(law.course(1e12).value, constant, rtol=1e-6)
    assert law.error_nearest == pytest.approx(0.0, abs=1e-6)


def test_zeros_before_the_first_percent_leave_a_channel_on_its_logarithm(channel_rung):
    rung = channel_rung(2e4)
    value = rung.channels["grad_norm"][0].value.copy()
    value[:3] = 0.0
    assert fit_channel(Ladder(rungs=(with_values(rung, value),)), "x").logarithmic
    value[500] = 0.0
    assert not fit_channel(Ladder(rungs=(with_values(rung, value),)), "x").logarithmic


def test_too_few_values_say_what_to_do(channel_rung):
    rung = channel_rung(2e4)
    sparse = with_values(rung, np.ones(5), step=np.array([100, 300, 500, 700, 900]))
    with pytest.raises(TrajectoryGuardError, match="rung 'n20000': channel 'x' has 5 usable values, too few"):
        fit_channel(Ladder(rungs=(sparse,)), "x")


def test_a_bend_that_grows_with_size_is_extrapolated_and_one_of_noise_is_not(channel_rung):
    g = channel_rung(2e4).plan.progress(np.arange(1, 1001))
    growing, noisy = [], []
    for k, params in enumerate((1e4, 1.6e4, 2.5e4, 4e4)):
        rung, rng = channel_rung(params), np.random.default_rng(k)
        grain = np.exp(0.05 * rng.standard_normal(1000))
        growing.append(with_values(rung, np.exp(0.8 * k * g) * grain))
        wave = 0.1 * np.sin(2 * np.pi * (g + rng.random()))
        noisy.append(with_values(rung, np.exp(wave) * grain))
    grown, still = fit_channel(Ladder(rungs=tuple(growing)), "x"), fit_channel(Ladder(rungs=tuple(noisy)), "x")
    assert (grown.rule, still.rule) == ("trend", "nearest")
    assert grown.error_trend < 0.3 * grown.error_nearest
    step = 0.8 / math.log(1.6**2)  # Exponent at the end of training, by ln(FLOPs).
    ahead = grown.course(growing[-1].plan.total_flops * 10.0)
    assert ahead.value[-1] == pytest.approx(math.exp(2.4 + step * math.log(10.0)), rel=0.25)
    assert still.course(1e30).value[-1] == still.points[-1].value[-1]


def test_the_nearest_rung_is_the_nearest_in_log_compute():
    law = law_of({1e10: np.full(10, 1.0), 1e12: np.full(10, 2.0)})
    assert [law.course(c).value[0] for c in (1.0, 9e10, 1.01e11, 1e20)] == [1.0, 1.0, 2.0, 2.0]


def test_the_trend_is_used_only_where_it_is_better_by_a_tenth():
    curves = {1e10: np.full(10, 1.0), 1e12: np.full(10, 2.0)}
    assert law_of(curves, error_nearest=0.2, error_trend=0.19).rule == "nearest"
    assert law_of(curves, error_nearest=0.2, error_trend=None).rule == "nearest"
    better = law_of(curves, error_nearest=0.2, error_trend=0.1)
    assert (better.rule, better.error) == ("trend", 0.1)
    assert better.course(1e14).value[0] == pytest.approx(4.0)
    assert math.isnan(law_of(curves).error)


def test_sizes_that_do_not_differ_tell_no_trend(channel_rung):
    rungs = tuple(
        Rung(name=str(i), plan=r.plan, curves=r.curves, channels=r.channels)
        for i, r in enumerate(channel_rung(n) for n in (2e4, 2.01e4, 2.02e4))
    )
    law = fit_channel(Ladder(rungs=rungs), "grad_norm")
    assert law.error_trend is None and law.error_nearest is not None and law.error_nearest < 0.1


def test_a_law_survives_json_and_a_trend_beyond_floats_is_refused():
    law = law_of({1e10: np.full(10, 1.0), 1e10 * 2: np.full(10, 1e300)}, error_nearest=0.2, error_trend=0.1)
    again = ChannelLaw.from_dict(json.loads(json.dumps(law.to_dict())))
    assert again.to_dict() == law.to_dict()
    with pytest.raises(TrajectoryGuardError, match="finite"):
        again.course(1e20)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logarithmic": 1}, "true or false"),
        ({"rungs": []}, "at least one rung"),
        ({"rungs": {}}, "list of `rungs`"),
        ({"rungs": [{"name": "a"}]}, "a rung of a channel has the fields"),
        ({"rungs": [{"name": "a", "flops": 0, "progress": [1], "value": [1]}]}, "flops must be positive"),
        ({"rungs": [{"name": "a", "flops": "1", "progress": [1], "value": [1]}]}, "flops must hold numbers"),
        ({"rungs": [{"name": "a", "flops": 1, "progress": 1, "value": [1]}]}, "progress must be a list"),
        ({"rungs": [{"name": "a", "flops": 1, "progress": [0.1, 0.2], "value": [1]}]}, "rung 'a': progress .* rise"),
        ({"rungs": [{"name": "a", "flops": 1, "progress": [0.2], "value": [-1]}]}, "rung 'a': .*logarithmic=False"),
        ({"rungs": [{"name": "a", "flops": 1, "progress": [0.2], "value": [None]}]}, "value must hold numbers"),
        (
            {"rungs": [{"name": "a", "flops": 1, "progress": [i / 999 for i in range(999)], "value": [1] * 999}]},
            "more than 200 points",
        ),
        ({"error_nearest": -1}, "not negative"),
        ({"error_trend": "small"}, "error_trend must hold numbers"),
        ({"surprise": 1}, "a channel has the fields"),
    ],
)
def test_a_damaged_law_is_refused(fields, words):
    content = law_of({1e10: np.full(10, 1.0)}).to_dict()
    with pytest.raises(TrajectoryGuardError, match=words):
        ChannelLaw.from_dict({**content, **fields})
    with pytest.raises(TrajectoryGuardError, match="a channel has the fields"):
        ChannelLaw.from_dict([1])
