"""Watch a training run's loss against a forecast of its whole loss curve."""

from pathlib import Path as _Path

from trajectory_guard._version import __version__
from trajectory_guard.channel import ChannelCourse, ChannelSeries
from trajectory_guard.curve import LossCurve
from trajectory_guard.detect.events import Event, Severity, Verdict
from trajectory_guard.errors import DivergenceError, TrajectoryGuardError
from trajectory_guard.fit import DelphiFit, fit_ladder, load_fit
from trajectory_guard.forecast import Forecast
from trajectory_guard.guard import TrajectoryGuard
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.paired import PairedReference
from trajectory_guard.plan import RunPlan
from trajectory_guard.planned import PlannedChange
from trajectory_guard.recipe import Recipe

__all__ = [
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

# In a checkout, integrations/ and kernels/ stand beside this package and not inside it; an installed package has them
# inside. Extending __path__ lets `trajectory_guard.kernels` be found in both.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "integrations").is_dir():
    __path__.append(str(_root))
