"""The report is really drawn by a browser, in light and in dark."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

from trajectory_guard.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("shots", Path(__file__).with_name("tensorboard_screenshot.py"))
assert _spec is not None and _spec.loader is not None
shots = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shots)


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_report_fits_a_window_and_has_paper_and_ink_of_its_theme(tmp_path: Path, theme: str) -> None:
    browser = shots.find_browser()
    if browser is None:
        pytest.skip("no Chromium here")
    from matplotlib.image import imread

    fit, log = ROOT / "examples" / "fits" / "moe_tiny.json", ROOT / "examples" / "ladder" / "d32_seed4.csv"
    words = ["report", str(fit), str(log), "--active-params", "33952", "--tokens-per-step", "1792"]
    assert main([*words, "-o", str(tmp_path / "report.html")]) == 0
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={shots.WIDTH},{shots.HEIGHT}"]
    command += [f"--blink-settings=preferredColorScheme={int(theme == 'light')}"]
    command += [f"--screenshot={tmp_path / 'page.png'}", (tmp_path / "report.html").as_uri()]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pixels = imread(tmp_path / "page.png")[..., :3]
    assert pixels.shape[:2] == (shots.HEIGHT, shots.WIDTH)
    paper = pixels[5, 5].mean()
    assert paper > 0.9 if theme == "light" else paper < 0.2
    # Ink that differs from the paper: the page holds text, cards and the first figure.
    assert (abs(pixels.mean(axis=2) - paper) > 0.3).mean() > 0.01
