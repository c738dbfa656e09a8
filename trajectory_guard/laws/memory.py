"""What the loss remembers of the learning rate: the effective rate that follows a drop of the rate with delay.

Along a run the rate over its peak, e, falls by Delta_k at changes k. The effective rate is

    N(t) = 1 - sum_k Delta_k H(x_k(t)),    H rises from 0 to 1 with the distance x_k since change k:

* `"instant"`: H = 1, so N = e. No memory.
* `"annealing-area"`: H = 1 - exp(-x), x = (D(t) - D_k) / (tau S_k) with D in tokens. N is then 1 minus the annealing
  area S2 of Tissue et al. over its own time constant.
* `"functional-scaling-law"`: H = 1 - (1 + x)^-p, x = (S(t) - S_k) / (tau S_k) with S the tokens weighted by e (the
  intrinsic time); the forgetting kernel of Li et al.
* `"multi-power"`: H = 1 - (1 + x)^-p, x = e_k^-gamma (S(t) - S_k) / (tau S_k), where e_k is the rate after the change;
  the loss reduction of Luo et al.

The published forms count distances in steps; here they are relative to S_k, the training done before the change: the
longer a run, the slower the directions in which its loss still falls. Over the public families this halves the error
where horizons differ (measured by tests/benchmarks/accuracy.py).

References:
    Tissue et al. 2024, arXiv:2408.11029, equation 1. Luo et al. 2025, arXiv:2503.12811, equation 2. Li et al. 2025,
    arXiv:2509.19189, section 4.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.lr_schedule import LRSchedule

__all__ = ["MEMORIES", "MEMORY_PARAMETERS", "Memory", "Place", "effective_rate", "locate", "pad"]

Array = NDArray[np.float64]

Memory = Literal["instant", "annealing-area", "functional-scaling-law", "multi-power"]
"""How the learning-rate term remembers."""

MEMORIES: tuple[Memory, ...] = get_args(Memory)

MEMORY_PARAMETERS: dict[Memory, int] = {
    "instant": 0,
    "annealing-area": 1,
    "functional-scaling-law": 2,
    "multi-power": 3,
}
"""How many of (ln tau, ln p, gamma) each form has."""

CELLS = 4096
"""Cells of progress on which a schedule is read: one part in 4096 of a horizon is below any logging interval."""

KNOTS = 64
"""Most changes that a schedule is summed over: with 64, N of a cosine is within 1e-4 of its limit."""


LEAST_AREA = 0.01
"""Least S_k, as a share of a run at its peak rate: a change right after warm-up would otherwise have no memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Changes:
    """A schedule's changes of rate after warm-up, gathered into at most `KNOTS` of equal variation.

    Args:
        progress: (k,) where each change lies.
        area: (k,) integral of e over progress up to it.
        drop: (k,) rate before less rate after; negative where the rate rises.
        rate: (k,) rate after the change.
    """

    progress: Array
    area: Array
    drop: Array
    rate: Array


@lru_cache(maxsize=64)
def rate_path(schedule: LRSchedule) -> tuple[Array, Array, Array]:
    """Return a schedule's (progress, e, integral of e over progress) at the edges of `CELLS` cells.

    Example:
        >>> g, e, area = rate_path(LRSchedule(shape="linear"))
        >>> round(float(area[-1]), 9)
        0.5
    """
    g = np.linspace(0.0, 1.0, CELLS + 1)
    e = schedule.ratio(g)
    area = np.concatenate([[0.0], np.cumsum((e[1:] + e[:-1]) / (2.0 * CELLS))])
    return g, e, area


