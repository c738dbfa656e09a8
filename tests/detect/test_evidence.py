"""The certified test against a slow reference, and its promise on short simulations."""

import math

import numpy as np
import pytest

from trajectory_guard.detect.evidence import ALARM, BETS, CAP, VARIANCE, Evidence


def reference(values: list[float]) -> list[float]:
    """The definition, written out."""
    masses = [0.0] * len(BETS)
    statistics = []
    for z in values:
        for i, bet in enumerate(BETS):
            a = bet * min(z, 4.0)
            gain = 1 + a + a * a / 2 if a >= 0 else 1 / (1 - a + a * a / 2)
            masses[i] = min(CAP, (masses[i] + 1) * math.exp(-(bet**2) * VARIANCE / 2) * gain)
        statistics.append(sum(masses) / len(BETS))
    return statistics


@pytest.mark.parametrize("mean", [0.3, 1.0, 3.0])
def test_under_a_change_it_follows_its_definition(mean):
    values = (mean + 0.5 * np.random.default_rng(0).standard_normal(200)).tolist()
    evidence = Evidence()
    found = [evidence.update(z) for z in values]
    expected = reference(values)
    # Evidence below 2 may be dropped; what grows from there is the same but for that.
    assert math.log(found[-1]) == pytest.approx(math.log(expected[-1]), abs=0.5)
    assert all(a <= b * (1 + 1e-9) for a, b in zip(found, expected, strict=True))


def test_a_step_of_the_bound_holds_for_any_noise_of_mean_zero():
    # E[G(lambda z)] <= exp(lambda^2 v / 2) is what the proof needs; two-point noises are the worst ones.
    for bet in BETS:
        for up in (0.5, 1.0, 2.0, 4.0, 10.0):
            down = VARIANCE / up
            chance = down / (up + down)

            def gain(z, bet=bet):
                a = bet * min(z, 4.0)
                return 1 + a + a * a / 2 if a >= 0 else 1 / (1 - a + a * a / 2)

            mean = chance * gain(up) + (1 - chance) * gain(-down)
            assert mean <= math.exp(bet**2 * VARIANCE / 2)


def test_no_alarm_with_the_mean_at_the_gate():
    rng = np.random.default_rng(0)
    evidence = Evidence()
    noise = np.concatenate([rng.standard_t(3, 50_000), np.exp(rng.standard_normal(50_000)) - math.exp(0.5)])
    assert max(evidence.update(z) for z in noise.tolist()) < ALARM


@pytest.mark.parametrize("block", [1, 7, 32])
def test_settled_in_blocks_it_follows_its_definition_and_dropping_only_lowers_it(block):
    rng = np.random.default_rng(block)
    for shift in (0.2, -0.3):
        values = (rng.standard_normal(50 * block) + shift).tolist()
        evidence, settled = Evidence(), []
        for start in range(0, len(values), block):
            evidence.pending.extend(values[start : start + block])
            settled.append(evidence.settle())
        expected = reference(values)[block - 1 :: block]
        assert all(0.0 <= found <= most * (1 + 1e-9) for found, most in zip(settled, expected, strict=True))
        if shift > 0.0 and block == 32:
            assert settled[-1] == pytest.approx(expected[-1])


def test_it_stays_finite_and_comes_back():
    evidence = Evidence()
    for _ in range(5000):
        evidence.update(50.0)
    assert evidence.statistic <= CAP
    for _ in range(300):
        evidence.update(-2.0)
    assert evidence.statistic < 1.0
