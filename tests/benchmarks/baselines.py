"""What the laws are compared with: Chinchilla at each step and nearest-rung collapse, on the same points."""

import numpy as np
from shared_ladders import by_size, evaluated

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Rung
from trajectory_guard.laws.solve import nonnegative
from trajectory_guard.laws.surface import Surface, fit_surface


def pooled(rungs: list[Rung], most: int = 48) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(params, tokens seen, loss) of every judged point, at most so many per run."""
    n, d, y = [], [], []
    for rung in rungs:
        g, loss = evaluated(rung)
        kept = np.unique(np.linspace(0, len(g) - 1, most).astype(int)) if len(g) else []
        n += [rung.plan.active_params] * len(kept)
        d += (g[kept] * rung.plan.total_tokens).tolist()
        y += loss[kept].tolist()
    return np.array(n), np.array(d), np.array(y)


def surface(n: np.ndarray, d: np.ndarray, y: np.ndarray) -> Surface:
    """E + A N^-alpha + B D^-beta by variable projection; without the size term where there is one size."""
    try:
        return fit_surface(n, d, y)
    except TrajectoryGuardError:
        best = (np.inf, None)
        scale = np.exp(np.mean(np.log(d)))
        for beta in np.linspace(0.05, 1.5, 146):
            basis = np.stack([np.ones_like(d), (d / scale) ** -beta], axis=1) / y[:, None]
            x = nonnegative(basis, np.ones_like(y))
            cost = np.sum((basis @ x - 1) ** 2)
            if cost < best[0]:
                best = (cost, Surface(floor=x[0], a=0.0, b=x[1] * scale**beta, alpha=0.3, beta=beta))
        assert best[1] is not None
        return best[1]


class ChinchillaEachStep:
    def __init__(self, rungs: list[Rung]) -> None:
        self.surface = surface(*pooled(rungs))

    def loss(self, plan, g):
        return self.surface.loss(plan.active_params, g * plan.total_tokens)


class NearestCollapse:
    """L(1) from the surface through the rungs' finals, the shape from the run nearest in schedule, size and tokens."""

    def __init__(self, rungs: list[Rung]) -> None:
        self.finished = [r for r in rungs if r.plan.progress(r.curves[0].step[-1]) >= 0.97 and len(evaluated(r)[0])]
        finals = [(r.plan.active_params, r.plan.total_tokens, evaluated(r)[1][-1]) for r in self.finished]
        sizes = by_size(self.finished)
        self.surface = surface(*map(np.array, zip(*finals, strict=True)))
        self.several = len(finals) >= 6 and len(sizes) >= 2

    def loss(self, plan, g):
        def distance(rung: Rung) -> float:
            covered = max(0.0, evaluated(rung)[0][0] - g[0])
            size = abs(np.log(plan.active_params / rung.plan.active_params))
            tokens = abs(np.log(plan.total_tokens / rung.plan.total_tokens))
            return 10 * plan.schedule.distance(rung.plan.schedule) + 10 * covered + size + tokens

        nearest = min(self.finished, key=distance)
        at, loss = evaluated(nearest)
        final = float(self.surface.loss(plan.active_params, plan.total_tokens)) if self.several else loss[-1]
        return final * np.interp(np.log(g), np.log(at), loss / loss[-1])
