"""ChannelSeries and ChannelCourse: tables of a scalar that may have any sign."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajectory_guard.channel import ChannelCourse, ChannelSeries
from trajectory_guard.errors import TrajectoryGuardError

VALUES = st.floats(-1e6, 1e6)


@given(st.lists(VALUES, min_size=1, max_size=8), st.floats(0.0, 1.5))
def test_a_course_reads_between_its_points_and_holds_on_after_them(values, at):
    progress = np.linspace(0.2, 0.9, len(values))
    read = float(ChannelCourse(progress=progress, value=values, logarithmic=False).at(np.array([at]))[0])
    if at < 0.2:
        assert math.isnan(read)
    elif at >= progress[-1]:
        assert read == values[-1]
    else:
        assert min(values) <= read <= max(values)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"progress": []}, "non-empty vector"),
        ({"progress": [0.5, 0.5]}, "must rise strictly"),
        ({"progress": [0.5]}, "must rise strictly, with one value each"),
        ({"progress": [-0.1, 0.5]}, "within"),
        ({"progress": [0.5, 1.1]}, "within"),
        ({"value": [1.0, math.nan]}, "finite"),
        ({"value": [1.0, "x"]}, "must hold numbers"),
        ({"value": [[1.0, 2.0]]}, "vector"),
        ({"value": [1.0, 0.0]}, "logarithmic=False"),
        ({"error": -0.1}, "must not be negative"),
        ({"error": math.inf}, "must not be negative"),
    ],
)
def test_a_wrong_course_is_refused(fields, words):
    with pytest.raises(TrajectoryGuardError, match=words):
        ChannelCourse(**{"progress": [0.1, 1.0], "value": [1.0, 2.0], **fields})


def test_a_series_takes_any_sign_and_is_read_only():
    series = ChannelSeries(step=[0, 5], value=[-1.0, 0.0])
    with pytest.raises(ValueError, match="read-only"):
        series.value[0] = 1.0
    with pytest.raises(TrajectoryGuardError, match="step of a channel must rise"):
        ChannelSeries(step=[5, 5], value=[1.0, 2.0])
