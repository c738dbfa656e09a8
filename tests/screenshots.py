"""Draw a tab of TensorBoard or a report in headless Chromium, as a PNG of 1400 x 900, or a report as printed, as PDF.

python tests/screenshots.py LOGDIR picture.png --tab scalars
python tests/screenshots.py --demo picture.png               # a made-up run with an excursion
python tests/screenshots.py report.html picture.png --theme dark --height 3400
python tests/screenshots.py report.html printed.pdf
"""

import argparse
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

WIDTH, HEIGHT = 1400, 900
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars")
QUIET += ("--disable-background-networking", "--disable-component-update", "--disable-sync")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str | None:
    """Path of a Chromium, or None."""
    return next((path for name in CHROMIUM if (path := shutil.which(name))), None)


def write_demo(folder: Path) -> None:
    """Log a run of 2,000 steps that leaves its forecast at step 1,400, through the real guard."""
    from trajectory_guard.forecast import Forecast
    from trajectory_guard.guard import TrajectoryGuard
    from trajectory_guard.lr_schedule import LRSchedule
    from trajectory_guard.plan import RunPlan
    from trajectory_guard.sinks.tensorboard import TensorBoardSink

    plan = RunPlan(
        total_steps=2000,
        tokens_per_step=4096,
        active_params=69_360,
        schedule=LRSchedule(shape="linear", warmup=0.03),
    )
    progress = [0.05 + 0.95 * i / 200 for i in range(201)]
    loss = [1.2 + 1.1 * g**-0.2 for g in progress]
    table = Forecast(plan, progress=progress, loss=loss, half_widths={0.8: 0.01, 0.95: 0.02}, law="demonstration")
    noise = random.Random(7)
    with TrajectoryGuard(table, sinks=[TensorBoardSink(folder)], log_every_n_steps=10) as guard:
        for step in range(1, 2001):
            expected = 1.2 + 1.1 * max(step / 2000, 0.01) ** -0.2
            shift = 1.0 if step < 1400 else 1.05
            loss = expected * shift * math.exp(noise.gauss(0.0, 0.012))
            guard.observe(step, loss, channels={"grad_norm": 0.3 * math.exp(noise.gauss(0.0, 0.2))})


def draw_page(
    url: str, picture: Path, *, browser: str, theme: str = "light", height: int = HEIGHT, wait_s: float = 90.0
) -> None:
    """Open a page and save what it shows as PNG, or as it prints where `picture` ends in `.pdf`."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *QUIET, f"--window-size={WIDTH},{height}", f"--user-data-dir={profile}"]
        command += [f"--blink-settings=preferredColorScheme={int(theme == 'light')}"]
        # Virtual time runs on while requests are open, so charts are drawn when it is spent.
        command += ["--virtual-time-budget=30000"]
        if picture.suffix == ".pdf":
            command += ["--no-pdf-header-footer", f"--print-to-pdf={picture.resolve()}"]
        else:
            command += [f"--screenshot={picture.resolve()}"]
        subprocess.run(
            [*command, url], check=True, timeout=wait_s, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def draw_tab(
    logdir: Path,
    picture: Path,
    *,
    browser: str,
    tab: str = "custom_scalars",
    height: int = HEIGHT,
    wait_s: float = 90.0,
) -> None:
    """Serve `logdir` with TensorBoard, open `tab` in a headless browser and save what it shows."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tensorboard.main", f"--logdir={logdir}", f"--port={port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_until_served(f"http://127.0.0.1:{port}/data/runs", wait_s)
        draw_page(f"http://127.0.0.1:{port}/#{tab}", picture, browser=browser, height=height, wait_s=wait_s)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)


def _wait_until_served(url: str, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.read() not in (b"", b"[]", b"[]\n"):
                    return
        except (urllib.error.URLError, OSError):
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"TensorBoard did not serve {url} within {wait_s:g} s")
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path, help="log folder, or report (.html)")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--demo", action="store_true", help="log a made-up run first")
    parser.add_argument("--tab", default="custom_scalars", help="custom_scalars, timeseries, scalars or text")
    parser.add_argument("--theme", choices=("light", "dark"), default="light", help="of a report")
    parser.add_argument("--height", type=int, default=HEIGHT)
    arguments = parser.parse_args()
    browser = find_browser()
    if browser is None:
        sys.exit(f"no browser found; install one of {', '.join(CHROMIUM)}")
    source, picture, height = arguments.source, arguments.picture, arguments.height
    if source is not None and source.suffix == ".html":
        draw_page(source.resolve().as_uri(), picture, browser=browser, theme=arguments.theme, height=height)
    else:
        with tempfile.TemporaryDirectory() as folder:
            if arguments.demo or source is None:
                source = Path(folder)
                write_demo(source)
            draw_tab(source, picture, browser=browser, tab=arguments.tab, height=height)
    print(picture)


if __name__ == "__main__":
    main()
