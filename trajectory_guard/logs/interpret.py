"""Giving a log's numbers their meaning: nats from units, tokens from steps and steps from tokens."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.conventions import LossUnit, Split, to_nats
from trajectory_guard.errors import FileFormatError
from trajectory_guard.logs import stitch as st
from trajectory_guard.logs.table import MAX_COUNT
from trajectory_guard.plan import RunPlan

__all__ = ["in_nats", "steps_of_tokens", "stitch_notes", "tokens_of"]


def steps_of_tokens(
    tokens: NDArray[np.float64], plan: RunPlan | None, source: str, notes: list[str]
) -> NDArray[np.float64]:
    """Return the step at which each token count was reached, by the plan.

    Raises:
        FileFormatError: there is no plan.
    """
    if plan is None:
        raise FileFormatError(f"{source}: counts tokens and no steps; pass a plan, which says how many a step takes")
    notes.append("steps derived from tokens through the plan's batch schedule")
    return np.round(st.steps_at_tokens(tokens, plan))


def stitch_notes(parts: st.Stitched) -> list[str]:
    """Say what stitching left out."""
    notes = []
    if parts.resorted:
        notes.append("rows were not in the order of their steps: sorted")
    if parts.restarts:
        before, after = parts.restarts[-1]
        once = "restarted" if len(parts.restarts) == 1 else f"restarted {len(parts.restarts)} times, last"
        notes.append(f"{once} at step {after:.0f} after step {before:.0f}; {parts.superseded} superseded rows dropped")
    elif parts.superseded:
        notes.append(f"{parts.superseded} rows dropped that the logger declared void on a resume")
    if parts.duplicates:
        notes.append(f"{parts.duplicates} duplicate rows of a step dropped, the last kept")
    return notes


def in_nats(
    loss: NDArray[np.float64],
    step: NDArray[np.int64],
    unit: LossUnit | Literal["auto"],
    plan: RunPlan | None,
    split: Split,
    notes: list[str],
) -> tuple[NDArray[np.float64], LossUnit]:
    """Convert to nats, and compare the first loss with ln V where the log begins at the beginning."""
    vocab = None if plan is None else plan.recipe.vocab_size
    seen = None
    entropy = float("nan") if vocab is None else float(np.log(vocab))
    # An untrained model's loss lies at ln V for the first few updates only.
    if vocab is not None and step[0] <= (1 if split == "train" else 0):
        seen = st.first_loss_unit(float(loss[0]), vocab)
    chosen: LossUnit = (seen or "nats") if unit == "auto" else unit
    if unit == "auto" and chosen != "nats":
        notes.append(
            f"the first loss, {loss[0]:.4g}, is {chosen} for a vocabulary of {vocab} (ln V = {entropy:.4g}), "
            f"though nothing says so: read as {chosen} and converted to nats"
        )
    elif unit != "auto" and seen is not None and seen != unit:
        notes.append(
            f"the first loss, {loss[0]:.4g}, looks like {seen} for a vocabulary of {vocab} "
            f"(ln V = {entropy:.4g}), but unit={unit!r} was given: check it"
        )
    elif chosen != "nats":
        notes.append(f"converted from {chosen} to nats")
    return to_nats(loss, chosen), chosen


def tokens_of(
    step: NDArray[np.int64],
    tokens: NDArray[np.float64] | None,
    plan: RunPlan | None,
    source: str,
    notes: list[str],
) -> NDArray[np.float64]:
    """Return the log's own tokens where they are usable, else the plan's."""
    problem = None
    if tokens is None:
        problem = "tokens are not logged"
    elif not np.all(np.isfinite(tokens)):
        problem = "tokens are not logged at every step"
    elif np.any(tokens < 0) or np.any(tokens > MAX_COUNT) or np.any(np.diff(tokens) <= 0):
        problem = "the logged tokens do not rise with the step"
    if problem is None and tokens is not None:
        if plan is not None:
            planned = plan.tokens(step)
            off = np.abs(tokens - planned) / np.maximum(planned, plan.batch_phases[0][1])
            # A counter read one step early or late is no disagreement about the batch size.
            late = np.abs(tokens - planned) > 1.01 * (planned - plan.tokens(step - 1))
            if np.any(late & (off > 0.01)):
                worst = int(np.argmax(np.where(late, off, 0)))
                notes.append(
                    f"logged tokens differ from the plan's, most at step {step[worst]}: {tokens[worst]:.6g} against "
                    f"{planned[worst]:.6g}; the logged ones are kept"
                )
        return tokens
    if plan is None:
        raise FileFormatError(f"{source}: {problem}; pass a plan, which says how many tokens a step takes")
    notes.append(f"{problem}: taken from the plan")
    return plan.tokens(step)
