"""The stable permutation of token copies by expert, and the two moves of rows along it, in plain torch."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from trajectory_guard.kernels.checks import RoutingError, check_permute

__all__ = ["gather", "permute", "unpermute"]


def permute(experts: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the token copies by expert, stably: by (expert, token).

    Args:
        experts: [T, k] int32 indices in [0, n_experts), distinct in a row (as `route` gives them).
        n_experts: E.

    Returns:
        order [T*k] int32: place j of the sorted copies holds copy order[j] = t * k + i, so token order[j] // k.
        pos [T, k] int32: the place of copy (t, i); order[pos[t, i]] = t * k + i.
        offs [E] int32: end of each expert's places (the `offs` of `torch._grouped_mm`).

    >>> order, pos, offs = permute(torch.tensor([[1, 0], [1, 2]], dtype=torch.int32), 3)
    >>> order.tolist(), pos.tolist(), offs.tolist()
    ([1, 0, 2, 3], [[1, 0], [2, 3]], [1, 3, 4])
    """
    check_permute(experts, n_experts)
    copies = experts.numel()
    flat = experts.reshape(-1)
    counts = torch.bincount(flat, minlength=n_experts)
    if counts.shape[0] > n_experts:
        raise RoutingError(f"experts holds an index of {counts.shape[0] - 1}, beyond the {n_experts} experts")
    order = torch.sort(flat, stable=True)[1]
    pos = torch.empty(copies, dtype=torch.int32, device=flat.device)
    pos[order] = torch.arange(copies, dtype=torch.int32, device=flat.device)
    return order.to(torch.int32), pos.view(experts.shape), counts.cumsum(0, dtype=torch.int32)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, pos):
        ctx.save_for_backward(pos)
        return x.index_select(0, order // pos.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (pos,) = ctx.saved_tensors
        return _rows(grad, pos).sum(1).to(grad.dtype), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, pos, weights):
        ctx.save_for_backward(y, pos, weights)
        return (_rows(y, pos) * weights.to(y.dtype)[:, :, None]).sum(1).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        y, pos, weights = ctx.saved_tensors
        g_y = g_weights = None
        if ctx.needs_input_grad[0]:
            copies = grad[:, None, :] * weights.to(grad.dtype)[:, :, None]
            g_y = torch.empty_like(y)
            g_y[pos.reshape(-1).long()] = copies.reshape(y.shape)
        if ctx.needs_input_grad[2]:
            g_weights = (_rows(y, pos) * grad[:, None, :]).sum(-1).to(weights.dtype)
        return g_y, None, g_weights


def _rows(y: Tensor, pos: Tensor) -> Tensor:
    return y.index_select(0, pos.reshape(-1)).view(*pos.shape, y.shape[-1])


def gather(x: Tensor, order: Tensor, pos: Tensor) -> Tensor:
    """Copy each token's row to the places of its k copies: [T, D] -> [T*k, D], row j = x[order[j] // k].

    The gradient adds a token's k copies in fixed order (no atomics), so it is bitwise repeatable.

    >>> order, pos, _ = permute(torch.tensor([[1], [0]], dtype=torch.int32), 2)
    >>> gather(torch.tensor([[1.0], [2.0]]), order, pos).tolist()
    [[2.0], [1.0]]
    """
    return _Gather.apply(x, order, pos)


def unpermute(y: Tensor, pos: Tensor, weights: Tensor) -> Tensor:
    """Bring the experts' outputs home: out[t] = sum over i of weights[t, i] * y[pos[t, i]], in fixed order.

    Args:
        y: [T*k, D] in the order of `permute`.
        pos: [T, k] int32 of `permute`.
        weights: [T, k] of `route`; used in y's dtype.

    Returns:
        [T, D] in y's dtype, differentiable in y and weights.

    >>> unpermute(torch.tensor([[2.0], [4.0]]), torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([[0.5, 1.0]]))
    tensor([[4.]])
    """
    return _Unpermute.apply(y, pos, weights)
