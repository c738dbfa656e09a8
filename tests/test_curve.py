import numpy as np
import pytest

from trajectory_guard.conventions import to_nats
from trajectory_guard.curve import LossCurve
from trajectory_guard.errors import TrajectoryGuardError

GOOD = {"step": [1, 2, 3], "tokens": [8, 16, 24], "loss": [3.0, 2.5, 2.0]}


def test_arrays_are_copied_and_read_only():
    loss = np.array([3.0, 2.5, 2.0])
    curve = LossCurve(**{**GOOD, "loss": loss})
    loss[0] = 99
    assert curve.loss[0] == 3.0
    with pytest.raises(ValueError, match="read-only"):
        curve.loss[0] = 1.0


def test_tokens_per_point_may_be_a_scalar():
    curve = LossCurve(**GOOD, tokens_per_point=8)
    assert curve.tokens_per_point is not None and curve.tokens_per_point.tolist() == [8, 8, 8]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"step": []}, "non-empty vector"),
        ({"step": [[1, 2, 3]]}, "non-empty vector"),
        ({"loss": [3.0, 2.0]}, r"loss has shape \(2,\), expected \(3,\)"),
        ({"loss": [3.0, float("nan"), 2.0]}, "1 values that are not finite, first nan at index 1"),
        ({"loss": [3.0, float("inf"), 2.0]}, "not finite"),
        ({"loss": [3.0, 0.0, 2.0]}, "positive nats"),
        ({"loss": [3.0, "x", 2.0]}, "must hold numbers"),
        ({"step": [1, 3, 3]}, "step must rise strictly, but does not after index 1"),
        ({"step": [1, 1.5, 2]}, "whole|rise strictly"),
        ({"step": [-1, 2, 3]}, "step"),
        ({"tokens": [8, 16, 8]}, "tokens must rise strictly"),
        ({"lr": [0.1, float("nan"), 0.1]}, "lr holds 1 values"),
    ],
)
def test_bad_curves_are_refused_naming_array_and_place(fields, words):
    with pytest.raises(TrajectoryGuardError, match=words):
        LossCurve(**{**GOOD, **fields})


def test_units_convert_to_nats():
    np.testing.assert_allclose(to_nats([2.0], "bits"), [2 * np.log(2)])
    np.testing.assert_allclose(to_nats([np.e**2], "perplexity"), [2.0])
    assert to_nats(1.5, "nats") == 1.5
    with pytest.raises(TrajectoryGuardError, match="loss unit must be one of"):
        to_nats([1.0], "hartleys")  # pyright: ignore[reportArgumentType]
