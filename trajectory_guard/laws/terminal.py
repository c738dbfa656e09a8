"""Terminal law: the final loss of compute-optimal runs against compute, and the size and tokens that reach it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Ladder
from trajectory_guard.laws.floor import fit_floor, likely_floor, straightest_floor
from trajectory_guard.laws.interval import IntervalModel, NestedError, early_factor, fit_interval, size_distance
from trajectory_guard.laws.isoflop import IsoFlop, fit_power, isoflop_optima
from trajectory_guard.plan import RunPlan

__all__ = ["Recommendation", "TerminalFit"]

Array = NDArray[np.float64]

FREE_FLOOR = 5
"""A ladder of fewer budgets has its floor set with the prior: three losses fit any floor."""

BOOTSTRAPS = 2000
SEED = 20240501


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What a ladder recommends for one compute budget.

    Args:
        compute: FLOPs of the planned run.
        params: parameters, params_0 C^a.
        tokens: training tokens, tokens_0 C^b.
        loss: loss to expect at the end of training, in nats.
        interval: level -> (lower, upper) of that loss.
        bootstrap: 5 and 95 % quantiles of the loss when the optima are resampled; not an interval (it knows no error of
            the law), shown for its width.
        sensitivity: (floor, loss, rms of the fit) for floors around the fitted one.
        reach: compute over the largest budget of the ladder.
    """

    compute: float
    params: float
    tokens: float
    loss: float
    interval: Mapping[float, tuple[float, float]]
    bootstrap: tuple[float, float]
    sensitivity: tuple[tuple[float, float, float], ...]
    reach: float


