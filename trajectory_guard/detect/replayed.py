"""Steps trained twice: after a resume, the losses of steps seen before are compared with the remembered ones."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from trajectory_guard.detect.state import PlainState

__all__ = ["Replayed", "correlation"]

MEMORY, SLACK = 1024, 256
"""Losses remembered at least, and how many more until the oldest go at once."""
TOLERANCE_NATS = 2e-3
"""Difference to look into. Re-trained steps on identical batches differ by 1.6e-4 nats (sd) from kernel order alone."""
PAIRS = 16
"""Pairs compared before anything is said."""
SAME_ORDER = 0.5
"""Correlation of remembered and new losses above which the data order counts as the same; on the same order it is
0.996-0.999, on another about 0."""


def correlation(xs: list[float], ys: list[float]) -> float:
    """Return Pearson's correlation; 0 when one side is constant."""
    n = len(xs)
    mx, my = sum(xs) / n, sum(ys) / n
    xx = sum((x - mx) ** 2 for x in xs)
    yy = sum((y - my) ** 2 for y in ys)
    if xx <= 0.0 or yy <= 0.0:
        return 0.0
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / math.sqrt(xx * yy)


class Replayed(PlainState):
    """The last 1024 losses or some more, and the comparison of steps that are trained again with those before."""

    __slots__ = ("before", "earlier", "losses", "now", "said", "steps")

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []
        # Losses by step of a stretch that is trained again.
        self.earlier: dict[int, float] = {}
        self.before: list[float] = []
        self.now: list[float] = []
        self.said = False

    def begin(self, step: int) -> None:
        """The run went back to `step`: compare from here on."""
        kept = bisect_left(self.steps, step)
        self.earlier.update(zip(self.steps[kept:], self.losses[kept:], strict=True))
        del self.steps[kept:], self.losses[kept:]
        self.before, self.now, self.said = [], [], False

    def remember(self, step: int, loss: float) -> None:
        """Keep a finite loss of a step later than all that are kept."""
        self.steps.append(step)
        self.losses.append(loss)
        if len(self.steps) > MEMORY + SLACK:
            del self.steps[:SLACK], self.losses[:SLACK]

    def compare(self, step: int, loss: float) -> tuple[str, float, float] | None:
        """Take the finite loss of a step trained again; return (finding, median |difference|, correlation) once.

        The finding is `"replayed_differs"` (same data order, another loss) or `"data_order_differs"`.
        """
        known = self.earlier.pop(step, None)
        if not self.steps or step > self.steps[-1]:
            self.remember(step, loss)
        elif self.steps[-1] == step:
            known, self.losses[-1] = self.losses[-1], loss
        if known is None or self.said:
            return None
        self.before.append(known)
        self.now.append(loss)
        if len(self.now) < PAIRS:
            return None
        self.said = True
        differences = sorted(abs(a - b) for a, b in zip(self.before, self.now, strict=True))
        median = differences[len(differences) // 2]
        if median <= TOLERANCE_NATS:
            return None
        alike = correlation(self.before, self.now)
        return ("replayed_differs" if alike >= SAME_ORDER else "data_order_differs"), median, alike

    def state(self) -> dict[str, Any]:
        """See `PlainState.state`; the earlier losses as two lists, since JSON has no integer keys."""
        return {**super().state(), "earlier": [list(self.earlier), list(self.earlier.values())]}

    def load_state(self, content: Mapping[str, Any]) -> None:
        """See `PlainState.load_state`; later steps that this object has seen will be compared with what they gave."""
        last = content["steps"][-1] if content["steps"] else 0
        later = {s: loss for s, loss in zip(self.steps, self.losses, strict=True) if s > last}
        super().load_state({**content, "earlier": {}})
        self.earlier = {**dict(zip(*content["earlier"], strict=True)), **later}
