"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public ladders and logs; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("TRAJECTORY_GUARD_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"public data not found at {folder}; set TRAJECTORY_GUARD_DATA to its folder")
    return folder