@lru_cache(maxsize=64)
def changes(schedule: LRSchedule) -> Changes:
    """Return where the rate of a schedule changes after its warm-up.

    Example:
        >>> found = changes(LRSchedule(shape="steps", points=((0.5, 0.3),)))
        >>> found.drop.round(3).tolist(), found.progress.round(3).tolist()
        ([0.7], [0.5])
    """
    g, e, area = rate_path(schedule)
    # From the peak on: a table may hold its own warm-up.
    first = int(np.searchsorted(g, schedule.warmup))
    first = max(first, int(np.argmax(e >= 0.999 * e.max())))
    drop = -np.diff(e[first:])
    middle = (g[first:-1] + g[first + 1 :]) / 2.0
    variation = np.cumsum(np.abs(drop))
    total = variation[-1] if variation.size else 0.0
    if total < 1e-6:
        empty = np.zeros(0)
        return Changes(progress=empty, area=empty, drop=empty, rate=empty)
    # A cell belongs to the knot that holds the middle of its own variation.
    label = np.minimum(((variation - np.abs(drop) / 2.0) / total * KNOTS).astype(np.int64), KNOTS - 1)
    weight = np.abs(drop)
    used = np.unique(label[weight > 0])
    summed = np.bincount(label, weight, KNOTS)[used]
    at = np.bincount(label, weight * middle, KNOTS)[used] / summed
    after = np.array([e[first + 1 + np.flatnonzero((label == k) & (weight > 0))[-1]] for k in used])
    return Changes(
        progress=at, area=np.interp(at, g, area), drop=np.bincount(label, drop, KNOTS)[used], rate=np.maximum(after, 1e-3)
    )


class Place(NamedTuple):
    """Where points of one run lie: rate and area (n,), the rest (n, changes of its schedule).

    `rate` is e; `area` is S in the unit of tokens given; for the others see `effective_rate`.
    """

    rate: Array
    area: Array
    since_tokens: Array
    since_area: Array
    drop: Array
    after: Array


def locate(schedule: LRSchedule, progress: Array, tokens: float) -> Place:
    """Place points of a run: its rate, the area under it, and the distances since each change.

    Args:
        schedule: of the run.
        progress: (n,) in [0, 1].
        tokens: of the whole planned run, in any unit.

    Example:
        >>> place = locate(LRSchedule(shape="steps", points=((0.5, 0.5),)), np.array([0.25, 1.0]), 8.0)
        >>> place.area.round(2).tolist(), place.since_tokens.round(2).tolist()
        ([2.0, 6.0], [[-0.5], [1.0]])
    """
    grid, _, area = rate_path(schedule)
    found = changes(schedule)
    here = np.interp(progress, grid, area)
    before = np.maximum(found.area, LEAST_AREA)
    wide = (len(progress), len(found.drop))
    return Place(
        rate=schedule.ratio(progress),
        area=np.maximum(here, 1e-9) * tokens,
        since_tokens=(progress[:, None] - found.progress) / before,
        since_area=(here[:, None] - found.area) / before,
        drop=np.broadcast_to(found.drop, wide),
        after=np.broadcast_to(found.rate, wide),
    )


def pad(values: Array, width: int, fill: float) -> Array:
    """Return (n, k) values with columns of `fill` appended up to `width`."""
    return np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=fill)


def effective_rate(
    memory: Memory, parameters: Array, since_tokens: Array, since_area: Array, drop: Array, rate: Array
) -> tuple[Array, Array]:
    """Return N and its derivatives, for points of one or many runs at once.

    Args:
        memory: a form that remembers.
        parameters: the first of (ln tau, ln p, gamma) that the form has.
        since_tokens: (n, k) tokens since each change over S_k, negative before it.
        since_area: (n, k) tokens weighted by e since each change over S_k, negative before it.
        drop: (n, k) or (k,) rate before less rate after each change; 0 where a run has fewer changes.
        rate: (n, k) or (k,) rate after each change.

    Returns:
        N (n,), at least 1e-6, and its derivatives (n, parameters).
    """
    tau = np.exp(parameters[0])
    if memory == "annealing-area":
        x = np.maximum(since_tokens, 0.0) / tau
        tail = np.exp(-x)
        rises = [-tail * x]  # dH / d ln tau
    else:
        x = np.maximum(since_area, 0.0) / tau
        logs = None
        if memory == "multi-power":
            logs = np.log(rate)
            x = x * np.exp(-parameters[2] * logs)
        p = np.exp(parameters[1])
        far = np.log1p(x)
        tail = np.exp(-p * far)
        slope = p * tail * x / (1.0 + x)  # dH / d ln x
        rises = [-slope, tail * p * far]
        if logs is not None:
            rises.append(-slope * logs)
    reached = np.where(since_tokens > 0, drop, 0.0)
    value = 1.0 - np.sum(reached * (1.0 - tail), axis=1)
    slopes = np.stack([-np.sum(reached * rise, axis=1) for rise in rises], axis=1)
    low = value < 1e-6
    return np.where(low, 1e-6, value), np.where(low[:, None], 0.0, slopes)
