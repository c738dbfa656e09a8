"""Three of the kills of tests/benchmarks/kill_nine.py, which says what must be equal after them."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("tensorboard")

_path = Path(__file__).resolve().parents[1] / "benchmarks" / "kill_nine.py"
_spec = importlib.util.spec_from_file_location("kill_nine", _path)
assert _spec is not None and _spec.loader is not None
kill_nine = sys.modules["kill_nine"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kill_nine)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_killed_three_times_goes_on_as_if_nothing_had_happened(tmp_path: Path):
    counted = kill_nine.check(3, tmp_path, seed=3)
    assert counted["kills"] == 3
    assert counted["points"] > 0
