import numpy as np
import pytest

from trajectory_guard.laws.memory import MEMORIES, MEMORY_PARAMETERS, effective_rate, join, locate
from trajectory_guard.lr_schedule import LRSchedule

SCHEDULES = (
    LRSchedule(shape="cosine", warmup=0.02, final=0.1),
    LRSchedule(shape="linear", warmup=0.01),
    LRSchedule(shape="wsd", warmup=0.02, decay_start=0.8),
    LRSchedule(shape="wsd", decay_start=0.8, decay_shape="exponential", final=0.1),
    LRSchedule(shape="steps", warmup=0.02, points=((0.5, 0.3), (0.8, 0.1))),
)
PARAMETERS = np.array([-3.0, 0.1, 0.5])
REMEMBERING = MEMORIES[1:]


def obvious(memory, schedule, at):
    """The definition, cell by cell of progress."""
    edges = np.linspace(0, 1, 20001)
    e = schedule.ratio(edges)
    area = np.concatenate([[0], np.cumsum((e[1:] + e[:-1]) / 2 / 20000)])
    tau, p, gamma = np.exp(PARAMETERS[0]), np.exp(PARAMETERS[1]), PARAMETERS[2]
    value = float(np.interp(at, edges, e))
    for i in np.flatnonzero((edges[:-1] >= schedule.warmup) & (edges[1:] <= at) & (np.diff(e) != 0)):
        before = max(area[i + 1], 0.01)
        if memory == "annealing-area":
            left = np.exp(-(at - edges[i + 1]) / before / tau)
        else:
            x = (np.interp(at, edges, area) - area[i + 1]) / before / tau
            if memory == "multi-power":
                x *= max(e[i + 1], 1e-3) ** -gamma
            left = (1 + x) ** -p
        value += (e[i] - e[i + 1]) * left
    return value


@pytest.mark.parametrize("memory", REMEMBERING)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.describe())
def test_effective_rate_agrees_with_the_definition_summed_cell_by_cell(memory, schedule):
    g = np.array([0.1, 0.3, 0.49, 0.52, 0.79, 0.85, 0.9, 1.0])
    value, _ = effective_rate(memory, PARAMETERS, locate(schedule, g, 5.0))
    slow = np.array([obvious(memory, schedule, at) for at in g])
    # .005 of the peak is 1e-3 nats of a term of 0.2 nats.
    np.testing.assert_allclose(value, slow, atol=0.005)


@pytest.mark.parametrize("memory", REMEMBERING)
def test_a_constant_rate_leaves_nothing_to_remember(memory):
    place = locate(LRSchedule(shape="constant", warmup=0.1), np.array([0.2, 1.0]), 1.0)
    value, slopes = effective_rate(memory, PARAMETERS, place)
    assert value.tolist() == [1.0, 1.0]
    assert not slopes.any()


@pytest.mark.parametrize("memory", REMEMBERING)
def test_after_a_drop_the_effective_rate_falls_from_the_old_rate_towards_the_new(memory):
    g = np.array([0.499, 0.501, 0.52, 0.6, 1.0])
    value, _ = effective_rate(memory, PARAMETERS, locate(LRSchedule(shape="steps", points=((0.5, 0.2),)), g, 1.0))
    assert value[0] == 1.0
    assert value[1] > 0.9
    assert np.all(np.diff(value) < 0)
    assert value[-1] > 0.2


@pytest.mark.parametrize("memory", REMEMBERING)
def test_a_memory_of_no_duration_is_the_rate_itself(memory):
    g = np.linspace(0.1, 1.0, 50)
    place = locate(SCHEDULES[0], g, 1.0)
    value, _ = effective_rate(memory, np.array([-14.0, 1.5, 0.5]), place)
    np.testing.assert_allclose(value, SCHEDULES[0].ratio(g), atol=5e-3)


@pytest.mark.parametrize("memory", REMEMBERING)
def test_derivatives_agree_with_finite_differences(memory):
    place = locate(SCHEDULES[0], np.linspace(0.1, 1.0, 9), 3.0)
    count = MEMORY_PARAMETERS[memory]
    _, slopes = effective_rate(memory, PARAMETERS, place)
    assert slopes.shape == (9, count)
    for i in range(count):
        step = np.zeros(3)
        step[i] = 1e-6
        above, below = (effective_rate(memory, PARAMETERS + sign * step, place)[0] for sign in (1, -1))
        np.testing.assert_allclose(slopes[:, i], (above - below) / 2e-6, rtol=1e-5, atol=1e-8)


def test_runs_joined_read_as_they_do_alone():
    g = np.linspace(0.1, 1.0, 5)
    alone = [locate(schedule, g, 2.0) for schedule in SCHEDULES]
    together, _ = effective_rate("multi-power", PARAMETERS, join(alone))
    apart = np.concatenate([effective_rate("multi-power", PARAMETERS, place)[0] for place in alone])
    np.testing.assert_allclose(together, apart, rtol=1e-14)


def test_area_counts_warm_up_by_half():
    place = locate(LRSchedule(shape="constant", warmup=0.2), np.array([0.2, 1.0]), 10.0)
    np.testing.assert_allclose(place.area, [1.0, 9.0], rtol=1e-4)
