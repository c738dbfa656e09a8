"""Balancing rules for mixture-of-experts routers, behind one small interface.

How to use it, with one balancer a MoE layer::

    self.balancer = QuantileBalancing(n_experts, k)              # or SignRule(...), AuxLoss(...)
    ...
    r = route(logits, k, bias=self.balancer.bias, cutoff=self.balancer.wants_cutoff)
    self.balancer.observe(r, logits)                             # counts only in training with grad enabled
    aux = self.balancer.loss(r)                                  # 0 unless AuxLoss
    ...
    handle = attach(optimizer, model)                            # once: updates every balancer after optimizer.step
    metrics = load_metrics(self.balancer.load)                   # after a step: the loads of that step's global batch

The bias is a persistent float32 buffer and stays float32 through `.half()` and `.to(dtype)`; it is updated once per
optimizer step, from all micro-batches since the last step and all ranks, after one all-reduce of the stacked layers.
Checkpoint at step boundaries: counts of an unfinished step are not saved.
"""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from trajectory_guard.kernels.checks import RoutingError
from trajectory_guard.kernels.loads import LoadMetrics, load_metrics
from trajectory_guard.kernels.quantile import histogram_quantile, solve
from trajectory_guard.kernels.reference import Routing, Score, load_balance_loss, required_bias
from trajectory_guard.kernels.routing import qb_histogram_

__all__ = ["AuxLoss", "Balancer", "LoadMetrics", "QuantileBalancing", "SignRule", "attach", "load_metrics"]


class Balancer(nn.Module):
    """One router's balancing rule: the base class balances nothing and counts loads.

    Args:
        n_experts: E.
        k: experts a token.
    """

    bias: Tensor
    """[E] float32 persistent buffer; pass it to `route`."""
    wants_cutoff: bool = False
    """Whether `route` must be called with cutoff=True."""

    def __init__(self, n_experts: int, k: int) -> None:
        super().__init__()
        if n_experts < 1 or not 1 <= k <= n_experts:
            raise RoutingError(f"k must be from 1 to n_experts, got k = {k}, n_experts = {n_experts}")
        self.n_experts, self.k = n_experts, k
        self.register_buffer("bias", torch.zeros(n_experts))
        # Counts are plain attributes: DistributedDataParallel overwrites buffers with rank 0's before each forward.
        self.load: Tensor | None = None
        self._counts: Tensor | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Balancer":
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    def observe(
        self,
        r: Routing,
        logits: Tensor,
        *,
        valid: Tensor | None = None,
        rescore: Callable[[], Tensor] | None = None,
    ) -> None:
        """Count one micro-batch; does nothing in eval mode, without grad, or when a checkpoint recomputes.

        Args:
            r: what `route` returned.
            logits: [T, E] what it was given.
            valid: [T] bool, False for padding.
            rescore: returns these tokens' logits [T, E] by the router's weights at the time of the call, which is after
                the optimizer's; used by `QuantileBalancing(method="exact")` alone, and keeps alive what it refers to.
        """
        if not self.training or not torch.is_grad_enabled() or _recomputing():
            return
        if r.counts is None:
            raise RoutingError("balancing needs the statistics: route(..., stats=True)")
        with torch.no_grad():
            self._counts = r.counts.clone() if self._counts is None else self._counts + r.counts
            self._collect(r, logits.detach(), valid, rescore)

    def loss(self, r: Routing) -> Tensor:
        """A term for the training loss, 0-d; zero unless the rule works by gradient."""
        return torch.zeros((), device=r.weights.device)

    def statistics(self) -> Tensor:
        """Int32 [n], the same n on every rank: what is summed over ranks before `update`."""
        return torch.zeros_like(self.bias, dtype=torch.int32) if self._counts is None else self._counts

    def samples(self) -> Tensor | None:
        """Float32 [n, E], n free: what no sum can carry, gathered from all ranks before `update`; mostly None."""
        return None

    @torch.no_grad()
    def update(self, statistics: Tensor | None = None, samples: Tensor | None = None) -> None:
        """End the optimizer step: set `load`, change the bias, forget the counts.

        Args:
            statistics: the sum of `statistics()` over ranks; by default this rank's alone.
            samples: the rows of `samples()` from all ranks, rows of NaN among them; by default this rank's alone.
        """
        total = self.statistics() if statistics is None else statistics
        self.load = total[: self.n_experts].clone()
        self._step(total, self.samples() if samples is None else samples)
        self._counts = None

    def _collect(self, r: Routing, logits: Tensor, valid: Tensor | None, rescore: Callable[[], Tensor] | None) -> None:
        """Keep more than the counts."""

    def _step(self, total: Tensor, samples: Tensor | None) -> None:
        """Change the bias given the global statistics."""


