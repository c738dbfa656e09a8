"""How evenly a layer's experts are used."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LoadMetrics", "load_metrics"]


class LoadMetrics(NamedTuple):
    """How evenly the experts are used; 0-d tensors (no device synchronisation)."""

    max_violation: Tensor
    """Largest load over the mean load, less 1: 0 is perfect balance (Wang et al. 2024, eq. 4)."""
    cv: Tensor
    """Standard deviation of the loads over their mean."""
    dead: Tensor
    """Experts without a single token."""
    entropy: Tensor
    """Entropy of the loads over its largest value log(E): 1 is perfect balance."""


def load_metrics(load: Tensor) -> LoadMetrics:
    """Metrics of one layer's loads.

    Args:
        load: [E] copies sent to each expert.

    >>> [round(x.item(), 3) for x in load_metrics(torch.tensor([3, 1, 0, 0]))]
    [2.0, 1.225, 2, 0.406]
    """
    counts = load.float()
    mean = counts.mean().clamp(min=1e-20)
    p = counts / counts.sum().clamp(min=1e-20)
    full = max(1e-20, math.log(len(load)))
    return LoadMetrics(
        max_violation=counts.amax() / mean - 1.0,
        cv=counts.std(correction=0) / mean,
        dead=(counts == 0).sum(),
        entropy=-torch.special.xlogy(p, p).sum() / full,
    )
