"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def module_names() -> list[str]:
    names = []
    for folder, package in (
        ("trajectory_guard", "trajectory_guard"),
        ("integrations", "trajectory_guard.integrations"),
        ("kernels", "trajectory_guard.kernels"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if parts[-1] != "__main__":
                names.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return names


@pytest.mark.parametrize("name", module_names())
def test_examples_in_docstrings_print_what_they_say(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0
