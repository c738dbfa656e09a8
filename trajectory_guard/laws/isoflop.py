"""IsoFLOP profiles: the best tokens, parameters and loss of each compute budget, and power laws through them."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trajectory_guard.errors import TrajectoryGuardError

__all__ = ["IsoFlop", "fit_power", "isoflop_optima"]

Array = NDArray[np.float64]

BUDGET_GAP = math.log(1.25)
"""Runs whose compute differs by less than a quarter share a budget; IsoFLOP budgets lie a factor 1.6 or more apart."""


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

    def __post_init__(self) -> None:
        for name in ("compute", "tokens", "params", "loss"):
            value = getattr(self, name)
            # 1e60 is beyond any run, and its powers are still float64s.
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 1e-9 < value < 1e60:
                raise TrajectoryGuardError(f"an optimum's `{name}` must be a positive number, got {value!r}")


def fit_power(x: ArrayLike, y: ArrayLike) -> tuple[float, float]:
    """Fit y = k x^p by a straight line through the logarithms; return (k, p).

    Example:
        >>> [round(v, 9) for v in fit_power([1.0, 10.0, 100.0], [2.0, 20.0, 200.0])]
        [2.0, 1.0]
    """
    slope, level = np.polyfit(np.log10(np.asarray(x, np.float64)), np.log10(np.asarray(y, np.float64)), 1)
    return float(10.0**level), float(slope)


def isoflop_optima(compute: ArrayLike, params: ArrayLike, tokens: ArrayLike, loss: ArrayLike) -> list[IsoFlop]:
    """Group runs by budget and return each group's quadratic minimum, smallest budget first.

    The best run of a budget stands for its optimum where *no* budget has three or more (a ladder of runs planned as
    optimal). Otherwise budgets of fewer than three runs, and those whose quadratic has no minimum, are left out.

    Args:
        compute: (n,) FLOPs of each run or its nominal budget; a budget's runs differ by less than a quarter.
        params: (n,) parameters.
        tokens: (n,) training tokens.
        loss: (n,) final losses in nats.

    Raises:
        TrajectoryGuardError: counts differ, or a value is not positive.

    Example:
        >>> best, = isoflop_optima([1e18] * 3, [4e8, 2e8, 1e8], [1e9, 2e9, 4e9], [3.2, 3.0, 3.2])
        >>> f"{best.tokens:.3g} tokens, {best.loss:.3f} nats"
        '2e+09 tokens, 3.000 nats'
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
            best = int(group[np.argmin(y[group])])
            optima.append(_single(budget, float(n[best]), float(t[best]), float(y[best])))
        elif len(np.unique(t[group])) >= 3:
            optima.append(_quadratic(budget, n[group], t[group], y[group]))
    return [optimum for optimum in optima if optimum is not None]


def _single(budget: float, params: float, tokens: float, loss: float) -> IsoFlop:
    return IsoFlop(
        compute=budget,
        tokens=tokens,
        params=params,
        loss=loss,
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
