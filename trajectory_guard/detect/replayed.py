"""Steps trained twice: after a resume, the losses of steps seen before are compared with the remembered ones."""

import math
from collections.abc import Mapping
from typing import Any

from trajectory_guard.detect.state import PlainState

__all__ = ["Replayed", "correlation"]

MEMORY, SLACK = 1024, 256
"""Losses remembered at least, and how many more until the oldest go: dropping one at a time makes a dict slow."""
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
    """The last 1024 losses or some more by step, and the comparison with steps that are trained again."""

    __slots__ = ("before", "losses", "now", "said")

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.before: list[float] = []
        self.now: list[float] = []
        self.said = False

    def begin(self) -> None:
        """The run went back: compare from here on."""
        self.before, self.now, self.said = [], [], False

    def remember(self, step: int, loss: float) -> None:
        """Keep a finite loss."""
        self.losses[step] = loss
        if len(self.losses) > MEMORY + SLACK:
            self.losses = dict(list(self.losses.items())[-MEMORY:])

    def compare(self, step: int, loss: float) -> tuple[str, float, float] | None:
        """Take the finite loss of a step trained again; return (finding, median |difference|, correlation) once.

        The finding is `"replayed_differs"` (same data order, another loss) or `"data_order_differs"`.
        """
        known = self.losses.pop(step, None)
        self.losses[step] = loss
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
        """See `PlainState.state`; the losses as two lists, since JSON has no integer keys."""
        content = super().state()
        content["losses"] = [list(self.losses), list(self.losses.values())]
        return content

    def load_state(self, content: Mapping[str, Any]) -> None:
        """See `PlainState.load_state`; losses that this object knows of later steps stay."""
        steps, values = content["losses"]
        later = {step: loss for step, loss in self.losses.items() if not steps or step > steps[-1]}
        super().load_state({**content, "losses": {}})
        self.losses = {**dict(zip(steps, values, strict=True)), **later}
