"""TensorBoard's tabs and the report are really drawn, by a real browser."""

import importlib.util
from pathlib import Path

import pytest

from trajectory_guard.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("screenshots", Path(__file__).with_name("screenshots.py"))
assert _spec is not None and _spec.loader is not None
shots = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shots)

pytestmark = pytest.mark.slow


@pytest.fixture
def browser() -> str:
    found = shots.find_browser()
    if found is None:
        pytest.skip("no Chromium here")
    return found


@pytest.fixture
def report(tmp_path: Path) -> Path:
    fit, log = ROOT / "examples" / "fits" / "moe_tiny.json", ROOT / "examples" / "ladder" / "d32_seed4.csv"
    words = ["report", str(fit), str(log), "--active-params", "33952", "--tokens-per-step", "1792"]
    assert main([*words, "-o", str(tmp_path / "report.html")]) == 0
    return tmp_path / "report.html"


def test_every_card_of_the_custom_scalars_tab_is_drawn(tmp_path: Path, browser: str) -> None:
    from matplotlib.image import imread

    shots.write_demo(tmp_path / "run")
    shots.draw_tab(tmp_path / "run", tmp_path / "tab.png", browser=browser, height=1250)
    pixels = imread(tmp_path / "tab.png")[..., :3]
    # Curves and bands of the run's colour, orange, below TensorBoard's bar of another orange: in two columns and
    # three rows, of which the last has one card.
    orange = (pixels[..., 0] > 0.85) & (pixels[..., 2] < 0.8) & (pixels[..., 0] - pixels[..., 2] > 0.1)
    rows = [slice(130, 350), slice(440, 660), slice(745, 965)]
    seen = [[orange[row, column].sum() > 300 for column in (slice(420, 720), slice(770, 1070))] for row in rows]
    assert seen == [[True, True], [True, True], [True, False]]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_report_fits_a_window_and_has_paper_and_ink_of_its_theme(
    tmp_path: Path, browser: str, report: Path, theme: str
) -> None:
    from matplotlib.image import imread

    shots.draw_page(report.as_uri(), tmp_path / "page.png", browser=browser, theme=theme)
    pixels = imread(tmp_path / "page.png")[..., :3]
    assert pixels.shape[:2] == (shots.HEIGHT, shots.WIDTH)
    paper = pixels[5, 5].mean()
    assert paper > 0.9 if theme == "light" else paper < 0.2
    # Ink that differs from the paper: the page holds text, cards and the first figure.
    assert (abs(pixels.mean(axis=2) - paper) > 0.3).mean() > 0.01


def test_the_report_prints_on_few_pages(tmp_path: Path, browser: str, report: Path) -> None:
    shots.draw_page(report.as_uri(), tmp_path / "printed.pdf", browser=browser)
    printed = (tmp_path / "printed.pdf").read_bytes()
    assert printed.startswith(b"%PDF") and 1 <= printed.count(b"/Type /Page\n") <= 4
