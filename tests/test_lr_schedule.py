import numpy as np
import pytest

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.lr_schedule import LRSchedule

SHAPES = [
    LRSchedule(shape="constant", warmup=0.1),
    LRSchedule(shape="linear", warmup=0.1, final=0.2),
    LRSchedule(shape="cosine", warmup=0.1, final=0.1),
    *(LRSchedule(shape="wsd", warmup=0.1, decay_start=0.8, decay_shape=d) for d in ("linear", "1-sqrt", "cosine")),
    LRSchedule(shape="wsd", decay_start=0.8, decay_shape="exponential", final=0.01),
    LRSchedule(shape="steps", warmup=0.1, points=((0.5, 0.3), (0.8, 0.1))),
    LRSchedule(shape="table", points=((0.0, 0.0), (0.1, 1.0), (1.0, 0.5))),
]


@pytest.mark.parametrize("schedule", SHAPES, ids=lambda s: s.describe())
def test_every_shape_stays_in_range_and_survives_json(schedule):
    ratio = schedule.ratio(np.linspace(-0.1, 1.1, 500))
    assert np.all((ratio >= 0) & (ratio <= 1))
    assert LRSchedule.from_dict(schedule.to_dict()) == schedule


@pytest.mark.parametrize(
    ("schedule", "at", "expected"),
    [
        (SHAPES[0], [0.05, 0.1, 1.0], [0.5, 1.0, 1.0]),
        (SHAPES[1], [0.1, 0.55, 1.0], [1.0, 0.6, 0.2]),
        (SHAPES[2], [0.1, 0.55, 1.0], [1.0, 0.55, 0.1]),
        (SHAPES[3], [0.5, 0.9, 1.0], [1.0, 0.5, 0.0]),
        (SHAPES[4], [0.8, 0.85, 1.0], [1.0, 0.5, 0.0]),
        (SHAPES[6], [0.8, 0.9, 1.0], [1.0, 0.1, 0.01]),
        (SHAPES[7], [0.4999, 0.5, 0.79, 0.9], [1.0, 0.3, 0.3, 0.1]),
        (SHAPES[8], [0.05, 0.55], [0.5, 0.75]),
    ],
)
def test_shapes_follow_their_formulas(schedule, at, expected):
    np.testing.assert_allclose(schedule.ratio(at), expected, atol=1e-12)


def test_an_exponential_decay_to_zero_is_cut_at_a_thousandth():
    schedule = LRSchedule(shape="wsd", decay_start=0.5, decay_shape="exponential")
    assert schedule.ratio(1.0) == pytest.approx(1e-3)


def test_distance_ignores_warmup_and_sees_another_shape():
    linear = LRSchedule(shape="linear", warmup=0.01)
    assert linear.distance(LRSchedule(shape="table", points=((0.0, 1.0), (0.01, 1.0), (1.0, 0.0)))) < 0.02
    assert linear.distance(LRSchedule(shape="cosine", warmup=0.01)) > 0.1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shape": "saw"}, "schedule shape must be one of"),
        ({"shape": "cosine", "warmup": 1.0}, r"warmup must lie in \[0, 1\), got 1.0"),
        ({"shape": "cosine", "warmup": float("nan")}, "warmup"),
        ({"shape": "cosine", "warmup": "1 %"}, "warmup"),
        ({"shape": "cosine", "final": 2.0}, "final"),
        ({"shape": "cosine", "decay_start": 0.5}, "decay_start belongs to shape 'wsd'"),
        ({"shape": "wsd"}, "decay_start belongs to shape 'wsd'"),
        ({"shape": "wsd", "decay_start": 0.05, "warmup": 0.1}, "decay_start must lie"),
        ({"shape": "wsd", "decay_start": 0.5, "decay_shape": "log"}, "decay_shape must be one of"),
        ({"shape": "steps"}, "points belong to"),
        ({"shape": "linear", "points": ((0.1, 1.0),)}, "points belong to"),
        ({"shape": "table", "points": ((0.5, 1.0), (0.5, 0.5))}, "strictly rising"),
        ({"shape": "table", "points": ((0.5, -1.0),)}, ">= 0"),
        ({"shape": "table", "points": ((0.5, "x"),)}, "pairs of numbers"),
        ({"shape": "table", "points": ((0.5,),)}, "pairs of numbers"),
    ],
)
def test_bad_parameters_are_refused(fields, words):
    with pytest.raises(TrajectoryGuardError, match=words):
        LRSchedule(**fields)


@pytest.mark.parametrize("content", [{}, {"shape": "linear", "peak": 1}, {"shape": "table", "points": [1, 2]}])
def test_bad_mappings_are_refused(content):
    with pytest.raises(TrajectoryGuardError):
        LRSchedule.from_dict(content)
