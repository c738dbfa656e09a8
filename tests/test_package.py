"""The package as users get it: one top-level name, no framework at import, the same files in every kind of install."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trajectory_guard.errors import MissingExtraError

ROOT = Path(__file__).resolve().parent.parent

FRAMEWORKS = ("torch", "lightning", "pandas", "matplotlib", "tensorboard", "transformers", "wandb")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_importing_the_package_imports_no_framework() -> None:
    code = f"import sys, trajectory_guard; print([m for m in {FRAMEWORKS!r} if m in sys.modules])"
    assert run(sys.executable, "-c", code, cwd=ROOT).strip() == "[]"


def test_the_public_names_are_these() -> None:
    import trajectory_guard

    assert trajectory_guard.__all__ == [
        "ChannelCourse",
        "ChannelSeries",
        "DelphiFit",
        "DivergenceError",
        "Event",
        "Forecast",
        "LRSchedule",
        "Ladder",
        "LossCurve",
        "PairedReference",
        "PlannedChange",
        "Recipe",
        "RunPlan",
        "Rung",
        "Severity",
        "TrajectoryGuard",
        "TrajectoryGuardError",
        "Verdict",
        "__version__",
        "fit_ladder",
        "load_fit",
    ]
    assert all(hasattr(trajectory_guard, name) for name in trajectory_guard.__all__)


@pytest.mark.parametrize("folder", ["integrations", "kernels"])
def test_a_folder_at_the_top_does_not_claim_a_generic_name(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()
    assert not [path for path in (ROOT / folder).iterdir() if path.is_dir() and path.name != "__pycache__"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", out, ROOT, cwd=out)
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_the_tree_under_one_top_level_name(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"trajectory_guard"}
    expected = {"trajectory_guard/py.typed"}
    for folder, inside in (
        ("trajectory_guard", "trajectory_guard"),
        ("integrations", "trajectory_guard/integrations"),
        ("kernels", "trajectory_guard/kernels"),
    ):
        for suffix in ("*.py", "*.cu"):
            for path in (ROOT / folder).rglob(suffix):
                expected.add(f"{inside}/{path.relative_to(ROOT / folder).as_posix()}")
    assert names == expected


@pytest.mark.slow
def test_the_wheel_alone_fits_forecasts_guards_replays_and_watches_without_any_extra(
    wheel: Path, tmp_path: Path
) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", wheel, cwd=tmp_path)
    command = [python, "-m", "trajectory_guard"]
    run(*command, "fit", ROOT / "examples" / "ladder" / "manifest.toml", "-o", "fit.json", cwd=tmp_path)
    made, committed = (
        json.loads(path.read_text()) for path in (tmp_path / "fit.json", ROOT / "examples" / "fits" / "moe_tiny.json")
    )
    # Last digits may differ between processors and linear-algebra libraries; what was fitted may not.
    assert made["law"] == committed["law"]
    assert made["recipe"] == committed["recipe"]
    assert made["interval"] == pytest.approx(committed["interval"], rel=1e-3)
    for ending in ("csv", "jsonl"):
        log = write_log(tmp_path / f"run.{ending}")
        whole = [*command, "replay", "fit.json", log, "--plan", "plan.json"]
        assert "64 rows judged" in run(*whole, cwd=tmp_path)
        watching = [*command, "watch", "fit.json", log, "--plan", "plan.json", "--idle", "0", "--poll", "0"]
        assert "50/64" in run(*watching, cwd=tmp_path)
    run(*command, "forecast", "fit.json", "--plan", "plan.json", "-o", "forecast.csv", cwd=tmp_path)
    assert len((tmp_path / "forecast.csv").read_text().splitlines()) > 50
    guarding = "from trajectory_guard import *; guard = TrajectoryGuard(load_fit('fit.json').forecast(RunPlan.load("
    guarding += "'plan.json'))); print([guard.observe(step, 1.5).step for step in (1, 2, 3)])"
    assert run(python, "-c", guarding, cwd=tmp_path).strip() == "[1, 2, 3]"
    for extra, words in {
        "report": ["report", "fit.json", "run.csv", "--plan", "plan.json", "-o", "report.html"],
        "torch": ["replay", "fit.json", "board", "--plan", "plan.json"],
    }.items():
        (tmp_path / "board").mkdir(exist_ok=True)
        (tmp_path / "board" / "events.out.tfevents.1.host").write_bytes(b"")
        done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and f'pip install "trajectory-guard[{extra}]"' in done.stderr
    # Torch is the first thing that a training loop's adapter misses here.
    code = "from trajectory_guard.integrations.lightning import TrajectoryGuardCallback"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert 'pip install "trajectory-guard[torch]"' in done.stderr


def write_log(path: Path) -> Path:
    """Write a log of 64 steps, and beside it the plan of its run."""
    from trajectory_guard import RunPlan, load_fit

    largest = load_fit(ROOT / "examples" / "fits" / "moe_tiny.json").rungs[-1].plan
    content = {**largest.to_dict(), "total_steps": 64, "tokens_per_step": largest.total_tokens // 64}
    RunPlan.from_dict(content).save(path.with_name("plan.json"))
    rows = [{"step": step, "loss": 5.5 / step**0.3} for step in range(1, 65)]
    lines = [json.dumps(row) for row in rows]
    if path.suffix == ".csv":
        lines = ["step,loss", *(f"{row['step']},{row['loss']}" for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


MISSING = {
    # Package that is absent -> module of ours, what is done with it, the extra that is named.
    "torch": ("trajectory_guard.intake", "", "torch"),
    "lightning.pytorch": (
        "trajectory_guard.integrations.lightning",
        "TrajectoryGuardCallback('fit.json')",
        "lightning",
    ),
    "pytorch_lightning": ("trajectory_guard.integrations.lightning", "PLTrajectoryGuardCallback", "lightning"),
    "transformers.trainer_callback": ("trajectory_guard.integrations.transformers", "", "transformers"),
    "wandb": ("trajectory_guard.sinks.wandb", "WandbSink()", "wandb"),
    "torch.utils.tensorboard.writer": ("trajectory_guard.sinks.tensorboard", "TensorBoardSink('runs')", "torch"),
    "matplotlib": ("trajectory_guard.report", "ReportSink('report.html')", "report"),
}


@pytest.mark.parametrize("absent", MISSING)
def test_what_is_missing_says_its_pip_line(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, use, extra = MISSING[absent]
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(MissingExtraError, match=rf'pip install "trajectory-guard\[{extra}\]"'):
        exec(f"import {module} as it\nit.{use}" if use else f"import {module}", {})
