"""The Custom Scalars tab is really drawn, by a real browser."""

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "tensorboard_screenshot", Path(__file__).with_name("tensorboard_screenshot.py")
)
assert _spec is not None and _spec.loader is not None
shots = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shots)


@pytest.mark.slow
def test_the_custom_scalars_tab_is_drawn(tmp_path: Path):
    browser = shots.find_browser()
    if browser is None:
        pytest.skip("no Chromium here")
    shots.write_demo(tmp_path / "run")
    picture = tmp_path / "tab.png"
    shots.screenshot(tmp_path / "run", picture, browser=browser)
    # An empty tab, only orange bar and grey, compresses to about 30 kB; three drawn charts are over 60 kB.
    assert picture.stat().st_size > 60_000
