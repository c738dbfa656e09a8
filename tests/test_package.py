"""The package as users get it: one top-level name, no framework at import, the same files in every kind of install."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
def test_the_wheel_alone_fits_and_forecasts_without_any_extra(wheel: Path, tmp_path: Path) -> None:
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
    # Torch is the first thing that a training loop's adapter misses here.
    code = "from trajectory_guard.integrations.lightning import TrajectoryGuardCallback"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert 'pip install "trajectory-guard[torch]"' in done.stderr
