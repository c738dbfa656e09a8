"""The interval of a forecast beyond a ladder, from the ladder's own back-tests."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import root_scalar
from scipy.special import ndtr

from trajectory_guard.errors import TrajectoryGuardError

__all__ = [
    "LEVELS",
    "IntervalModel",
    "NestedError",
    "early_factor",
    "fit_interval",
    "quantile",
    "size_distance",
]

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Levels at which a forecast's half-width is tabulated."""

K0, POWER, TAU, SIGMA, FLOOR = 0.0067, 0.59, 0.56, 0.43, 0.0006
"""Typical error at ln size ratio 1 (relative), its power in that, sd of its log between ladders and between targets of
one ladder, and the floor that reruns of one configuration leave. From 1,260 held-out targets of seven public ladder
families."""

ONE_SIZE_SCALE, ONE_SIZE_POWER, ONE_SIZE_FAMILIES = 0.0284, 1.24, 2
"""Ladders of one size: error level at ln size ratio 1, its power, and how many families of such ladders were forecast
beyond their own size (with errors of 1.5 and 4.6 % at ln ratios of 0.76 and 1.13). The power joins that level to the
80 % half-width of other ladders at d = 0.1: on its own size such a ladder is as good as any. From
tests/benchmarks/accuracy.py, which prints both numbers."""

SHRINK_LIMIT = 0.75
"""However well a ladder back-tests, its error level is not taken below this share of `K0`."""

CORRELATION = 0.5
"""Correlation between the back-tests of different targets of one ladder."""

U_MEAN, U_SD = 0.85, 0.53
"""Along one run, error / (its own scale) is about N(0.85, 0.53^2) in absolute value: it keeps one sign."""

EARLY = 0.05
"""Progress below which errors are larger: sqrt(1 + (0.05 / g)^2)."""


class NestedError(NamedTuple):
    """One back-test: the `fitted` smallest sizes forecast a larger one.

    target: index of the size forecast, counted from the smallest; distance: ln of the size ratio; error: rms over
    progress of ln(actual / forecast) / early_factor(g).
    """

    target: int
    distance: float
    error: float


def size_distance(target_params: float, largest_params: float) -> float:
    """Return ln(target / largest fitted active parameters), at least 0.1.

    Example:
        >>> round(size_distance(4e9, 1e9), 4), size_distance(1e9, 1e9)
        (1.3863, 0.1)
    """
    return max(math.log(target_params / largest_params), 0.1)


def early_factor(progress: ArrayLike) -> NDArray[np.float64]:
    """Return sqrt(1 + (0.05 / g)^2) for progress g of any shape: how much larger errors are early in training."""
    return np.sqrt(1.0 + (EARLY / np.asarray(progress, dtype=np.float64)) ** 2)


def quantile(level: float, spread: float) -> float:
    r"""Return the `level` quantile of |u| e^(s n) with u ~ N(0.85, 0.53^2), n ~ N(0, 1) and s = `spread`.

    Example:
        >>> round(quantile(0.8, (0.56**2 + 0.43**2) ** 0.5), 2)
        1.67
    """
    return _quantile(float(level), float(spread))


@functools.lru_cache(maxsize=256)
def _quantile(level: float, spread: float) -> float:
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()

    def excess(log_q: float) -> float:
        at = np.exp(log_q - spread * nodes)
        inside = ndtr((at - U_MEAN) / U_SD) - ndtr((-at - U_MEAN) / U_SD)
        return float(weights @ inside) - level

    return math.exp(root_scalar(excess, bracket=(-8.0, 8.0), xtol=1e-12).root)


