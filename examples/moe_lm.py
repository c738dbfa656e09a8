"""A byte-level mixture-of-experts language model, small enough for two CPU cores.

Two pre-norm blocks of causal attention and dropless top-2 experts, each behind a short causal depthwise
convolution. The convolutions start as the identity and give the model its bigrams at once; without them tiny
transformers sit on a plateau until attention forms, and a loss with a plateau follows no power law.

The pieces (`Router`, `Experts`, `MoE`) are meant to be copied into other models.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trajectory_guard.kernels.balancing import AuxLoss, Balancer, QuantileBalancing, SignRule, load_metrics
from trajectory_guard.kernels.routing import Routing, gather, permute, route, unpermute

Balancing = Literal["quantile", "sign", "aux", "none"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Shape of the model; everything scales with `width`."""

    width: int
    """Model dimension d, divisible by 2 heads and by 4 (rows of 16 bytes)."""
    blocks: int = 2
    heads: int = 2
    context: int = 64
    vocabulary: int = 256
    experts: int = 8
    top_k: int = 2
    hidden: int | None = None
    """Hidden dimension of one expert; ``None`` for 2 x width."""
    balancing: Balancing = "quantile"
    shared_expert: bool = False
    """Add one expert that every token visits; off in the committed ladder."""
    swiglu: bool = False
    """Gate the experts' hidden layer by a third matrix; off in the committed ladder."""

    def __post_init__(self) -> None:
        if self.width < 4 or self.width % 4 or self.width % self.heads:
            raise ValueError(f"width must be a positive multiple of 4 and of heads={self.heads}; got {self.width}")
        if not 1 <= self.top_k < self.experts:
            raise ValueError(f"top_k must be in [1, experts - 1 = {self.experts - 1}]; got {self.top_k}")

    @property
    def expert_hidden(self) -> int:
        return 2 * self.width if self.hidden is None else self.hidden


def _normal(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * std)


class _CausalConv(torch.autograd.Function):
    """out[t] = sum over lag of weight[lag] * x[t - lag]; written out because autograd's slices triple its cost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x * weight[0]
        for lag in range(1, len(weight)):
            out[:, lag:].addcmul_(x[:, :-lag], weight[lag])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = grad * weight[0], torch.empty_like(weight)
        grad_weight[0] = (grad * x).sum((0, 1))
        for lag in range(1, len(weight)):
            grad_x[:, :-lag].addcmul_(grad[:, lag:], weight[lag])
            grad_weight[lag] = (grad[:, lag:] * x[:, :-lag]).sum((0, 1))
        return grad_x, grad_weight


class CausalConv(nn.Module):
    """Depthwise convolution over the last `taps` positions, the identity at the start."""

    def __init__(self, width: int, *, taps: int = 4) -> None:
        super().__init__()
        weight = torch.zeros(taps, width)
        weight[0] = 1.0
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return _CausalConv.apply(x, self.weight)


class Attention(nn.Module):
    """Causal multi-head attention without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = _normal(width, 3 * width, std=width**-0.5)
        self.out = _normal(width, width, std=0.5 * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (x @ self.qkv).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width) @ self.out


class Router(nn.Module):
    """Sigmoid scores, top-k by score + the balancer's bias, weights from the unbiased scores.

    The logits are float32 whatever the model computes in: a coarser score makes ties, and ties make a
    recomputed token go elsewhere.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.weight = _normal(config.width, config.experts, std=config.width**-0.5)
        self.balancer = _balancer(config)

    def forward(self, x: Tensor) -> Routing:
        logits, balancer, seen = self.logits(x), self.balancer, x.detach()
        routing = route(logits, self.top_k, bias=balancer.bias, score="sigmoid", cutoff=balancer.wants_cutoff)
        balancer.observe(routing, logits, rescore=lambda: self.logits(seen))
        return routing

    def logits(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return x.float() @ self.weight.float()


def _balancer(config: MoEConfig) -> Balancer:
    experts, k = config.experts, config.top_k
    if config.balancing == "quantile":
        return QuantileBalancing(experts, k, score="sigmoid")
    if config.balancing == "sign":
        return SignRule(experts, k, rate=0.01)
    if config.balancing == "aux":
        return AuxLoss(experts, k)
    return Balancer(experts, k)


class Experts(nn.Module):
    """Independent two-layer networks, one for each contiguous group of rows."""

    def __init__(self, width: int, hidden: int, experts: int, *, swiglu: bool = False) -> None:
        super().__init__()
        self.up = _normal(experts, width, hidden, std=width**-0.5)
        self.gate = _normal(experts, width, hidden, std=width**-0.5) if swiglu else None
        self.down = _normal(experts, hidden, width, std=0.5 * hidden**-0.5)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Apply expert e to rows[ends[e-1] : ends[e]]; rows: (copies, width), ends: (experts,) int32."""
        grouped = _grouped_mm if rows.is_cuda else _looped_mm
        hidden = F.silu(grouped(rows, self.up, ends))
        if self.gate is not None:
            hidden = hidden * grouped(rows, self.gate, ends)
        return grouped(hidden, self.down, ends)


