"""Mixture-of-experts routing in plain torch: the fallback for every device, and what the CUDA kernels are held to.

How to use it (T tokens, E experts, k experts a token, D channels)::

    r = route(logits, k, bias=balancer.bias, cutoff=balancer.wants_cutoff)   # logits [T, E], best in float32
    order, pos, offs = permute(r.experts, E)
    xs = gather(x, order, pos)                          # [T*k, D], the copies of each expert side by side
    ys = experts(xs, offs)                              # e.g. torch._grouped_mm(xs, w, offs=offs)
    y = unpermute(ys, pos, r.weights)                   # [T, D], sum of the k weighted copies in fixed order
    loss = cross_entropy + balancer.loss(r) + 1e-3 * z_loss(r)

The numerics contract (each line is a test in tests/kernels/):

1. Scores, sums and weights are float32 whatever the logits' dtype, gradients have the logits' dtype; float64 logits are
   computed in float64.
2. choice = score + bias, and -inf where the logit is -inf. Experts are ordered by choice descending, then by index
   ascending; -0 equals +0; NaN ranks below -inf. The bias chooses, it never weighs, and it gets no gradient.
3. Expert indices are k distinct values in [0, E), even for rows of NaN or -inf. Weights and gradients propagate NaN.
4. weights = scale * s / (sum of the chosen s + 1e-20) with norm, scale * s without.
5. softmax with norm equals top-k followed by softmax.
6. The backward of the normalisation is (g - sum(g r)) / d with r = s / d; d squared is never formed. Of shape [T, E]
   nothing but the logits is saved.
7. Results are bitwise repeatable on one device.
8. CUDA and eager may differ in the choice between scores that are 2 ulp apart, never between equal scores.
9. T * k < 2**31, or an error. T = 0 gives empty tensors and zeros, and zero auxiliary losses.
10. Tokens where `valid` is false are routed, but stay out of counts, psum and histogram, and their lse is 0.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from trajectory_guard.kernels.checks import RoutingError, check_histogram, check_route
from trajectory_guard.kernels.copies import gather, permute, unpermute

__all__ = [
    "Routing",
    "RoutingError",
    "Score",
    "gather",
    "load_balance_loss",
    "permute",
    "qb_histogram_",
    "route",
    "unpermute",
    "z_loss",
]

Score = Literal["softmax", "sigmoid"]
EPS = 1e-20
"""Added to the sum of the chosen scores: it keeps 0/0 out and is below one ulp of any sum above 2e-13."""
_INT_MIN = -(2**31)


class Routing(NamedTuple):
    """Where each token goes: what `route` returns.

    Float fields are float32 (float64 for float64 logits). `weights`, `psum` and `lse` carry gradients to the logits.
    """

    weights: Tensor
    """[T, k] combine weights, unbiased, in the order of `experts`."""
    experts: Tensor
    """[T, k] int32, best first, distinct in a row."""
    counts: Tensor | None
    """[E] int32: copies sent to each expert by valid tokens; None without stats."""
    psum: Tensor | None
    """[E]: sum of the scores over valid tokens; None without stats."""
    lse: Tensor | None
    """[T]: logsumexp of the logits, 0 for tokens that are not valid; None without stats."""
    cutoff: Tensor | None
    """[T]: the (k+1)-th largest score + bias; None unless asked for."""


def _scores(x: Tensor, score: str) -> Tensor:
    return torch.sigmoid(x) if score == "sigmoid" else torch.softmax(x, -1)


def _top(choice: Tensor, n: int) -> Tensor:
    """Indices [T, n] (int64) of the n largest choices; ties to the lower index, NaN last."""
    n_experts = choice.shape[1]
    if choice.dtype == torch.float64:
        # 0 - c also turns -0 into +0; an ascending sort puts NaN last.
        return torch.sort(0.0 - choice, dim=-1, stable=True)[1][:, :n]
    # One integer a pair (choice, index), so that no two are equal and any top-k gives the stable sort's answer.
    bits = (choice + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = torch.where(choice.isnan(), _INT_MIN, ordered)
    low = torch.arange(n_experts - 1, -1, -1, device=choice.device)
    key = (ordered.long() << 32) | low
    if n <= 4:  # on CPU twice as fast as topk; measured by tests/benchmarks/kernels.py
        picks = []
        for _ in range(n):
            best = key.amax(-1, keepdim=True)
            picks.append(best)
            if len(picks) < n:
                key = key.masked_fill_(key == best, -(2**63))
        top = torch.cat(picks, -1)
    else:
        top = torch.topk(key, n, dim=-1)[0]
    return (n_experts - 1) - (top & 0xFFFFFFFF)


def route_forward(
    logits: Tensor,
    k: int,
    bias: Tensor | None,
    score: str,
    norm: bool,
    scale: float,
    cutoff: bool,
    stats: bool,
    valid: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The fields of `Routing`, without autograd; arguments as in `route`, unchecked."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    tokens, n_experts = x.shape
    s = _scores(x, score)
    choice = s if bias is None else s + bias.to(x.dtype)
    choice = torch.where(x == float("-inf"), x, choice)
    if tokens:
        top = _top(choice, k + 1 if cutoff else k)
    else:
        top = torch.zeros(0, k + 1 if cutoff else k, dtype=torch.int64, device=x.device)
    alpha = choice.gather(1, top[:, k:])[:, 0] if cutoff else None
    chosen = top[:, :k] if cutoff else top
    weights = s.gather(1, chosen)
    if norm:
        weights = weights / (weights.sum(-1, keepdim=True) + EPS)
    if scale != 1.0:
        weights = weights * scale
    experts = chosen.to(torch.int32)
    if not stats:
        return weights, experts, None, None, None, alpha
    lse = torch.logsumexp(x, -1)
    if valid is None:
        counted, psum = chosen, s.sum(0)
    else:
        counted = torch.where(valid[:, None], chosen, n_experts)
        psum = torch.where(valid[:, None], s, 0.0).sum(0)
        lse = torch.where(valid, lse, 0.0)
    counts = torch.bincount(counted.reshape(-1), minlength=n_experts)[:n_experts].to(torch.int32)
    return weights, experts, counts, psum, lse, alpha


def route_backward(
    logits: Tensor,
    experts: Tensor,
    valid: Tensor | None,
    score: str,
    norm: bool,
    scale: float,
    g_weights: Tensor | None,
    g_psum: Tensor | None,
    g_lse: Tensor | None,
) -> Tensor:
    """Gradient to the logits, [T, E] in their dtype; scores are computed again from the logits.

    With g the gradient of the weights times scale, d = sum of the chosen scores + 1e-20, r = s / d, the chosen scores
    get (g - sum(g r)) / d with norm and g without; every score gets g_psum. Then for softmax
    dx = s (ds - sum(ds s)), for sigmoid dx = s (1 - s) ds, and softmax(x) g_lse comes on top.
    """
    x = logits if logits.dtype == torch.float64 else logits.float()
    s = _scores(x, score)
    grad: Tensor | None = None
    if g_weights is not None:
        chosen = experts.long()
        g = g_weights.to(x.dtype)
        if scale != 1.0:
            g = g * scale
        if norm:
            picked = s.gather(1, chosen)
            d = picked.sum(-1, keepdim=True) + EPS
            g = (g - (g * (picked / d)).sum(-1, keepdim=True)) / d
        grad = torch.zeros_like(s).scatter_(1, chosen, g)
    if g_psum is not None:
        column = g_psum.to(x.dtype)
        rows = column if valid is None else torch.where(valid[:, None], column, 0.0)
        grad = rows.expand_as(s) if grad is None else grad + rows
    if grad is not None:
        grad = s * (grad - (grad * s).sum(-1, keepdim=True)) if score == "softmax" else grad * (s * (1.0 - s))
    if g_lse is not None:
        p = s if score == "softmax" else torch.softmax(x, -1)
        row = g_lse.to(x.dtype)[:, None] * p
        if valid is not None:
            row = torch.where(valid[:, None], row, 0.0)
        grad = row if grad is None else grad + row
    return torch.zeros_like(logits) if grad is None else grad.to(logits.dtype)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, k, bias, score, norm, scale, cutoff, stats, valid):
        ctx.set_materialize_grads(False)
        fields = route_forward(logits, k, bias, score, norm, scale, cutoff, stats, valid)
        _, experts, counts, _, _, alpha = fields
        ctx.save_for_backward(logits, experts, valid)
        ctx.options = (score, norm, scale)
        ctx.mark_non_differentiable(*(t for t in (experts, counts, alpha) if t is not None))
        return fields

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        logits, experts, valid = ctx.saved_tensors
        g_weights, _, _, g_psum, g_lse, _ = grads
        score, norm, scale = ctx.options
        grad = route_backward(logits, experts, valid, score, norm, scale, g_weights, g_psum, g_lse)
        return grad, None, None, None, None, None, None, None, None


def route(
    logits: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    score: Score = "softmax",
    norm: bool = True,
    scale: float = 1.0,
    cutoff: bool = False,
    stats: bool = True,
    valid: Tensor | None = None,
) -> Routing:
    """Choose k experts a token and weigh them.

    Args:
        logits: [T, E] float32, bfloat16, float16 or float64.
        k: experts a token, 1 to E (1 to E - 1 with `cutoff`).
        bias: [E], added to the scores for the choice only; no gradient.
        score: `softmax` over the experts or `sigmoid` of each logit.
        norm: divide the chosen scores by their sum.
        scale: factor on the weights.
        cutoff: also return the (k+1)-th largest score + bias (quantile balancing needs it).
        stats: also return counts, psum and lse.
        valid: [T] bool; false marks padding, which stays out of the statistics.

    Returns:
        A `Routing`.

    Raises:
        RoutingError: for shapes, dtypes, devices or k that do not fit.

    >>> r = route(torch.tensor([[0.0, 0.0, 1.0], [5.0, 1.0, 1.0]]), 2)
    >>> r.experts.tolist(), r.counts.tolist()
    ([[2, 0], [0, 1]], [2, 1, 1])
    >>> [round(w, 3) for w in r.weights[0].tolist()]
    [0.731, 0.269]
    """
    check_route(logits, k, bias, score, cutoff, valid)
    bias = None if bias is None else bias.detach()
    return Routing(*_Route.apply(logits, k, bias, score, norm, scale, cutoff, stats, valid))


def qb_histogram_(
    hist: Tensor,
    logits: Tensor,
    cutoff: Tensor,
    lo: Tensor | float,
    hi: Tensor | float,
    *,
    score: Score = "softmax",
    valid: Tensor | None = None,
) -> Tensor:
    """Add each (token, expert)'s required bias, cutoff - score, to the expert's histogram, in place.

    Bin b of B covers [lo + b w, lo + (b + 1) w), w = (hi - lo) / B; values outside go to the end bins, an expert with
    a logit of -inf to the last one (no bias would choose it), NaN nowhere.

    Args:
        hist: [E, B] int32, changed in place.
        logits: [T, E].
        cutoff: [T] of `route(..., cutoff=True)`.
        lo: lower bound of the bins.
        hi: upper bound of the bins, above lo.
        score: as in `route`.
        valid: as in `route`.

    Returns:
        hist.

    >>> h = torch.zeros(2, 4, dtype=torch.int32)
    >>> qb_histogram_(h, torch.tensor([[0.0, 0.0]]), torch.tensor([0.6]), -1.0, 1.0).tolist()
    [[0, 0, 1, 0], [0, 0, 1, 0]]
    """
    check_histogram(hist, logits, cutoff, valid)
    with torch.no_grad():
        bins = hist.shape[1]
        required = required_bias(logits, cutoff, score)
        place = (required - lo) * (bins / (hi - lo))
        # NaN has no place; comparing before the cast keeps infinities out of the undefined float-to-int cast.
        index = place.nan_to_num(0.0).clamp(0, bins - 1).to(torch.int64)
        index = index + torch.arange(hist.shape[0], device=hist.device) * bins
        drop = required.isnan() if valid is None else required.isnan() | ~valid[:, None]
        index = torch.where(drop, hist.numel(), index)
        counted = torch.bincount(index.reshape(-1), minlength=hist.numel() + 1)[:-1]
        hist += counted.view_as(hist).to(torch.int32)
    return hist


def required_bias(logits: Tensor, cutoff: Tensor, score: str) -> Tensor:
    """[T, E]: the bias at which each expert would just be chosen, cutoff - score; +inf for a logit of -inf."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    return torch.where(x == float("-inf"), float("inf"), cutoff[:, None] - _scores(x, score))


