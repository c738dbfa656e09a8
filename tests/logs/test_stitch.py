"""Pure functions of the log readers, against slow obvious versions and closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajectory_guard.logs.stitch import (
    first_loss_unit,
    largest_gap,
    numbering_offset,
    residual_autocorrelation,
    steps_at_tokens,
    stitch,
    tokens_per_point,
)
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan

PLAN = RunPlan(
    total_steps=100, tokens_per_step=((1, 10), (51, 30)), active_params=1e6, schedule=LRSchedule(shape="constant")
)


def by_replaying(steps: list[int]) -> list[int]:
    """What a run that throws away everything from a step on when it comes back to it keeps."""
    kept: list[int] = []
    for row, step in enumerate(steps):
        kept = [k for k in kept if steps[k] < step]
        kept.append(row)
    return kept


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 15)), min_size=1, max_size=6))
def test_restarts_keep_what_a_replay_would_keep(attempts: list[tuple[int, int]]) -> None:
    steps = [step for start, length in attempts for step in range(start, start + length)]
    parts = stitch(steps)
    if not parts.resorted:
        assert parts.rows.tolist() == by_replaying(steps)
    assert len(parts.rows) + parts.superseded + parts.duplicates == len(steps)
    assert np.all(np.diff(np.array(steps)[parts.rows]) > 0)


def test_superseded_steps_beyond_the_new_attempts_end_are_dropped() -> None:
    parts = stitch([*range(1, 101), *range(51, 61)])
    assert np.array([*range(1, 101), *range(51, 61)])[parts.rows].tolist() == list(range(1, 61))
    assert parts.restarts == ((100.0, 51.0),)
    assert (parts.superseded, parts.duplicates) == (50, 0)


def test_last_duplicate_of_a_step_counts() -> None:
    parts = stitch([1, 2, 2, 3])
    assert parts.rows.tolist() == [0, 2, 3]
    assert (parts.superseded, parts.duplicates) == (0, 1)


@pytest.mark.parametrize("steps", [[5, 4, 3, 2, 1], [1, 2, 4, 3, 5], [3, 1, 5, 2, 4]])
def test_rows_out_of_order_are_sorted(steps: list[int]) -> None:
    parts = stitch(steps)
    assert parts.resorted and [steps[row] for row in parts.rows] == sorted(steps)


def test_restart_off_the_grid_is_no_disorder() -> None:
    parts = stitch([10, 20, 30, 40, 50, 60, 33, 43, 53])
    assert not parts.resorted
    assert parts.rows.tolist() == [0, 1, 2, 6, 7, 8]


def test_purge_voids_steps_that_the_new_attempt_does_not_reach() -> None:
    assert stitch([10, 20, 30, 40], purges=((3, 15),)).rows.tolist() == [0, 3]


@given(st.integers(1, 160))
def test_steps_at_tokens_inverts_the_plan_past_its_horizon_too(step: int) -> None:
    assert float(steps_at_tokens(PLAN.tokens(step), PLAN)) == pytest.approx(step)


def test_numbering() -> None:
    assert numbering_offset([0, 1, 2], split="train") == 1
    assert numbering_offset([0, 1, 2], split="train", tokens_at_zero=0.0) == 0
    assert numbering_offset([0, 100, 200], split="validation") == 0
    assert numbering_offset([99, 199, 299], split="validation") == 1
    assert numbering_offset([1, 2, 3], split="train") == 0


def test_tokens_per_point_of_window_means_cover_the_tokens_once() -> None:
    step = np.array([10, 20, 60, 100])
    assert tokens_per_point(step, PLAN, window_mean=True).sum() == PLAN.total_tokens
    assert tokens_per_point(step, PLAN, window_mean=False).tolist() == [10, 10, 30, 30]


def test_gap_is_found_and_regular_logs_have_none() -> None:
    assert largest_gap(range(0, 1000, 10)) is None
    assert largest_gap([*range(0, 500, 10), *range(700, 1000, 10)]) == (490, 700)


@pytest.mark.parametrize("count", [200, 2000])
def test_smoothing_shows_and_trend_and_spikes_do_not(count: int) -> None:
    rng = np.random.default_rng(0)
    g = np.arange(1, count + 1) / count
    raw = 2.0 + g**-0.3 + 0.02 * rng.standard_normal(count)
    ema = [raw[0]]
    for value in raw[1:]:
        ema.append(0.9 * ema[-1] + 0.1 * value)
    raw[count // 2] += 3.0
    plain, smoothed = residual_autocorrelation(raw), residual_autocorrelation(ema)
    assert plain is not None and abs(plain) < 0.2
    assert smoothed is not None and smoothed > 0.4


def test_first_loss_tells_its_unit() -> None:
    entropy = math.log(50257)
    assert first_loss_unit(entropy * 1.02, 50257) == "nats"
    assert first_loss_unit(entropy / math.log(2), 50257) == "bits"
    assert first_loss_unit(50257 * 1.1, 50257) == "perplexity"
    assert first_loss_unit(entropy * 8, 50257) is None
