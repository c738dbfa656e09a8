"""Terminal law: the final loss of compute-optimal runs against compute, and the size and tokens that reach it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Ladder
from trajectory_guard.plan import RunPlan

__all__ = ["IsoFlop", "Recommendation", "TerminalFit", "fit_floor", "fit_power"]

Array = NDArray[np.float64]

BUDGET_GAP = math.log(1.25)
"""Runs whose compute differs by less than a quarter share a budget; IsoFLOP budgets stand a factor 1.6 or more apart."""

BOOTSTRAPS = 2000
SEED = 20240501


@dataclass(frozen=True, kw_only=True)
class IsoFlop:
    """The runs of one compute budget: loss = a x^2 + b x + c with x = log10 tokens, and its minimum.

    Args:
        compute: FLOPs of the budget.
        tokens: tokens of the minimum, 10^(-b / 2a).
        params: parameters at the minimum, from the straight line of log10 params over log10 tokens of the runs.
        loss: loss of the minimum, c - b^2 / 4a, in nats.
        quadratic: (a, b, c); None where the budget has a single run, which then stands for its optimum.
        inside: the minimum lies within the tokens of the runs; outside it is an extrapolation.
        runs: number of runs.
    """

    compute: float
    tokens: float
    params: float
    loss: float
    quadratic: tuple[float, float, float] | None
    inside: bool
    runs: int


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


def fit_power(x: ArrayLike, y: ArrayLike) -> tuple[float, float]:
    """Fit y = k x^p by a straight line through the logarithms; return (k, p).

    Example:
        >>> [round(v, 9) for v in fit_power([1.0, 10.0, 100.0], [2.0, 20.0, 200.0])]
        [2.0, 1.0]
    """
    slope, level = np.polyfit(np.log10(np.asarray(x, np.float64)), np.log10(np.asarray(y, np.float64)), 1)
    return float(10.0**level), float(slope)


def fit_floor(compute: ArrayLike, loss: ArrayLike, *, floor: float | None = None) -> tuple[float, float, float, float]:
    """Fit L = E + A C^-alpha: the E whose ln(L - E) over ln C is straightest, and that line.

    Args:
        compute: (n,) FLOPs.
        loss: (n,) losses in nats.
        floor: E where it is pinned; None to fit it.

    Returns:
        E in nats, A, alpha, and the rms of ln(L - E) about its line.

    Raises:
        TrajectoryGuardError: fewer than three points (two with a pinned floor), or a floor above the lowest loss.

    Example:
        >>> c = 10.0 ** np.arange(18, 22)
        >>> [round(v, 6) for v in fit_floor(c, 1.5 + 100 * c**-0.1)[:3]]
        [1.5, 100.0, 0.1]
    """
    x, y = np.log(np.asarray(compute, np.float64)), np.asarray(loss, np.float64)
    if y.size < (3 if floor is None else 2) or np.unique(x).size < 2:
        raise TrajectoryGuardError(
            f"L*(C) needs at least {3 if floor is None else 2} compute budgets, got {y.size}; add rungs"
            + (" or pin the floor" if floor is None else "")
        )
    if floor is None:
        floor = _straightest(x, y[None])[0]
    if not 0 <= floor < y.min():
        raise TrajectoryGuardError(f"the floor must lie in [0, {y.min():g}), below every loss, got {floor:g}")
    z = np.log(y - floor)
    slope, level = np.polyfit(x, z, 1)
    rms = float(np.sqrt(np.mean((z - level - slope * x) ** 2)))
    return float(floor), float(np.exp(level)), float(-slope), rms


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

    def __init__(self, optima: "list[IsoFlop] | tuple[IsoFlop, ...]", *, floor: float | None = None) -> None:
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
        """Fit finished runs: group them by budget, take each group's quadratic minimum, fit the laws through the minima.

        A budget with one run stands for its own optimum where *no* budget has three or more (a ladder of runs already
        planned as optimal). Otherwise budgets of fewer than three runs, and those whose quadratic has no minimum, are
        left out.

        Args:
            compute: (n,) FLOPs of each run or its nominal budget; a budget's runs differ by less than a quarter.
            params: (n,) parameters.
            tokens: (n,) training tokens.
            loss: (n,) final losses in nats.
            floor: E where it is pinned; None to fit it.

        Raises:
            TrajectoryGuardError: a value is not positive, or too few budgets remain.
        """
        c, n, t, y = (np.atleast_1d(np.asarray(v, np.float64)) for v in (compute, params, tokens, loss))
        if not c.shape == n.shape == t.shape == y.shape:
            raise TrajectoryGuardError(f"runs need equal counts, got {c.shape}, {n.shape}, {t.shape}, {y.shape}")
        if not np.all(np.isfinite([c, n, t, y])) or np.min([c, n, t, y]) <= 0:
            raise TrajectoryGuardError("compute, params, tokens and loss must be finite and positive in every run")
        order = np.argsort(c, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(np.log(c[order])) > BUDGET_GAP) + 1)
        profiles = any(len(np.unique(t[group])) >= 3 for group in groups)
        optima = []
        for group in groups:
            budget = float(np.exp(np.mean(np.log(c[group])))) if np.ptp(c[group]) else float(c[group[0]])
            if not profiles:
                optima += [_single(budget, n[i], t[i], y[i]) for i in group[np.argmin(y[group])][None]]
            elif len(np.unique(t[group])) >= 3:
                optima.append(_quadratic(budget, n[group], t[group], y[group]))
        return cls([optimum for optimum in optima if optimum is not None], floor=floor)

    @classmethod
    def fit(cls, ladder: Ladder) -> "TerminalFit":
        """Fit the final losses of a ladder's finished rungs (mean over seeds; a rung that died early is left out)."""
        rows = []
        for rung in ladder.rungs:
            finals = [curve.loss[-1] for curve in rung.curves if rung.plan.progress(curve.step[-1]) >= 0.98]
            if finals:
                plan = rung.plan
                rows.append((plan.total_flops, plan.active_params, plan.total_tokens, float(np.mean(finals))))
        if not rows:
            raise TrajectoryGuardError("no rung of the ladder reached the end of its plan, which the terminal law needs")
        return cls.from_runs(*np.transpose(rows))

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
        low, high = self.band(compute)
        return Recommendation(
            compute=float(compute),
            params=self.param_law[0] * compute ** self.param_law[1],
            tokens=self.token_law[0] * compute ** self.token_law[1],
            loss=loss,
            interval={},
            bootstrap=(low, high),
            sensitivity=self.sensitivity(compute),
            reach=reach,
        )

    def band(self, compute: float, *, low: float = 0.05, high: float = 0.95) -> tuple[float, float]:
        """Return quantiles of the loss at `compute` when the optima are resampled with replacement (seeded)."""
        x, count = np.log(self._compute), len(self.optima)
        draws = np.random.default_rng(SEED).integers(0, count, (BOOTSTRAPS, count))
        needed = 2 if self.pinned else 3
        draws = draws[np.sum(np.diff(np.sort(draws, axis=1), axis=1) > 0, axis=1) + 1 >= needed]
        xs, ys = x[draws], self._loss[draws]
        floors = np.full(len(draws), self.floor) if self.pinned else _straightest(xs, ys)
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