class SignRule(Balancer):
    """Auxiliary-loss-free balancing: bias_e += rate * sign(mean load - load_e).

    Of Wang et al. (2024), arXiv:2408.15664, Algorithm 1; their rate for sigmoid scores is 0.001.

    Args:
        n_experts: E.
        k: experts a token.
        rate: step of the bias, in units of the score.

    >>> b = SignRule(2, 1, rate=0.5)
    >>> b.update(torch.tensor([3, 1], dtype=torch.int32))
    >>> b.bias.tolist()
    [-0.5, 0.5]
    """

    def __init__(self, n_experts: int, k: int, *, rate: float = 0.001) -> None:
        super().__init__(n_experts, k)
        if not rate > 0:
            raise RoutingError(f"rate must be positive, got {rate}")
        self.rate = rate

    def _step(self, total: Tensor, samples: Tensor | None) -> None:
        load = total.double()
        self.bias += self.rate * torch.sign(load.mean() - load).float()


class AuxLoss(Balancer):
    """The load-balance loss of `load_balance_loss` times a coefficient; the bias stays zero.

    Args:
        n_experts: E.
        k: experts a token.
        coefficient: weight in the training loss; 0.01 in Fedus et al., JMLR 23 (2022), section 2.2.
    """

    def __init__(self, n_experts: int, k: int, *, coefficient: float = 0.01) -> None:
        super().__init__(n_experts, k)
        if not coefficient >= 0:
            raise RoutingError(f"coefficient must not be negative, got {coefficient}")
        self.coefficient = coefficient

    def loss(self, r: Routing) -> Tensor:
        """Coefficient * E * sum(f_e P_e), 0-d, with gradient to the logits."""
        return self.coefficient * load_balance_loss(r)


class QuantileBalancing(Balancer):
    """Quantile balancing: the bias at which each expert would have been chosen by its fair share of the last batch.

    For a token t with alpha_t the (k+1)-th largest score + bias, expert e needs the bias r_te = alpha_t - score_te.
    Next step's bias is the k/E quantile of r_te over the global batch, less the mean over experts. No rate to tune;
    the rule solves the last batch, so small batches want an `ema`.

    Where the router moves much from step to step, the last batch's scores are no longer those that the next one will
    get, and one pass does not reach even loads. `method="exact"` with `passes=5` and `observe(..., rescore=...)` solves
    that batch anew with the weights after the step.

    Args:
        n_experts: E, above k.
        k: experts a token.
        score: the `score` given to `route`.
        method: `histogram` sums one histogram over ranks and interpolates in a bin; `exact` keeps every r_te of a step
            (T * E floats a layer, or what `rescore` refers to) and gathers them from all ranks.
        bins: bins of the histogram over [min bias - 1, max bias + 1].
        ema: share of the old bias that is kept, in [0, 1).
        passes: alternations of alpha and quantile on the same batch, see `quantile.solve`; more than 1 needs `exact`.

    >>> from trajectory_guard.kernels.reference import route
    >>> b = QuantileBalancing(2, 1, method="exact")
    >>> logits = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.5, 0.0], [0.2, 0.0]], requires_grad=True)
    >>> for _ in range(3):
    ...     b.observe(route(logits, 1, bias=b.bias, cutoff=True), logits)
    ...     b.update()
    >>> b.load.tolist(), route(logits, 1, bias=b.bias).counts.tolist()
    ([2, 2], [2, 2])
    """

    bounds: Tensor
    """[2] float32 persistent buffer: lower and upper bound of the required biases in this step."""
    wants_cutoff = True

    def __init__(
        self,
        n_experts: int,
        k: int,
        *,
        score: Score = "softmax",
        method: Literal["histogram", "exact"] = "histogram",
        bins: int = 1000,
        ema: float = 0.0,
        passes: int = 1,
    ) -> None:
        super().__init__(n_experts, k)
        if k >= n_experts:
            raise RoutingError(f"quantile balancing needs k below n_experts, got k = {k}, n_experts = {n_experts}")
        if method not in ("histogram", "exact"):
            raise RoutingError(f"method must be `histogram` or `exact`, got {method!r}")
        if bins < 2:
            raise RoutingError(f"bins must be at least 2, got {bins}")
        if not 0.0 <= ema < 1.0:
            raise RoutingError(f"ema must be in [0, 1), got {ema}")
        if passes < 1 or (passes > 1 and method != "exact"):
            raise RoutingError(f"passes must be 1, or more with method `exact`, got {passes} with {method!r}")
        self.score: Score = score
        self.method, self.bins, self.ema, self.passes = method, bins, ema, passes
        self.register_buffer("bounds", torch.tensor([-1.0, 1.0]))
        self._hist: Tensor | None = None
        self._required: list[Tensor | Callable[[], Tensor]] = []

    def statistics(self) -> Tensor:
        """Loads [E], then for the histogram method its E * bins counts."""
        load = super().statistics()
        if self.method == "exact":
            return load
        if self._hist is None:
            return torch.cat([load, load.new_zeros(self.n_experts * self.bins)])
        return torch.cat([load, self._hist.view(-1)])

    def samples(self) -> Tensor | None:
        """Required biases of the exact method, each token's up to a constant."""
        if self.method != "exact":
            return None
        rows = [r if isinstance(r, Tensor) else r() for r in self._required]
        return torch.cat([self.bias.new_zeros(0, self.n_experts), *rows])

    def _collect(self, r: Routing, logits: Tensor, valid: Tensor | None, rescore: Callable[[], Tensor] | None) -> None:
        if r.cutoff is None:
            raise RoutingError("quantile balancing needs the cutoff: route(..., cutoff=balancer.wants_cutoff)")
        if self.method == "exact":
            cutoff, keep = r.cutoff, slice(None) if valid is None else valid

            def required(scored: Tensor) -> Tensor:
                return required_bias(scored, cutoff, self.score).float()[keep]

            self._required.append(required(logits) if rescore is None else lambda: required(rescore()))
            return
        if self._hist is None:
            self._hist = torch.zeros(self.n_experts, self.bins, dtype=torch.int32, device=logits.device)
        qb_histogram_(self._hist, logits, r.cutoff, self.bounds[0], self.bounds[1], score=self.score, valid=valid)

    def _step(self, total: Tensor, samples: Tensor | None) -> None:
        if samples is not None:
            fresh = solve(samples, self.bias, self.k, self.passes)
        else:
            hist = total[self.n_experts :].view(self.n_experts, self.bins)
            fresh = histogram_quantile(hist, self.k / self.n_experts, self.bounds[0], self.bounds[1])
            fresh = torch.where(fresh.isnan(), self.bias, fresh)  # an expert without one finite logit keeps its bias
            fresh = fresh - fresh.mean()
        self._hist, self._required = None, []
        fresh = self.ema * self.bias + (1.0 - self.ema) * fresh
        self.bias.copy_(fresh)
        self.bounds.copy_(torch.stack([fresh.amin() - 1.0, fresh.amax() + 1.0]))


