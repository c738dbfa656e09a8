"""Hints at a loss in another unit: what ratio it has to the loss expected."""

import math

__all__ = ["first_loss_problem", "ratio_hint"]


def ratio_hint(ratio: float, tolerance: float = 0.02) -> str | None:
    """Name what a ratio of observed to expected loss looks like, or None.

    Args:
        ratio: observed / expected.
        tolerance: relative distance at which a known factor is named.

    Example:
        >>> ratio_hint(1.441)
        'a loss in bits (1 / ln 2 = 1.4427 times nats)'
    """
    if not 0.0 < ratio < math.inf:
        return None
    known = {
        1.0 / math.log(2.0): "a loss in bits (1 / ln 2 = 1.4427 times nats)",
        math.log(2.0): "a loss converted to nats twice (ln 2 = 0.6931 times nats)",
    }
    for k in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512):
        known[float(k)] = f"a sum over {k} micro-batches or ranks instead of a mean"
        known[1.0 / k] = f"a mean divided once more by {k} (accumulation steps or world size)"
    factor = min(known, key=lambda value: abs(math.log(ratio / value)))
    return known[factor] if abs(math.log(ratio / factor)) <= math.log(1.0 + tolerance) else None


def first_loss_problem(loss: float, uniform: float) -> tuple[float, str] | None:
    """Judge the loss of an untrained model; a model that knows nothing has ln(vocabulary size).

    Args:
        loss: first observed loss, of a step before training changed it.
        uniform: ln(vocabulary size).

    Returns:
        (loss / uniform, what it looks like) when the ratio lies outside [0.8, 1.25], else None. Initialisations in use
        start within 10 % above ln V.
    """
    ratio = loss / uniform
    if 0.8 <= ratio <= 1.25:
        return None
    if ratio > 1000.0:
        return ratio, "a sum over tokens instead of a mean"
    return ratio, ratio_hint(
        ratio, tolerance=0.05
    ) or "another unit, a sum instead of a mean, or an unusual initialisation"
