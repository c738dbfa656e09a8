"""Rungs off the trend of their ladder: named, with the fit with and without them."""

import dataclasses

import numpy as np

from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.laws.base import Law
from trajectory_guard.laws.smooth import rung_curve
from trajectory_guard.plan import RunPlan

__all__ = ["off_trend"]

LEAST_RUNGS = 4
"""Without one of three rungs any law passes through the other two, so that each would look like the odd one."""

LEAST_PERCENT, LEAST_RATIO = 0.8, 3.0
"""A rung is off the trend if the others forecast it wrong by this mean percentage, and if the fit without it passes the
others at least so many times closer than the fit with it. Reruns of one configuration differ by .05-.07 %, public rungs
of one recipe by up to .5 %."""


def off_trend(law: type[Law], ladder: Ladder) -> str | None:
    """Return a sentence on the rung that does not fit in with the others, or None.

    It says by how much the rung lies off, and what the fit says with and without it about the end of a run of twice the
    largest rung's size. The rung stays in the fit: whether it is wrong or right is for a person to decide.

    Args:
        law: law to fit with.
        ladder: four or more rungs; fewer cannot tell which is the odd one. The smallest and the largest are told only
            where no other curvature of the law explains them.
    """
    if len(ladder.rungs) < LEAST_RUNGS:
        return None
    whole = law.fit(ladder)
    spread = _misfit(whole, ladder.rungs)
    odd: tuple[float, Rung, Law] | None = None
    for rung in ladder.rungs:
        rest = tuple(other for other in ladder.rungs if other is not rung)
        try:
            model = law.fit(Ladder(rungs=rest))
        except TrajectoryGuardError:
            continue
        left = _misfit(model, rest)
        if odd is None or left < odd[0]:
            odd = (left, rung, model)
    if odd is None or spread < LEAST_RATIO * odd[0]:
        return None
    _, rung, without = odd
    off = _signed(without, rung)
    if abs(off) < LEAST_PERCENT:
        return None
    plan = _twice(max(ladder.rungs, key=lambda r: r.plan.total_flops).plan)
    end = np.array([1.0])
    return (
        f"rung {rung.name!r} lies off the trend: {off:+.2f} % on average against the fit of the others. With it, a run "
        f"of {plan.active_params:.4g} active parameters ends at {float(whole.loss(plan, end)[0]):.4f} nats, without it "
        f"at {float(without.loss(plan, end)[0]):.4f}; check its log, or leave it out"
    )


def _errors(model: Law, rung: Rung) -> np.ndarray:
    curve = rung_curve(rung)
    judged = curve.progress >= max(0.05, 2 * rung.plan.schedule.warmup, model.first_progress(rung.plan))
    if not judged.any():
        return np.zeros(1)
    return 100 * (curve.loss[judged] / model.loss(rung.plan, curve.progress[judged]) - 1)


def _misfit(model: Law, rungs: tuple[Rung, ...]) -> float:
    return float(np.mean([np.abs(_errors(model, rung)).mean() for rung in rungs]))


def _signed(model: Law, rung: Rung) -> float:
    return float(_errors(model, rung).mean())


def _twice(plan: RunPlan) -> RunPlan:
    """A plan of twice the parameters and tokens in as many steps."""
    tokens = plan.tokens_per_step
    double = 2 * tokens if isinstance(tokens, int) else tuple((first, 2 * size) for first, size in tokens)
    per_token = None if plan.flops_per_token is None else 2 * plan.flops_per_token
    return dataclasses.replace(
        plan, active_params=2 * plan.active_params, tokens_per_step=double, flops_per_token=per_token, total_params=None
    )
