import numpy as np
import pytest

from trajectory_guard.curve import LossCurve
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.laws.backtest import BacktestRow, backtest_law, format_backtest, score
from trajectory_guard.laws.progress import MatchedProgress
from trajectory_guard.laws.registry import get_law, law_names


def test_nested_rows_never_fit_anything_larger_than_the_target(synthetic_ladder):
    made = backtest_law(MatchedProgress, synthetic_ladder)
    nested = [(row.target, row.fitted) for row in made.rows if row.kind == "nested"]
    assert nested == [
        ("n25000", ("n10000", "n16000")),
        ("n40000", ("n10000", "n16000")),
        ("n40000", ("n10000", "n16000", "n25000")),
    ]
    assert made.interval is not None and made.interval.backtests == 2


def test_every_rung_is_left_out_once(synthetic_ladder):
    rows = [row for row in backtest_law(MatchedProgress, synthetic_ladder).rows if row.kind == "leave-out"]
    assert sorted(row.target for row in rows) == ["n10000", "n16000", "n25000", "n40000"]
    assert all(row.target not in row.fitted and len(row.fitted) == 3 for row in rows)


def test_errors_are_small_on_a_clean_ladder_and_grow_with_a_broken_rung(synthetic_rung):
    rungs = [synthetic_rung(n) for n in (1e4, 1.6e4, 2.5e4, 4e4)]
    clean = backtest_law(MatchedProgress, Ladder(rungs=tuple(rungs)))
    (curve,) = rungs[1].curves
    off = LossCurve(step=curve.step, tokens=curve.tokens, loss=1.05 * curve.loss)
    rungs[1] = Rung(name=rungs[1].name, plan=rungs[1].plan, curves=(off,))
    broken = backtest_law(MatchedProgress, Ladder(rungs=tuple(rungs)))
    assert score(clean) < 0.6
    assert score(broken) > 3 * score(clean)
    assert broken.interval is not None and clean.interval is not None
    assert broken.interval.scale > clean.interval.scale


def test_two_rungs_have_no_back_test_and_the_widest_interval(synthetic_rung):
    made = backtest_law(MatchedProgress, Ladder(rungs=(synthetic_rung(1e4), synthetic_rung(4e4))))
    assert made.rows == ()
    assert made.interval is not None and made.interval.backtests == 0
    assert np.isnan(score(made))


def test_a_law_that_cannot_fit_says_why(synthetic_rung):
    made = backtest_law(MatchedProgress, Ladder(rungs=(synthetic_rung(),)))
    assert made.refused is not None and "at least two rungs" in made.refused
    assert made.interval is None and score(made) == float("inf")


def test_a_rung_cut_short_has_no_final_error(synthetic_rung):
    rungs = [synthetic_rung(n) for n in (1e4, 1.6e4, 2.5e4)] + [synthetic_rung(4e4, until=0.7)]
    rows = backtest_law(MatchedProgress, Ladder(rungs=tuple(rungs))).rows
    assert [row.final_percent for row in rows if row.target == "n40000"] == [None, None, None]


def test_the_table_names_every_row_and_rows_survive_json(synthetic_ladder):
    rows = backtest_law(MatchedProgress, synthetic_ladder).rows
    lines = format_backtest(rows).splitlines()
    assert len(lines) == len(rows) + 1
    assert all(row.target in line for row, line in zip(rows, lines[1:], strict=True))
    assert [BacktestRow.from_dict(row.to_dict()) for row in rows] == list(rows)


def test_the_registry_knows_its_laws_by_name():
    assert law_names()[0] == "matched-progress"
    for name in law_names():
        assert get_law(name).name == name
    with pytest.raises(ValueError, match="no law is called 'tea-leaves'"):
        get_law("tea-leaves")