def _single(budget: float, params: float, tokens: float, loss: float) -> IsoFlop:
    return IsoFlop(
        compute=budget,
        tokens=float(tokens),
        params=float(params),
        loss=float(loss),
        quadratic=None,
        inside=True,
        runs=1,
    )


def _quadratic(budget: float, params: Array, tokens: Array, loss: Array) -> IsoFlop | None:
    x = np.log10(tokens)
    a, b, c = np.polyfit(x, loss, 2).tolist()
    if a <= 0:
        return None
    best = -b / (2 * a)
    return IsoFlop(
        compute=budget,
        tokens=10**best,
        params=float(10 ** np.polyval(np.polyfit(x, np.log10(params), 1), best)),
        loss=c - b * b / (4 * a),
        quadratic=(a, b, c),
        inside=bool(x.min() <= best <= x.max()),
        runs=len(x),
    )


def _straightest(x: Array, y: Array) -> Array:
    """For each row of (k, n) points, the E in [0, min y) whose ln(y - E) over x is straightest: grid, then golden cuts."""
    x = np.broadcast_to(x, y.shape)
    u = x - x.mean(axis=1, keepdims=True)
    top = y.min(axis=1)

    def spread(floor: Array) -> Array:
        z = np.log(y[:, None, :] - floor[:, :, None])
        z = z - z.mean(axis=2, keepdims=True)
        slope = np.einsum("kn,kfn->kf", u, z) / np.sum(u * u, axis=1)[:, None]
        return np.sum((z - slope[:, :, None] * u[:, None, :]) ** 2, axis=2)

    # Finer towards the lowest loss, where ln(y - E) bends fastest.
    share = 1.0 - np.geomspace(1.0, 1e-4, 64)
    at = np.argmin(spread(top[:, None] * share), axis=1)
    low, high = top * share[np.maximum(at - 1, 0)], top * share[np.minimum(at + 1, 63)]
    golden = (math.sqrt(5.0) - 1.0) / 2.0
    for _ in range(60):
        inner = np.stack([high - golden * (high - low), low + golden * (high - low)], axis=1)
        values = spread(inner)
        left = values[:, 0] <= values[:, 1]
        low, high = np.where(left, low, inner[:, 0]), np.where(left, inner[:, 1], high)
    return (low + high) / 2.0