@dataclass(frozen=True, kw_only=True)
class IntervalModel:
    """Half-width of ln(loss): q(level, spread) sqrt(floor^2 + (scale d^power)^2) early_factor(g).

    d is `size_distance` from the largest fitted size. Its coverage was tested like a promise, on families whose ladders
    it was not made from: the 80 % interval held 82 % of the points, the 95 % one 95 %. It does not cover a recipe that
    changes between rungs and target.

    Args:
        scale: error level k of this ladder, relative, at d = 1.
        spread: sd of ln k that is left, with the spread between targets.
        power: how errors grow with d.
        floor: error left at d = 0, relative.
        largest_params: active parameters of the largest fitted rung.
        backtests: number m of targets behind `scale`; 0 means that the ladder could not be back-tested.
    """

    scale: float
    spread: float
    power: float
    floor: float
    largest_params: float
    backtests: int

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not (0 <= value < math.inf) or (f.name == "largest_params" and value <= 0):
                raise TrajectoryGuardError(f"interval field `{f.name}` must be a finite number >= 0, got {value!r}")
        if self.spread > 3:
            raise TrajectoryGuardError(f"interval field `spread` must be at most 3, got {self.spread!r}")

    def half_width(self, params: float, progress: ArrayLike, level: float) -> NDArray[np.float64]:
        """Return the half-width of ln(loss) at each progress (any shape) for a run of `params` active parameters."""
        error = math.hypot(self.floor, self.scale * size_distance(params, self.largest_params) ** self.power)
        return quantile(level, self.spread) * error * early_factor(progress)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "IntervalModel":
        """Rebuild from `to_dict`.

        Raises:
            TrajectoryGuardError: a field is missing, unknown or out of range.
        """
        names = [f.name for f in fields(cls)]
        if sorted(content) != sorted(names):
            raise TrajectoryGuardError(f"an interval has the fields {names}, got {sorted(content)}")
        return cls(**content)


def fit_interval(errors: Sequence[NestedError], largest_params: float, *, sizes: int = 2) -> IntervalModel:
    """Set a ladder's interval from its nested back-tests, shrunk towards what ladders usually do.

        y_b = mean over fits of ln sqrt(error^2 + floor^2) - power ln d,  v = sigma^2 (1 + 0.5 (m - 1)) / m
        ln k = (ln k0 / tau^2 + mean(y_b) / v) / (1 / tau^2 + 1 / v),  k >= 0.75 k0
        spread^2 = 1 / (1 / tau^2 + 1 / v) + sigma^2

    Args:
        errors: one entry per fit of the j >= 2 smallest sizes and larger target; none for a ladder of two sizes.
        largest_params: active parameters of the largest rung of the full ladder.
        sizes: number of sizes in the ladder. One size says nothing of how loss falls with size: the error then grows
            faster with d, and as its level is the mean of n = 2 families only, spread^2 = tau^2 (1 + 1/n) + sigma^2.

    Example:
        >>> fit_interval([], 1e9).scale
        0.0067
    """
    if sizes == 1:
        spread = math.sqrt(TAU**2 * (1.0 + 1.0 / ONE_SIZE_FAMILIES) + SIGMA**2)
        return _model(ONE_SIZE_SCALE, spread, largest_params, 0, power=ONE_SIZE_POWER)
    targets = sorted({e.target for e in errors})
    if not targets:
        return _model(K0, math.hypot(TAU, SIGMA), largest_params, 0)
    per_target = [float(np.mean([_log_scale(e) for e in errors if e.target == target])) for target in targets]
    m = len(targets)
    variance = SIGMA**2 * (1.0 + CORRELATION * (m - 1)) / m
    precision = 1.0 / TAU**2 + 1.0 / variance
    log_scale = (math.log(K0) / TAU**2 + float(np.mean(per_target)) / variance) / precision
    scale = max(math.exp(log_scale), SHRINK_LIMIT * K0)
    return _model(scale, math.sqrt(1.0 / precision + SIGMA**2), largest_params, m)


def _log_scale(error: NestedError) -> float:
    return 0.5 * math.log(error.error**2 + FLOOR**2) - POWER * math.log(error.distance)


def _model(scale: float, spread: float, largest_params: float, backtests: int, power: float = POWER) -> IntervalModel:
    return IntervalModel(
        scale=scale, spread=spread, power=power, floor=FLOOR, largest_params=float(largest_params), backtests=backtests
    )
