"""Mixture-of-experts routing: the public operations, which choose between the CUDA kernels and plain torch.

Use is as in `trajectory_guard.kernels.reference`, whose docstring holds the numerics contract, with one more argument:
`backend`, which is `auto` (CUDA kernels for what they can take, torch otherwise), `torch`, or `cuda` (an error rather
than a fallback); by default the environment's `TRAJECTORY_GUARD_KERNELS`, or `auto`. `last_backend()` tells what ran.

The operations are custom ops of torch: they compile with fullgraph=True, checkpoint, and run under autocast
in the precision of the contract. Gradients of gradients are an error.
"""

import os
import warnings
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from trajectory_guard.kernels import copies, fused, nvrtc, reference
from trajectory_guard.kernels.checks import RoutingError, check_histogram, check_permute, check_route
from trajectory_guard.kernels.copies import gather, unpermute
from trajectory_guard.kernels.reference import Routing, Score, load_balance_loss, z_loss

__all__ = [
    "Backend",
    "Routing",
    "RoutingError",
    "gather",
    "last_backend",
    "load_balance_loss",
    "permute",
    "qb_histogram_",
    "route",
    "unpermute",
    "z_loss",
]

Backend = Literal["auto", "torch", "cuda"]
_last: str | None = None


def last_backend() -> Literal["torch", "cuda"] | None:
    """What the last operation of this process ran on; None before the first.

    >>> _ = route(torch.zeros(1, 2), 1)
    >>> last_backend()
    'torch'
    """
    return _last  # pyright: ignore[reportReturnType]


def _chosen(backend: str | None) -> str:
    name = backend or os.environ.get("TRAJECTORY_GUARD_KERNELS") or "auto"
    if name not in ("auto", "torch", "cuda"):
        raise RoutingError(f"backend (or TRAJECTORY_GUARD_KERNELS) must be `auto`, `torch` or `cuda`, got {name!r}")
    return name


@cache
def _warn_fallback(reason: str) -> None:
    warnings.warn(f"routing on CUDA falls back to plain torch: {reason}", RuntimeWarning, stacklevel=3)


def _use_cuda(backend: str, on: Tensor, reason: str) -> bool:
    """Whether to launch kernels for a call on the tensor's device; `reason` says why they cannot take it."""
    global _last
    use = False
    if backend == "cuda":
        if on.device.type != "cuda":
            raise RoutingError(
                f"backend='cuda' needs tensors on a CUDA device, got {on.device}: move them, or use 'auto'"
            )
        if torch.version.hip:
            raise RoutingError("backend='cuda' needs an NVIDIA GPU, this torch is built for ROCm: use 'auto'")
        if reason:
            raise RoutingError(f"backend='cuda': {reason}; use 'auto' to fall back to torch")
        use = True
    elif backend == "auto" and on.device.type == "cuda":
        reason = reason or _unavailable()
        if reason:
            _warn_fallback(reason)
        use = not reason
    _last = "cuda" if use else "torch"
    return use


@cache
def _unavailable() -> str:
    """Why no kernel can be compiled on this machine, or an empty string."""
    if torch.version.hip:
        return "this torch is built for ROCm"
    try:
        nvrtc.nvrtc_version()
    except ValueError as error:
        return str(error)
    return ""


def _empty_for_none(fields: tuple[Tensor | None, ...], logits: Tensor) -> tuple[Tensor, ...]:
    # Custom ops return tensors only; `route` turns these back into None.
    return tuple(logits.new_empty(0, dtype=torch.float32) if f is None else f for f in fields)


@torch.library.custom_op("trajectory_guard::route", mutates_args=())
def _route(
    logits: Tensor,
    bias: Tensor | None,
    valid: Tensor | None,
    k: int,
    score: str,
    norm: bool,
    scale: float,
    cutoff: bool,
    stats: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    reason = fused.unsupported(logits.dtype, logits.shape[1], k)
    forward = fused.fused_forward if _use_cuda(backend, logits, reason) else reference.route_forward
    fields = forward(logits, k, bias, score, norm, scale, cutoff, stats, valid)
    return _empty_for_none(fields, logits)  # pyright: ignore[reportReturnType]


@_route.register_fake
def _(logits, bias, valid, k, score, norm, scale, cutoff, stats, backend):
    tokens, n_experts = logits.shape
    real = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return (
        logits.new_empty(tokens, k, dtype=real),
        logits.new_empty(tokens, k, dtype=torch.int32),
        logits.new_empty(n_experts, dtype=torch.int32) if stats else logits.new_empty(0, dtype=torch.float32),
        logits.new_empty(n_experts, dtype=real) if stats else logits.new_empty(0, dtype=torch.float32),
        logits.new_empty(tokens, dtype=real) if stats else logits.new_empty(0, dtype=torch.float32),
        logits.new_empty(tokens, dtype=real) if cutoff else logits.new_empty(0, dtype=torch.float32),
    )


@torch.library.custom_op("trajectory_guard::route_backward", mutates_args=())
def _route_backward(
    logits: Tensor,
    experts: Tensor,
    valid: Tensor | None,
    g_weights: Tensor | None,
    g_psum: Tensor | None,
    g_lse: Tensor | None,
    score: str,
    norm: bool,
    scale: float,
    backend: str,
) -> Tensor:
    reason = fused.unsupported(logits.dtype, logits.shape[1], experts.shape[1])
    backward = fused.fused_backward if _use_cuda(backend, logits, reason) else reference.route_backward
    return backward(logits, experts, valid, score, norm, scale, g_weights, g_psum, g_lse)


@_route_backward.register_fake
def _(logits, experts, valid, g_weights, g_psum, g_lse, score, norm, scale, backend):
    return logits.new_empty(logits.shape)


def _setup(ctx, inputs, output) -> None:
    logits, _, valid, _, score, norm, scale, _, stats, backend = inputs
    _, experts, counts, _, _, alpha = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, experts, valid)
    ctx.options = (score, norm, scale, stats, backend)
    ctx.mark_non_differentiable(experts, counts, alpha)


