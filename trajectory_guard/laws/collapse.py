"""Collapse: curves of one recipe, divided by their final losses, lie on each other."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Ladder
from trajectory_guard.laws.floor import fit_floor, likely_floor
from trajectory_guard.laws.requirements import read_array, require_agreement, require_fields
from trajectory_guard.laws.smooth import PROGRESS_GRID, RungCurve, rung_curve
from trajectory_guard.plan import RunPlan

__all__ = ["CollapseLaw"]

START, REACH = 0.02, 0.98
"""The shape begins at 2 % of training at the earliest; a rung's final loss counts from 98 % of its plan."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CollapseLaw:
    """L(g) = L(1) x shape(g), with the shape L(g) / L(1) of the rung nearest in compute.

    The final loss L(1) follows from the rungs' finals, E + A C^-alpha with the floor's prior, or is aligned to the
    run's own early losses (`align`). The nearest rung is used alone because the shape drifts with size. It holds where
    tokens per active parameter, the LR schedule over progress, and the time scale of the optimizer are shared; it
    serves as a cross-check of the other laws.

    Args:
        progress: (m,) knots, rising, the last 1.
        log_flops: (k,) ln FLOPs of each finished rung's plan, rising.
        shape: (k, m) its loss over its final loss.
        finals: (k,) its final loss in nats.
        floor: E in nats.

    References:
        Qiu et al. 2025, arXiv:2507.02119 (supercollapse). Bergsma et al. 2025, arXiv:2509.25087.
    """

    name: ClassVar[str] = "collapse"
    varies: ClassVar[frozenset[str]] = frozenset()

    progress: NDArray[np.float64]
    log_flops: NDArray[np.float64]
    shape: NDArray[np.float64]
    finals: NDArray[np.float64]
    floor: float

    @classmethod
    def fit(cls, ladder: Ladder) -> Self:
        """Read the shapes and finals of at least two finished rungs of different compute.

        Raises:
            TrajectoryGuardError: fewer than two such rungs, or rungs that differ in LR schedule, tokens per active
                parameter or data phases.
        """
        require_agreement(ladder, cls.name, cls.varies)
        curves = [curve for curve in map(rung_curve, ladder.rungs) if curve.progress[-1] >= REACH]
        log_flops = np.log([curve.plan.total_flops for curve in curves])
        if len(curves) < 2 or np.ptp(log_flops) < 1e-3:
            raise TrajectoryGuardError(
                f"{cls.name} needs at least two rungs of different compute trained to the end of their plan, got "
                f"{[curve.name for curve in curves]}; finish another rung"
            )
        order = np.argsort(log_flops, kind="stable")
        curves, log_flops = [curves[i] for i in order], log_flops[order]
        # One percent earlier, so that evaluations at nominally equal progress do not lose their first point.
        first = max(START, 0.99 * max(_begins(curve) for curve in curves))
        inner = PROGRESS_GRID[(first * 1.03 < PROGRESS_GRID) & (PROGRESS_GRID < 1.0)]
        if len(inner) < 3:
            raise TrajectoryGuardError(f"{cls.name}: a rung's log begins at progress {first:.3g}, too late for a shape")
        knots = np.concatenate([[first], inner, [1.0]])
        table = np.array([np.interp(np.log(knots), np.log(c.progress), c.loss) for c in curves])
        finals = table[:, -1]
        return cls(
            progress=knots,
            log_flops=log_flops,
            shape=table / finals[:, None],
            finals=finals,
            floor=likely_floor(np.exp(log_flops), finals),
        )

    def first_progress(self, plan: RunPlan) -> float:
        """Return the first knot, where every rung's log has begun and its warm-up is over."""
        return float(self.progress[0])

    def final(self, plan: RunPlan) -> float:
        """Return the final loss in nats that the rungs' finals promise for `plan`."""
        _, amplitude, alpha, _ = fit_floor(np.exp(self.log_flops), self.finals, floor=self.floor)
        return self.floor + amplitude * plan.total_flops**-alpha

    def loss(self, plan: RunPlan, progress: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the loss in nats at each progress (m,): the promised final loss times the nearest rung's shape."""
        return self.final(plan) * self.shape_at(plan, progress)

    def shape_at(self, plan: RunPlan, progress: ArrayLike) -> NDArray[np.float64]:
        """Return L(g) / L(1) of the rung nearest to `plan` in compute, linear in ln progress between knots."""
        nearest = int(np.argmin(np.abs(self.log_flops - math.log(plan.total_flops))))
        g = np.maximum(np.asarray(progress, dtype=np.float64), 1e-12)
        return np.interp(np.log(g), np.log(self.progress), self.shape[nearest])

    def align(self, plan: RunPlan, progress: ArrayLike, loss: ArrayLike) -> float:
        """Return the final loss in nats for which the shape matches the run's losses so far.

            L(1) = exp(median over points of ln(loss / shape(g)))

        Multiply it with `shape_at` for the aligned forecast. An early alignment carries the run's early residual in
        full, which overshoots where that residual fades: compare it with `final`, trust neither far from the other.

        Args:
            plan: the run.
            progress: (n,) progress of its points; those before `first_progress` are left out.
            loss: (n,) nats.

        Raises:
            TrajectoryGuardError: no point lies in the range of the shape.
        """
        g, y = np.asarray(progress, dtype=np.float64), np.asarray(loss, dtype=np.float64)
        inside = (g >= self.progress[0] * (1 - 1e-9)) & (g <= 1.0)
        if not inside.any():
            raise TrajectoryGuardError(
                f"no point at or after progress {self.progress[0]:.3g}, where the shape begins; align later"
            )
        return float(np.exp(np.median(np.log(y[inside] / self.shape_at(plan, g[inside])))))

    def to_params(self) -> dict[str, Any]:
        """Return the parameters as plain JSON values."""
        return {
            "progress": self.progress.tolist(),
            "log_flops": self.log_flops.tolist(),
            "shape": self.shape.tolist(),
            "finals": self.finals.tolist(),
            "floor": self.floor,
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """Rebuild the law from `to_params`.

        Raises:
            TrajectoryGuardError: a parameter is missing, unknown, of the wrong shape or out of range.
        """
        require_fields(params, ("progress", "log_flops", "shape", "finals", "floor"), cls.name)
        progress = read_array(params, "progress", cls.name, (None,))
        log_flops = read_array(params, "log_flops", cls.name, (None,))
        shape = read_array(params, "shape", cls.name, (len(log_flops), len(progress)))
        finals = read_array(params, "finals", cls.name, (len(log_flops),))
        floor = float(read_array(params, "floor", cls.name, ()))
        if np.any(np.diff(progress) <= 0) or not (progress[0] > 0 and progress[-1] == 1.0):
            raise TrajectoryGuardError(f"{cls.name}: `progress` must rise strictly within (0, 1] and end at 1")
        if len(log_flops) < 2 or np.any(np.diff(log_flops) < 0) or np.ptp(log_flops) == 0:
            raise TrajectoryGuardError(f"{cls.name}: `log_flops` must rise over at least two rungs")
        if np.any(shape <= 0) or not 0 <= floor < finals.min():
            raise TrajectoryGuardError(f"{cls.name}: `shape` must be positive and `floor` in [0, lowest final)")
        return cls(progress=progress, log_flops=log_flops, shape=shape, finals=finals, floor=floor)


def _begins(curve: RungCurve) -> float:
    return max(float(curve.progress[0]), curve.plan.schedule.warmup)