def _recomputing() -> bool:
    """Whether autograd is running backward, so that this forward is a checkpoint's second one."""
    if torch.compiler.is_compiling():
        return False
    running = getattr(torch._C, "_current_graph_task_id", None)
    return running is not None and running() != -1


def attach(
    optimizer: torch.optim.Optimizer, balancers: nn.Module | Iterable[Balancer], *, group: object = None
) -> torch.utils.hooks.RemovableHandle:
    """Update every balancer once per optimizer step, after it, from the sums over all ranks of `group`.

    After, not before: where `optimizer.step(closure)` runs forward and backward itself (Lightning does), a hook before
    it would see the counts of the step before, and a checkpoint in between would lose them.

    All layers travel in one all-reduce, and those of the exact quantile method in one all-gather besides. Every rank
    must step the same number of times: the collectives are in `optimizer.step`, and a rank that skips it hangs the
    rest.

    Args:
        optimizer: its step post-hook is used.
        balancers: balancers, or a model whose modules are searched for them.
        group: process group; the default one when torch.distributed is initialised.

    Returns:
        A handle; handle.remove() detaches.
    """
    if isinstance(balancers, nn.Module):
        balancers = [m for m in balancers.modules() if isinstance(m, Balancer)]
    found = list(balancers)
    if not found:
        raise RoutingError("no balancer found: give the model's Balancer modules, or the model that holds them")

    @torch.no_grad()
    def after_step(*_: object) -> None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            for balancer in found:
                balancer.update()
            return
        parts = [balancer.statistics() for balancer in found]
        total = torch.cat(parts)
        torch.distributed.all_reduce(total, group=group)  # pyright: ignore
        samples = _gather([balancer.samples() for balancer in found], group)
        for balancer, part, rows in zip(found, total.split([len(p) for p in parts]), samples, strict=True):
            balancer.update(part, rows)

    return optimizer.register_step_post_hook(after_step)


def _gather(samples: list[Tensor | None], group: object) -> list[Tensor | None]:
    """Each layer's rows from all ranks, in the ranks' order; short ones are filled up with rows of NaN."""
    mine = [rows for rows in samples if rows is not None]
    if not mine:
        return samples
    most = torch.tensor(max(len(rows) for rows in mine), device=mine[0].device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)  # pyright: ignore
    n = int(most)
    flat = torch.cat([nn.functional.pad(rows, (0, 0, 0, n - len(rows)), value=float("nan")).view(-1) for rows in mine])
    ranks = [torch.empty_like(flat) for _ in range(torch.distributed.get_world_size(group))]  # pyright: ignore
    torch.distributed.all_gather(ranks, flat, group=group)  # pyright: ignore
    sizes = [n * rows.shape[1] for rows in mine]
    pieces = zip(*(rank.split(sizes) for rank in ranks), strict=True)
    return [None if rows is None else torch.cat(next(pieces)).view(-1, rows.shape[1]) for rows in samples]
