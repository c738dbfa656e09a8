import pytest

from trajectory_guard.curve import LossCurve
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.laws.progress import MatchedProgress
from trajectory_guard.laws.trend import off_trend

SIZES = (1e4, 1.6e4, 2.5e4, 4e4, 6e4)


def scaled(rung: Rung, factor: float) -> Rung:
    curves = tuple(LossCurve(step=c.step, tokens=c.tokens, loss=factor * c.loss) for c in rung.curves)
    return Rung(name=rung.name, plan=rung.plan, curves=curves)


@pytest.mark.parametrize("odd", [1, 2, 3])
@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_the_odd_rung_is_named_with_both_forecasts(synthetic_rung, odd, factor):
    rungs = [synthetic_rung(n, noise=0.02) for n in SIZES]
    rungs[odd] = scaled(rungs[odd], factor)
    said = off_trend(MatchedProgress, Ladder(rungs=tuple(rungs)))
    assert said is not None and f"'{rungs[odd].name}' lies off the trend: {'+' if factor > 1 else '-'}" in said
    assert "1.2e+05 active parameters" in said and "without it" in said


def test_a_sound_ladder_has_no_odd_rung(synthetic_rung, hero):
    assert off_trend(MatchedProgress, Ladder(rungs=tuple(synthetic_rung(n, noise=0.05) for n in SIZES))) is None
    assert off_trend(MatchedProgress, hero.ladder) is None


def test_three_rungs_cannot_tell_the_odd_one(synthetic_rung):
    rungs = (synthetic_rung(1e4), scaled(synthetic_rung(2e4), 1.1), synthetic_rung(4e4))
    assert off_trend(MatchedProgress, Ladder(rungs=rungs)) is None
