"""Checks of the arguments that every backend shares: each error says what was wrong, what was got and what to do."""

import torch
from torch import Tensor

from trajectory_guard.errors import TrajectoryGuardError

__all__ = ["RoutingError", "check_copies", "check_histogram", "check_permute", "check_route", "check_valid"]


class RoutingError(TrajectoryGuardError):
    """The arguments of a routing function do not fit together."""


def check_route(logits: Tensor, k: int, bias: Tensor | None, score: str, cutoff: bool, valid: Tensor | None) -> None:
    """Raise `RoutingError` for arguments of `route` that cannot be routed."""
    if logits.dim() != 2:
        raise RoutingError(f"logits must be [tokens, experts], got shape {list(logits.shape)}: reshape(-1, E) first")
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise RoutingError(f"logits must be float32, bfloat16, float16 or float64, got {logits.dtype}")
    tokens, n_experts = logits.shape
    if isinstance(k, bool) or not isinstance(k, int | torch.SymInt) or k < 1 or k > n_experts:
        raise RoutingError(f"k must be an integer from 1 to the number of experts {n_experts}, got {k!r}")
    if cutoff and k >= n_experts:
        raise RoutingError(f"cutoff needs a (k+1)-th expert: k = {k} leaves none of {n_experts}; use cutoff=False")
    if score not in ("softmax", "sigmoid"):
        raise RoutingError(f"score must be `softmax` or `sigmoid`, got {score!r}")
    check_copies(tokens, k)
    if bias is not None:
        if bias.dim() != 1 or bias.shape[0] != n_experts:
            raise RoutingError(f"bias must be [experts] = [{n_experts}], got shape {list(bias.shape)}")
        if not bias.is_floating_point():
            raise RoutingError(f"bias must be floating point, got {bias.dtype}")
        if bias.device != logits.device:
            raise RoutingError(f"bias is on {bias.device}, logits on {logits.device}: move the bias there")
    check_valid(valid, logits)


def check_copies(tokens: int, k: int) -> None:
    """Raise `RoutingError` when the token copies cannot be counted in int32."""
    if tokens * k >= 2**31:
        raise RoutingError(f"tokens * k must be below 2**31, got {tokens} * {k}: route in smaller batches")


def check_valid(valid: Tensor | None, logits: Tensor) -> None:
    """Raise `RoutingError` unless `valid` is None or a bool mask over the tokens of `logits`."""
    if valid is None:
        return
    if valid.dtype != torch.bool or valid.dim() != 1 or valid.shape[0] != logits.shape[0]:
        raise RoutingError(f"valid must be bool [tokens] = [{logits.shape[0]}], got {valid.dtype} {list(valid.shape)}")
    if valid.device != logits.device:
        raise RoutingError(f"valid is on {valid.device}, logits on {logits.device}: move the mask there")


def check_permute(experts: Tensor, n_experts: int) -> None:
    """Raise `RoutingError` for arguments of `permute` that do not fit."""
    if experts.dim() != 2 or experts.dtype != torch.int32:
        raise RoutingError(f"experts must be int32 [tokens, k], got {experts.dtype} {list(experts.shape)}")
    if n_experts < 1:
        raise RoutingError(f"n_experts must be at least 1, got {n_experts}")
    check_copies(experts.shape[0], experts.shape[1])


def check_histogram(hist: Tensor, logits: Tensor, cutoff: Tensor, valid: Tensor | None) -> None:
    """Raise `RoutingError` for arguments of `qb_histogram_` that do not fit."""
    if logits.dim() != 2:
        raise RoutingError(f"logits must be [tokens, experts], got shape {list(logits.shape)}")
    if hist.dim() != 2 or hist.dtype != torch.int32 or hist.shape[0] != logits.shape[1] or hist.shape[1] < 1:
        raise RoutingError(
            f"hist must be int32 [experts, bins] with {logits.shape[1]} experts, got {hist.dtype} {list(hist.shape)}"
        )
    if cutoff is None or cutoff.dim() != 1 or cutoff.shape[0] != logits.shape[0]:
        got = None if cutoff is None else list(cutoff.shape)
        raise RoutingError(f"cutoff must be [tokens] = [{logits.shape[0]}], got {got}: route(..., cutoff=True)")
    if hist.device != logits.device or cutoff.device != logits.device:
        raise RoutingError(f"hist is on {hist.device}, cutoff on {cutoff.device}, logits on {logits.device}")
    check_valid(valid, logits)
