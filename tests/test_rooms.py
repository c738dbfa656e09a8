"""The house: a room imports only what stands to its left, and the numeric core knows no framework."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

ROOMS = (
    # What names nothing of ours but events, and the errors that carry one.
    ("_version", "detect.events", "detect.", "errors", "files", "conventions"),
    # The run and what it should be.
    ("lr_schedule", "recipe", "planned", "curve", "channel", "observation"),
    ("plan",),
    ("ladder", "logs."),
    ("manifest", "forecast"),
    ("laws.",),
    ("fit",),
    # What watches, knowing forecasts and not fits.
    ("actions", "paired", "expectation", "course"),
    ("standing",),
    ("sinks.",),
    ("journal", "watcher"),
    ("guard",),
    # What shows and what people call.
    ("picture", "fit_picture", "record"),
    ("commands", "replay"),
    ("report_figures", "report_page"),
    ("report", "add_tensorboard", "watch"),
    ("__main__",),
    # What knows torch.
    ("intake",),
    ("adapt",),
    ("integrations.",),
)
"""Rooms from left to right; a name that ends in a dot is a folder. `kernels/` stands on the errors alone."""

FRAMEWORKS = {"torch", "lightning", "pytorch_lightning", "transformers", "accelerate", "tensorboard", "wandb"}
HEAVY = FRAMEWORKS | {"matplotlib", "pandas"}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "trajectory_guard" else parts
    return ".".join(parts).removesuffix(".__init__") if parts != ("__init__",) else ""


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module imported, and whether at import time: not in a function, not for type checkers only."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import; write it absolutely"
                yield str(child.module), at_import
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                yield from walk(ast.Module(child.orelse, []), at_import)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, at_import and not inside)

    return walk(ast.parse(path.read_text()), True)


def room(module: str) -> int:
    for index, names in enumerate(ROOMS):
        if any(module == name or (name.endswith(".") and f"{module}.".startswith(name)) for name in names):
            return index
    raise AssertionError(f"{module} stands in no room; give it one in {Path(__file__).name}")


@pytest.mark.parametrize("path", sources("trajectory_guard", "integrations"), ids=name_of)
def test_a_room_imports_only_from_its_left(path: Path) -> None:
    name = name_of(path)
    if not name:  # trajectory_guard itself hands on the public names.
        return
    for module, _ in imports(path):
        if module.startswith("trajectory_guard."):
            imported = module.removeprefix("trajectory_guard.")
            assert room(imported) <= room(name), f"{name} imports {imported}, which stands to its right"


@pytest.mark.parametrize("path", sources("trajectory_guard/detect", "kernels"), ids=name_of)
def test_detectors_and_kernels_stand_on_nothing_of_ours(path: Path) -> None:
    own = name_of(path).split(".")[0]
    for module, _ in imports(path):
        if module.startswith("trajectory_guard."):
            imported = module.removeprefix("trajectory_guard.")
            assert imported.split(".")[0] == own or (own == "kernels" and imported == "errors"), module


def test_guard_and_fit_do_not_know_each_other() -> None:
    seen = {
        name_of(p): {m.removeprefix("trajectory_guard.") for m, _ in imports(p)} for p in sources("trajectory_guard")
    }

    def reached(name: str, found: set[str]) -> set[str]:
        for module in seen.get(name, set()) & set(seen) - found:
            reached(module, found | {module})
            found |= {module} | reached(module, found | {module})
        return found

    assert "fit" not in reached("guard", set()) and "guard" not in reached("fit", set())


@pytest.mark.parametrize("path", sources("trajectory_guard"), ids=name_of)
def test_nothing_heavy_is_loaded_by_an_import_of_the_core(path: Path) -> None:
    if name_of(path) == "intake":  # The first room that knows torch; nothing below imports it.
        return
    for module, at_import in imports(path):
        top = module.split(".")[0]
        assert not (at_import and top in HEAVY), f"{path.name} imports {module} when it is imported"


def test_only_intake_and_the_outlets_know_a_framework_at_all() -> None:
    knowing = {
        name_of(path)
        for path in sources("trajectory_guard")
        if any(module.split(".")[0] in FRAMEWORKS for module, _ in imports(path))
    }
    assert knowing <= {"intake", "sinks.tensorboard", "sinks.wandb", "sinks.loggers", "observation"}, knowing


def test_no_source_file_has_grown_too_long() -> None:
    long = {
        name_of(path): len(path.read_text().splitlines())
        for path in sources("trajectory_guard", "integrations", "kernels")
    }
    assert not {name: lines for name, lines in long.items() if lines > 350}
