"""The CUDA path of each operation: allocate, launch. Arguments are checked by the callers in `routing.py`."""

from functools import cache

import torch
from torch import Tensor
from trajectory_guard.kernels import nvrtc
from trajectory_guard.kernels.nvrtc import BLOCK_TOKENS, HISTOGRAM_WORDS, Constants

__all__ = ["fused_backward", "fused_forward", "fused_histogram_", "fused_permute", "unsupported"]

MAX_EXPERTS = 1024
MAX_TOPK = 32
_ELEM = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def unsupported(dtype: torch.dtype, n_experts: int, k: int, bins: int = 1) -> str:
    """Why the kernels cannot take a call, or an empty string when they can."""
    if dtype not in _ELEM:
        return f"logits are {dtype}, the kernels take float32, bfloat16 and float16"
    if n_experts > MAX_EXPERTS:
        return f"{n_experts} experts, the kernels take at most {MAX_EXPERTS}"
    if k > MAX_TOPK:
        return f"k = {k}, the kernels take at most {MAX_TOPK}"
    if bins > HISTOGRAM_WORDS:
        return f"{bins} bins, the kernels take at most {HISTOGRAM_WORDS}"
    return ""


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@cache
def _arch(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _launch(name: str, constants: Constants, blocks: int, on: Tensor, *arguments: Tensor | int | float | None) -> None:
    values = [_address(a) if a is None or isinstance(a, Tensor) else a for a in arguments]
    index = on.get_device()
    with torch.cuda.device(index):
        nvrtc.launch(
            name,
            constants,
            blocks,
            values,
            device=index,
            arch=_arch(index),
            stream=torch.cuda.current_stream(index).cuda_stream,
        )


def _wide(logits: Tensor, *others: Tensor) -> int:
    """1 when rows may be read and written in 16-byte pieces."""
    aligned = all(t.data_ptr() % 16 == 0 for t in (logits, *others))
    return int(aligned and logits.shape[1] * logits.element_size() % 16 == 0)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def fused_forward(
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
    """`reference.route_forward` by the kernels."""
    tokens, n_experts = logits.shape
    logits = logits.contiguous()
    bias = None if bias is None else bias.to(torch.float32).contiguous()
    valid = None if valid is None else valid.contiguous()
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    alpha = torch.empty(tokens, dtype=torch.float32, device=logits.device) if cutoff else None
    counts = torch.zeros(n_experts, dtype=torch.int32, device=logits.device) if stats else None
    psum = torch.zeros(n_experts, dtype=torch.float32, device=logits.device) if stats else None
    lse = torch.empty(tokens, dtype=torch.float32, device=logits.device) if stats else None
    if tokens == 0:
        return weights, experts, counts, psum, lse, alpha
    constants = Constants(
        experts=n_experts,
        topk=k,
        elem=_ELEM[logits.dtype],
        sigmoid=score == "sigmoid",
        norm=norm,
        cutoff=cutoff,
        stats=stats,
    )
    blocks = _blocks(tokens)
    part_counts = part_psum = None
    if stats:
        part_counts = torch.empty(blocks, n_experts, dtype=torch.int32, device=logits.device)
        part_psum = torch.empty(blocks, n_experts, dtype=torch.float32, device=logits.device)
    _launch(
        "route_forward", constants, blocks, logits, logits, bias, valid, weights, experts, lse, alpha,
        part_counts, part_psum, tokens, _wide(logits), float(scale),
    )  # fmt: skip
    if stats:
        _launch("route_reduce", constants, -(-n_experts // 32), logits, part_counts, part_psum, counts, psum, blocks)
    return weights, experts, counts, psum, lse, alpha


def fused_backward(
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
    """`reference.route_backward` by the kernels."""
    logits, experts = logits.contiguous(), experts.contiguous()
    valid = None if valid is None else valid.contiguous()
    grads = [None if g is None else g.to(torch.float32).contiguous() for g in (g_weights, g_psum, g_lse)]
    g_logits = torch.empty_like(logits)
    if logits.shape[0] == 0:
        return g_logits
    constants = Constants(
        experts=logits.shape[1],
        topk=experts.shape[1],
        elem=_ELEM[logits.dtype],
        sigmoid=score == "sigmoid",
        norm=norm,
    )
    tokens = logits.shape[0]
    _launch(
        "route_backward", constants, _blocks(tokens), logits, logits, experts, valid, *grads, g_logits, tokens,
        _wide(logits, g_logits), float(scale),
    )  # fmt: skip
    return g_logits


def fused_permute(experts: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """`copies.permute` by the kernels."""
    experts = experts.contiguous()
    tokens, k = experts.shape
    order = torch.zeros(tokens * k, dtype=torch.int32, device=experts.device)
    pos = torch.empty(tokens, k, dtype=torch.int32, device=experts.device)
    offs = torch.zeros(n_experts, dtype=torch.int32, device=experts.device)
    if tokens == 0:
        return order, pos, offs
    constants = Constants(experts=n_experts, topk=k)
    blocks = _blocks(tokens)
    part = torch.empty(blocks, n_experts, dtype=torch.int32, device=experts.device)
    totals = torch.empty(n_experts, dtype=torch.int32, device=experts.device)
    _launch("permute_count", constants, blocks, experts, experts, part, tokens)
    _launch("permute_scan", constants, -(-n_experts // 32), experts, part, totals, blocks)
    _launch("permute_place", constants, blocks, experts, experts, part, totals, order, pos, offs, tokens)
    return order, pos, offs


def fused_histogram_(
    hist: Tensor, logits: Tensor, cutoff: Tensor, bounds: Tensor, score: str, valid: Tensor | None
) -> None:
    """`reference.qb_histogram_` by the kernels; `hist` must be contiguous."""
    logits, cutoff, bounds = logits.contiguous(), cutoff.float().contiguous(), bounds.float().contiguous()
    valid = None if valid is None else valid.contiguous()
    tokens, n_experts = logits.shape
    if tokens == 0:
        return
    constants = Constants(experts=n_experts, elem=_ELEM[logits.dtype], sigmoid=score == "sigmoid")
    rows = None
    if score == "softmax":
        rows = torch.empty(tokens, 2, dtype=torch.float32, device=logits.device)
        _launch("histogram_rows", constants, _blocks(tokens), logits, logits, rows, tokens, _wide(logits))
    bins = hist.shape[1]
    each = min(n_experts, 8, HISTOGRAM_WORDS // bins)
    chunk = 4096
    blocks = -(-n_experts // each) * -(-tokens // chunk)
    _launch(
        "histogram_bins", constants, blocks, logits, logits, cutoff, rows, bounds, valid, hist, tokens, bins,
        each, chunk,
    )  # fmt: skip