def _backward(ctx, g_weights, _experts, _counts, g_psum, g_lse, _alpha):
    logits, experts, valid = ctx.saved_tensors
    score, norm, scale, stats, backend = ctx.options
    if not stats:
        g_psum = g_lse = None
    g_logits = _route_backward(logits, experts, valid, g_weights, g_psum, g_lse, score, norm, scale, backend)
    return g_logits, None, None, None, None, None, None, None, None, None


_route.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("trajectory_guard::permute", mutates_args=())
def _permute(experts: Tensor, n_experts: int, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    reason = fused.unsupported(torch.float32, n_experts, experts.shape[1])
    run = fused.fused_permute if _use_cuda(backend, experts, reason) else copies.permute
    return run(experts, n_experts)


@_permute.register_fake
def _(experts, n_experts, backend):
    tokens, k = experts.shape
    return experts.new_empty(tokens * k), experts.new_empty(tokens, k), experts.new_empty(n_experts)


@torch.library.custom_op("trajectory_guard::qb_histogram_", mutates_args=("hist",))
def _histogram(
    hist: Tensor, logits: Tensor, cutoff: Tensor, bounds: Tensor, valid: Tensor | None, score: str, backend: str
) -> None:
    reason = fused.unsupported(logits.dtype, logits.shape[1], 1, hist.shape[1])
    if not reason and not hist.is_contiguous():
        reason = "the histogram is not contiguous"
    if _use_cuda(backend, logits, reason):
        fused.fused_histogram_(hist, logits, cutoff, bounds, score, valid)
    else:
        reference.qb_histogram_(hist, logits, cutoff, bounds[0], bounds[1], score=score, valid=valid)  # pyright: ignore


@_histogram.register_fake
def _(hist, logits, cutoff, bounds, valid, score, backend):
    return None


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
    backend: Backend | None = None,
) -> Routing:
    """Choose k experts a token and weigh them, on CUDA by one fused kernel.

    Args:
        logits: [T, E] float32, bfloat16, float16 or float64 (float64 always runs on torch).
        k: experts a token, 1 to E (1 to E - 1 with `cutoff`).
        bias: [E], added to the scores for the choice only; no gradient.
        score: `softmax` over the experts or `sigmoid` of each logit.
        norm: divide the chosen scores by their sum.
        scale: factor on the weights.
        cutoff: also return the (k+1)-th largest score + bias (quantile balancing needs it).
        stats: also return counts, psum and lse.
        valid: [T] bool; false marks padding, which stays out of the statistics.
        backend: `auto`, `torch` or `cuda`; by default the environment's TRAJECTORY_GUARD_KERNELS, or `auto`.

    Returns:
        A `Routing`.

    Raises:
        RoutingError: for shapes, dtypes, devices or k that do not fit, or a forced backend that cannot run.

    >>> r = route(torch.tensor([[0.0, 0.0, 1.0], [5.0, 1.0, 1.0]]), 2, score="sigmoid", cutoff=True)
    >>> r.experts.tolist(), r.cutoff.tolist()
    ([[2, 0], [0, 1]], [0.5, 0.7310585975646973])
    """
    check_route(logits, k, bias, score, cutoff, valid)
    bias = None if bias is None else bias.detach()
    fields = _route(logits, bias, valid, k, score, norm, float(scale), cutoff, stats, _chosen(backend))
    weights, experts, counts, psum, lse, alpha = fields
    some = (counts, psum, lse) if stats else (None, None, None)
    return Routing(weights, experts, *some, alpha if cutoff else None)


def permute(experts: Tensor, n_experts: int, *, backend: Backend | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the token copies by expert, stably: `reference.permute` with a choice of backend.

    Args:
        experts: [T, k] int32 indices in [0, n_experts), distinct in a row (as `route` gives them; not checked on CUDA).
        n_experts: E.
        backend: as in `route`.

    Returns:
        order [T*k], pos [T, k] and offs [E], all int32.

    >>> [x.tolist() for x in permute(torch.tensor([[1, 0], [1, 2]], dtype=torch.int32), 3)]
    [[1, 0, 2, 3], [[1, 0], [2, 3]], [1, 3, 4]]
    """
    check_permute(experts, n_experts)
    return _permute(experts, n_experts, _chosen(backend))


def qb_histogram_(
    hist: Tensor,
    logits: Tensor,
    cutoff: Tensor,
    lo: Tensor | float,
    hi: Tensor | float,
    *,
    score: Score = "softmax",
    valid: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Count required biases in place: `reference.qb_histogram_` with a choice of backend.

    >>> h = torch.zeros(2, 4, dtype=torch.int32)
    >>> qb_histogram_(h, torch.tensor([[0.0, 0.0]]), torch.tensor([0.6]), -1.0, 1.0).tolist()
    [[0, 0, 1, 0], [0, 0, 1, 0]]
    """
    check_histogram(hist, logits, cutoff, valid)
    ends = [torch.as_tensor(end, dtype=torch.float32, device=logits.device) for end in (lo, hi)]
    _histogram(hist, logits.detach(), cutoff.detach(), torch.stack(ends), valid, score, _chosen(backend))
    return hist