class TerminalFit:
    """The terminal law of a ladder: L*(C) = E + A C^-alpha with the token and parameter laws of its optima.

    Args:
        optima: one per compute budget, at least three (two with a pinned floor).
        floor: E where it is pinned by the caller; None to fit it.

    Example:
        >>> optima = [IsoFlop(compute=c, tokens=c**0.57, params=c**0.4, loss=1.5 + 100 * c**-0.1, quadratic=None,
        ...                   inside=True, runs=1) for c in (1e18, 1e19, 1e20, 1e21)]
        >>> fit = TerminalFit(optima)
        >>> round(fit.alpha, 6), round(float(fit.expect(1e22)), 4)
        (0.1, 2.131)

    References:
        Hoffmann et al. 2022, arXiv:2203.15556, approach 2 (IsoFLOP profiles).
    """

    name: ClassVar[str] = "terminal"
    varies: ClassVar[frozenset[str]] = frozenset({"tokens_per_active_param", "batch_schedule", "warmup"})

    def __init__(self, optima: Sequence[IsoFlop], *, floor: float | None = None) -> None:
        self.optima = tuple(sorted(optima, key=lambda optimum: optimum.compute))
        self.pinned = floor is not None
        self._compute = np.array([optimum.compute for optimum in self.optima])
        self._loss = np.array([optimum.loss for optimum in self.optima])
        self.floor, self.amplitude, self.alpha, self.rms = fit_floor(self._compute, self._loss, floor=floor)
        self.token_law = fit_power(self._compute, [optimum.tokens for optimum in self.optima])
        self.param_law = fit_power(self._compute, [optimum.params for optimum in self.optima])

    @classmethod
    def from_runs(
        cls, compute: ArrayLike, params: ArrayLike, tokens: ArrayLike, loss: ArrayLike, *, floor: float | None = None
    ) -> "TerminalFit":
        """Fit finished runs: their optima by `isoflop_optima`, then the laws through them.

        Args:
            compute: (n,) FLOPs of each run or its nominal budget.
            params: (n,) parameters.
            tokens: (n,) training tokens.
            loss: (n,) final losses in nats.
            floor: E where it is pinned; None to fit it.

        Raises:
            TrajectoryGuardError: a value is not positive, or too few budgets remain.
        """
        return cls(isoflop_optima(compute, params, tokens, loss), floor=floor)

    @classmethod
    def fit(cls, ladder: Ladder) -> "TerminalFit":
        """Fit the final losses of a ladder's finished rungs, the floor with its prior below five budgets.

        Seeds are averaged; a rung that died early is left out.

        Raises:
            TrajectoryGuardError: no rung finished, or all of one compute budget.
        """
        rows = []
        for rung in ladder.rungs:
            finals = [curve.loss[-1] for curve in rung.curves if rung.plan.progress(curve.step[-1]) >= 0.98]
            if finals:
                plan = rung.plan
                rows.append((plan.total_flops, plan.active_params, plan.total_tokens, float(np.mean(finals))))
        if not rows:
            raise TrajectoryGuardError(
                "no rung of the ladder reached the end of its plan, which the terminal law needs"
            )
        compute, params, tokens, loss = np.transpose(rows)
        return cls.from_optima(cls.from_runs(compute, params, tokens, loss, floor=0.0).optima)

    @classmethod
    def from_optima(cls, optima: Sequence[IsoFlop]) -> "TerminalFit":
        """Fit the laws through optima, the floor free from five budgets on and with its prior below.

        Raises:
            TrajectoryGuardError: fewer than two budgets.
        """
        if len(optima) >= FREE_FLOOR:
            return cls(optima)
        return cls(optima, floor=likely_floor([o.compute for o in optima], [o.loss for o in optima]))

    def expect(self, compute: ArrayLike) -> Array:
        """Return the loss in nats to expect at the end of optimal runs of `compute` FLOPs (any shape)."""
        return self.floor + self.amplitude * np.asarray(compute, np.float64) ** -self.alpha

    def first_progress(self, plan: RunPlan) -> float:
        """Return 1: this law knows only the end of training."""
        return 1.0

    def loss(self, plan: RunPlan, progress: Array) -> Array:
        """Return the final loss in nats at each progress (m,), all of which must be 1."""
        g = np.asarray(progress, np.float64)
        if np.any(g < 1.0):
            raise TrajectoryGuardError("the terminal law knows only the end of training; fit a law along training")
        return np.broadcast_to(self.expect(plan.total_flops), g.shape).copy()

    def recommend(self, compute: float) -> Recommendation:
        """Return the parameters and tokens the ladder recommends for `compute` FLOPs, with the loss to expect.

        Raises:
            TrajectoryGuardError: compute is not positive, or more than 1e4 times the ladder's largest budget.
        """
        reach = compute / self._compute[-1] if compute > 0 else math.nan
        if not 0 < reach <= 1e4:
            raise TrajectoryGuardError(
                f"compute must be positive and at most 1e4 x the largest budget {self._compute[-1]:.3g}, got "
                f"{compute:.3g}; nothing supports a forecast further out, add larger rungs"
            )
        loss = float(self.expect(compute))
        params = self.param_law[0] * compute ** self.param_law[1]
        low, high = self.band(compute)
        return Recommendation(
            compute=float(compute),
            params=params,
            tokens=self.token_law[0] * compute ** self.token_law[1],
            loss=loss,
            interval={
                level: (loss * math.exp(-width), loss * math.exp(width))
                for level, width in self._half_widths(params).items()
            },
            bootstrap=(low, high),
            sensitivity=self.sensitivity(compute),
            reach=float(reach),
        )

    def interval_model(self) -> IntervalModel:
        """Return the interval that the ladder's own back-tests set: the smallest budgets forecast each larger one."""
        errors = []
        for count in range(2, len(self.optima)):
            fit = TerminalFit.from_optima(self.optima[:count])
            for index in range(count, len(self.optima)):
                target = self.optima[index]
                error = abs(math.log(target.loss / float(fit.expect(target.compute))))
                distance = size_distance(target.params, self.optima[count - 1].params)
                errors.append(NestedError(index, distance, error / float(early_factor(1.0))))
        return fit_interval(errors, max(optimum.params for optimum in self.optima))

    def _half_widths(self, params: float) -> dict[float, float]:
        model = self.interval_model()
        return {level: float(model.half_width(params, 1.0, level)) for level in (0.8, 0.95)}

    def band(self, compute: float, *, low: float = 0.05, high: float = 0.95) -> tuple[float, float]:
        """Return quantiles of the loss at `compute` when the optima are resampled with replacement (seeded)."""
        x, count = np.log(self._compute), len(self.optima)
        draws = np.random.default_rng(SEED).integers(0, count, (BOOTSTRAPS, count))
        needed = 2 if self.pinned else 3
        draws = draws[np.sum(np.diff(np.sort(draws, axis=1), axis=1) > 0, axis=1) + 1 >= needed]
        xs, ys = x[draws], self._loss[draws]
        floors = np.full(len(draws), self.floor) if self.pinned else straightest_floor(xs, ys)
        z = np.log(ys - floors[:, None])
        middle = xs.mean(axis=1, keepdims=True)
        slope = np.sum((xs - middle) * z, axis=1) / np.sum((xs - middle) ** 2, axis=1)
        drawn = floors + np.exp(z.mean(axis=1) + slope * (math.log(compute) - middle[:, 0]))
        lower, upper = np.quantile(drawn, [low, high])
        return float(lower), float(upper)

    def sensitivity(self, compute: float, floors: ArrayLike | None = None) -> tuple[tuple[float, float, float], ...]:
        """Return (floor, loss at compute, rms of the fit) for pinned floors: how much hangs on the floor.

        Args:
            compute: FLOPs of the run.
            floors: floors in nats; by default seven from .3 below to .3 above the fitted one that lie below the losses.
        """
        if floors is None:
            floors = [f for f in self.floor + np.linspace(-0.3, 0.3, 7) if 0 <= f < 0.98 * self._loss.min()]
        rows = []
        for floor in np.asarray(floors, np.float64).tolist():
            _, amplitude, alpha, rms = fit_floor(self._compute, self._loss, floor=floor)
            rows.append((floor, floor + amplitude * compute**-alpha, rms))
        return tuple(rows)

    def to_params(self) -> dict[str, Any]:
        """Return the optima and the pinned floor as plain JSON values; the laws follow from them."""
        plain = [{**asdict(o), "quadratic": o.quadratic and list(o.quadratic)} for o in self.optima]
        return {"optima": plain, "pinned_floor": self.floor if self.pinned else None}

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> "TerminalFit":
        """Rebuild the fit.

        Raises:
            TrajectoryGuardError: a parameter is missing, unknown or out of range.
        """
        names = {f.name for f in fields(IsoFlop)}
        if set(params) != {"optima", "pinned_floor"} or any(set(o) != names for o in params["optima"]):
            raise TrajectoryGuardError(
                f"terminal parameters are `optima` (each {sorted(names)}) and `pinned_floor`, got {sorted(params)}"
            )
        optima = [IsoFlop(**{**o, "quadratic": o["quadratic"] and tuple(o["quadratic"])}) for o in params["optima"]]
        return cls(optima, floor=params["pinned_floor"])