def _grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(rows, weights, offs=ends)  # pyright: ignore[reportPrivateImportUsage]


def _looped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ weight for part, weight in zip(rows.split(sizes), weights.unbind(), strict=True)])


class MoE(nn.Module):
    """Dropless mixture of experts: route, sort copies by expert, apply, weigh and add."""

    auxiliary: Tensor
    """The balancer's loss of the last forward; zero unless the rule works by gradient."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config.width, config.expert_hidden, config.experts, swiglu=config.swiglu)
        self.shared = (
            Experts(config.width, config.expert_hidden, 1, swiglu=config.swiglu) if config.shared_expert else None
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        routing = self.router(tokens)
        self.auxiliary = self.router.balancer.loss(routing)
        order, pos, ends = permute(routing.experts, self.router.balancer.n_experts)
        out = unpermute(self.experts(gather(tokens, order, pos), ends), pos, routing.weights)
        if self.shared is not None:
            out = out + self.shared(tokens, ends.new_tensor([len(tokens)]))
        return out.view_as(x)


class Block(nn.Module):
    """Norm, convolution, attention; norm, convolution, experts; both residual."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.norm_a = nn.LayerNorm(config.width, bias=False)
        self.conv_a = CausalConv(config.width)
        self.attention = Attention(config.width, config.heads)
        self.norm_m = nn.LayerNorm(config.width, bias=False)
        self.conv_m = CausalConv(config.width)
        self.moe = MoE(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.conv_a(self.norm_a(x)))
        return x + self.moe(self.conv_m(self.norm_m(x)))


class MoELM(nn.Module):
    """The language model: byte ids (batch, length) -> logits (batch, length, vocabulary)."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = _normal(config.vocabulary, config.width, std=0.5)
        self.position = _normal(config.context, config.width, std=0.02)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.blocks)])
        self.norm = nn.LayerNorm(config.width, bias=False)
        # Zero: the first loss is ln(256) exactly, and no seed starts ahead.
        self.head = nn.Parameter(torch.zeros(config.width, config.vocabulary))

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.embedding) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.head

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte, without auxiliary losses."""
        return F.cross_entropy(self(ids).flatten(0, 1).float(), targets.flatten())

    def layers(self) -> list[MoE]:
        """The mixture-of-experts layers, first to last."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def auxiliary_loss(self) -> Tensor:
        """Sum of the balancers' losses of the last forward."""
        return torch.stack([layer.auxiliary for layer in self.layers()]).sum()

    def expert_loads(self) -> dict[str, Tensor]:
        """How even the loads of the last optimizer step were, 0-d: the worst layer, named as channels for a guard."""
        loads = [layer.router.balancer.load for layer in self.layers()]
        metrics = [load_metrics(load) for load in loads if load is not None]
        if not metrics:
            return {}
        return {
            "router/max_violation": torch.stack([m.max_violation for m in metrics]).amax(),
            "router/cv": torch.stack([m.cv for m in metrics]).amax(),
            "router/dead_experts": torch.stack([m.dead for m in metrics]).sum().float(),
            "router/entropy": torch.stack([m.entropy for m in metrics]).amin(),
        }

    def router_metrics(self) -> dict[str, Tensor]:
        """The loads, and the range of the balancing biases, for a logger: the biases wander in a healthy run too."""
        biases = [layer.router.balancer.bias for layer in self.layers()]
        widest = torch.stack([bias.amax() - bias.amin() for bias in biases]).amax()
        return {**self.expert_loads(), "router/bias_range": widest}

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: the head and top_k of the experts counted, embeddings not."""
        count = sum(p.numel() for p in self.parameters()) - self.embedding.numel() - self.position.numel()
        for layer in self.layers():
            routed = sum(p.numel() for p in layer.experts.parameters())
            count -= routed - routed * self.config.top_k // self.config.experts
        return count
