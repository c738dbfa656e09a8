"""The mathematics of quantile balancing: quantiles of required biases, and the bias that solves a batch."""

import torch
from torch import Tensor

__all__ = ["exact_quantile", "histogram_quantile", "solve"]


def exact_quantile(values: Tensor, share: float) -> Tensor:
    """The value in each column of [N, E] with a share of its non-NaN values at or below it; NaN for empty columns.

    >>> exact_quantile(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), 0.5)
    tensor([2.5000])
    """
    if values.shape[0] == 0:
        return values.new_full((values.shape[1],), float("nan"))
    columns = values.t().contiguous().sort(-1)[0]  # NaN sorts last
    n = (~columns.isnan()).sum(-1)
    # Halfway between the last value inside the share and the first outside, so that rounding moves no token.
    inside = (share * n).long().clamp(min=1)
    low = columns.gather(1, (inside - 1)[:, None])[:, 0]
    high = columns.gather(1, torch.minimum(inside, (n - 1).clamp(min=0))[:, None])[:, 0]
    return (low + high) / 2


def histogram_quantile(hist: Tensor, share: float, lo: Tensor | float, hi: Tensor | float) -> Tensor:
    """The same from counts [E, B] over [lo, hi], interpolated linearly inside a bin; NaN for empty rows.

    >>> histogram_quantile(torch.tensor([[0, 4, 4, 0]], dtype=torch.int32), 0.25, 0.0, 4.0)
    tensor([1.5000])
    """
    upto = hist.cumsum(-1, dtype=torch.int64)
    n = upto[:, -1:]
    target = share * n.double()
    place = (upto < target).sum(-1, keepdim=True).clamp(max=hist.shape[1] - 1)
    here = hist.gather(1, place).double()
    before = upto.gather(1, place).double() - here
    inside = place + (target - before) / here  # 0/0, NaN, for empty rows
    return (lo + (hi - lo) * (inside[:, 0] / hist.shape[1])).float()


def solve(required: Tensor, bias: Tensor, k: int, passes: int) -> Tensor:
    """The bias [E] at which each expert gets its fair share k/E of a batch, approached by alternation.

    One pass, with r_te the bias that token t requires of expert e up to a constant of the token:
    alpha_t = (k+1)-th largest of bias_e - r_te; r_te += alpha_t; bias_e = k/E quantile of r_te over t, less its mean.
    One pass is quantile balancing as published. It moves every expert as if the others stood still; where all of
    them move, more passes come nearer to even loads.

    Args:
        required: [N, E] required biases, those of a token up to a constant; NaN for no number, +inf for never.
        bias: [E] to start from.
        k: experts a token.
        passes: alternations, at least 1.

    >>> scores, bias = torch.tensor([[0.9, 0.8, 0.1], [0.9, 0.5, 0.3], [0.9, 0.6, 0.2]]), torch.zeros(3)
    >>> for passes in (1, 5):
    ...     (scores + solve(-scores, bias, 1, passes)).argmax(1).bincount(minlength=3).tolist()
    [0, 2, 1]
    [1, 1, 1]
    """
    inf = float("inf")
    for _ in range(passes):
        behind = (bias - required).nan_to_num(nan=-inf, posinf=inf, neginf=-inf)  # NaN is chosen last, as in `route`
        required = torch.where(required == inf, inf, required + behind.topk(k + 1).values[:, -1:])
        # No score leaves [0, 1], so no number is clamped; infinities are.
        fresh = exact_quantile(required.clamp(bias.amin() - 1.0, bias.amax() + 1.0), k / bias.numel())
        fresh = torch.where(fresh.isnan(), bias, fresh)  # an expert without one finite logit keeps its bias
        bias = fresh - fresh.mean()
    return bias