def load_balance_loss(r: Routing) -> Tensor:
    """Auxiliary load-balance loss E * sum(f_e P_e), 1 at perfect balance.

    f_e is expert e's share of the copies (no gradient), P_e its share of the score sums. Of Fedus, Zoph & Shazeer,
    "Switch Transformers", JMLR 23 (2022), eq. 4-6; for sigmoid scores P is psum over its own sum.

    >>> round(load_balance_loss(route(torch.eye(4), 1)).item(), 6)
    1.0
    """
    if r.counts is None or r.psum is None:
        raise RoutingError("load_balance_loss needs the statistics: route(..., stats=True)")
    share = r.counts / r.counts.sum().clamp(min=1)
    return r.counts.shape[0] * (share * (r.psum / (r.psum.sum() + EPS))).sum()


def z_loss(r: Routing) -> Tensor:
    """Router z-loss: the mean of logsumexp(logits)^2 over valid tokens.

    Of Zoph et al., "ST-MoE" (2022), arXiv:2202.08906, eq. 5.

    >>> z_loss(route(torch.zeros(3, 2), 1)).item() == torch.tensor(2.0).log().square().item()
    True
    """
    if r.counts is None or r.lse is None:
        raise RoutingError("z_loss needs the statistics: route(..., stats=True)")
    tokens = (r.counts.sum() / r.experts.shape[1]).clamp(min=1)
    return r.lse.square().sum() / tokens
