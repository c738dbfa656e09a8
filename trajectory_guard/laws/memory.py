"""What the loss remembers of the learning rate: the effective rate that follows a drop of the rate with delay.

Along a run the rate over its peak, e, falls by Delta_k at changes k. The effective rate is

    N(t) = e(t) + sum_k Delta_k (1 - H(x_k(t))),    H rises from 0 to 1 with the distance x_k since change k:

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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.lr_schedule import LRSchedule

__all__ = ["MEMORIES", "MEMORY_PARAMETERS", "Memory", "Place", "effective_rate", "join", "locate"]

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

KNOTS = 32
"""Most changes that a schedule is summed over: N is then within .003 of its limit for the named shapes."""

LEAST_AREA = 0.01
"""Least S_k, as a share of a run at its peak rate: a change right after warm-up would otherwise have no memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Changes:
    """A schedule's changes of rate after warm-up, gathered into at most `KNOTS`.

    Args:
        begin: (k,) progress where each change begins.
        end: (k,) progress where it ends.
        drop: (k,) rate before less rate after; negative where the rate rises.
        rate: (k,) rate after the change, a geometric mean where it is gradual; at least 1e-3.
    """

    begin: Array
    end: Array
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
        >>> found.drop.round(3).tolist(), found.end.round(3).tolist()
        ([0.7], [0.5])
    """
    g, e, _ = rate_path(schedule)
    # From the peak on: a table may hold its own warm-up.
    first = int(np.searchsorted(g, schedule.warmup))
    first = max(first, int(np.argmax(e >= 0.999 * e.max())))
    drop = -np.diff(e[first:])
    moving = np.flatnonzero(np.abs(drop) > 0)
    size = np.abs(drop[moving])
    if size.sum() < 1e-6:
        empty = np.zeros(0)
        return Changes(begin=empty, end=empty, drop=empty, rate=empty)
    # Knots hold equal shares of variation and of changing progress together; a cell goes where its middle lies.
    share = size / size.sum() + 1.0 / len(moving)
    middle = (np.cumsum(share) - share / 2.0) / 2.0
    label = np.minimum((middle * KNOTS).astype(np.int64), KNOTS - 1)
    starts = np.flatnonzero(np.diff(label, prepend=-1))
    logs = np.log(np.maximum(e[first + moving + 1], 1e-3))
    ends = np.append(starts[1:], len(label)) - 1
    return Changes(
        begin=g[first + moving[starts]],
        end=g[first + moving[ends] + 1],
        drop=np.add.reduceat(drop[moving], starts),
        rate=np.exp(np.add.reduceat(size * logs, starts) / np.add.reduceat(size, starts)),
    )


class Place(NamedTuple):
    """Where points of one run lie, or of many whose changes are padded to one count with drops of 0.

    rate: (n,) e. area: (n,) S in the unit of tokens given. since_tokens, since_area: (n, k) tokens since each change
    over S_k, plain and weighted by e; 0 before it. drop: (n, k) rate before less rate after, 0 before the change.
    after: (n, k) rate after it.
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
        ([2.0, 6.0], [[0.0], [1.0]])
    """
    grid, e, area = rate_path(schedule)
    found = changes(schedule)
    here = np.interp(progress, grid, area)
    # A change that is under way counts by the part that is done, which lies half-way back to its beginning.
    width = np.maximum(found.end - found.begin, 1e-12)
    done = np.clip((progress[:, None] - found.begin) / width, 0.0, 1.0)
    at = found.begin + 0.5 * done * width
    passed = np.interp(at, grid, area)
    before = np.maximum(passed, LEAST_AREA)
    return Place(
        rate=np.interp(progress, grid, e),  # not schedule.ratio: a step within a cell must agree with `done`
        area=np.maximum(here, 1e-9) * tokens,
        since_tokens=np.maximum(progress[:, None] - at, 0.0) / before,
        since_area=np.maximum(here[:, None] - passed, 0.0) / before,
        drop=done * found.drop,
        after=np.broadcast_to(found.rate, done.shape),
    )


def join(places: Sequence[Place]) -> Place:
    """Return the points of several runs as one, the changes padded to the most that any has.

    Example:
        >>> flat, step = LRSchedule(shape="constant"), LRSchedule(shape="steps", points=((0.5, 0.5),))
        >>> join([locate(flat, np.array([0.5]), 1.0), locate(step, np.array([1.0]), 1.0)]).drop.tolist()
        [[0.0], [0.5]]
    """
    width = max(place.drop.shape[1] for place in places)

    def joined(name: str, fill: float) -> Array:
        parts = [getattr(place, name) for place in places]
        return np.concatenate([np.pad(v, ((0, 0), (0, width - v.shape[1])), constant_values=fill) for v in parts])

    return Place(
        rate=np.concatenate([place.rate for place in places]),
        area=np.concatenate([place.area for place in places]),
        since_tokens=joined("since_tokens", 0.0),
        since_area=joined("since_area", 0.0),
        drop=joined("drop", 0.0),
        after=joined("after", 1.0),
    )


def effective_rate(memory: Memory, parameters: Array, place: Place) -> tuple[Array, Array]:
    """Return N and its derivatives, for points of one or many runs at once.

    Args:
        memory: a form that remembers.
        parameters: the first of (ln tau, ln p, gamma) that the form has.
        place: the points.

    Returns:
        N (n,), at least 1e-6, and its derivatives (n, parameters).
    """
    tau = np.exp(parameters[0])
    if memory == "annealing-area":
        x = place.since_tokens / tau
        tail = np.exp(-x)
        slopes = [tail * x]  # d tail / d ln tau
    else:
        x = place.since_area / tau
        logs = None
        if memory == "multi-power":
            logs = np.log(place.after)
            x *= np.exp(-parameters[2] * logs)
        p = np.exp(parameters[1])
        far = np.log1p(x)
        tail = np.exp(-p * far)
        stretch = p * tail * (x / (1.0 + x))
        slopes = [stretch, -p * tail * far]
        if logs is not None:
            slopes.append(stretch * logs)
    value = place.rate + np.einsum("nk,nk->n", place.drop, tail)
    derivatives = np.stack([np.einsum("nk,nk->n", place.drop, slope) for slope in slopes], axis=1)
    low = value < 1e-6
    return np.where(low, 1e-6, value), np.where(low[:, None], 0.0, derivatives)
