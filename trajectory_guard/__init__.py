"""Watch a training run's loss against a forecast of its whole loss curve."""

from pathlib import Path as _Path

from trajectory_guard._version import __version__

__all__ = ["__version__"]

# In a checkout, integrations/ and kernels/ stand beside this package and not inside it. An installed package has
# them inside. Extending __path__ lets `trajectory_guard.kernels` be found in both.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "integrations").is_dir():
    __path__.append(str(_root))
