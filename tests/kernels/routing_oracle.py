"""Routing in float64 numpy, written from the contract alone, and the rows of logits that the kernels are tried on."""

from dataclasses import dataclass

import numpy as np

NAN_POSITIVE = np.array([0x7FC00000], np.uint32).view(np.float32)[0]
NAN_NEGATIVE = np.array([0xFFC00000], np.uint32).view(np.float32)[0]


def rows(n_experts: int, seed: int) -> tuple[np.ndarray, int, int]:
    """37 rows of float32 logits; the first `exact` have no near-ties, the first `finite` have finite statistics."""
    rng = np.random.default_rng(seed)
    grid = np.round(rng.normal(0, 1, (10, n_experts)) * 4) / 4  # many exact ties, none nearer than a quarter
    constant = np.repeat([[0.0], [-0.0], [3.5]], n_experts, 1)
    zeros = np.where(rng.random((1, n_experts)) < 0.5, 0.0, -0.0)
    masked = np.where(rng.random((4, n_experts)) < 0.5, -np.inf, np.round(rng.normal(0, 1, (4, n_experts)) * 2) / 2)
    masked[:, 0] = 1.0
    one = np.full((1, n_experts), -np.inf)
    one[0, n_experts // 2] = 0.25
    exact = np.concatenate([grid, constant, zeros, masked, one])
    smooth = np.concatenate([rng.normal(0, 1, (4, n_experts)), rng.normal(-20, 3, (1, n_experts)),
                             rng.uniform(-80, 80, (2, n_experts)), np.full((1, n_experts), -90.0)])  # fmt: skip
    nans = np.round(rng.normal(0, 1, (7, n_experts)) * 4).astype(np.float32) / 4
    for i, nan in enumerate([NAN_POSITIVE, NAN_NEGATIVE] * 2):
        nans[i, rng.integers(0, n_experts, 1 + i * n_experts // 8)] = nan
    nans[4] = np.where(rng.random(n_experts) < 0.5, NAN_POSITIVE, NAN_NEGATIVE)
    nans[5, ::3], nans[5, 1::3] = -np.inf, NAN_NEGATIVE
    nans[6, n_experts - 1] = NAN_POSITIVE
    infinite = np.round(rng.normal(0, 1, (3, n_experts)) * 4) / 4
    infinite[0, n_experts // 3] = np.inf
    infinite[1, ::2] = np.inf
    infinite[2] = -np.inf
    parts = [part.astype(np.float32) for part in (exact, smooth, nans, infinite)]
    everything = np.concatenate(parts)
    everything[len(exact) + len(smooth) : len(exact) + len(smooth) + 7] = nans  # keeps the NaN bits
    return everything, len(exact), len(exact) + len(smooth)


@dataclass
class Oracle:
    """What the contract says of float32-valued logits, in float64."""

    x: np.ndarray
    score: str
    bias: np.ndarray | None

    def __post_init__(self) -> None:
        x = self.x.astype(np.float64)
        with np.errstate(all="ignore"):
            top = x.max(-1, keepdims=True)
            e = np.exp(x - top)
            self.softmax = e / e.sum(-1, keepdims=True)
            safe = np.where(np.isfinite(top), top, 0.0)
            self.lse = (safe + np.log(np.exp(x - safe).sum(-1, keepdims=True)))[:, 0]
            self.s = self.softmax if self.score == "softmax" else 1 / (1 + np.exp(-x))
            choice = self.s if self.bias is None else self.s + self.bias.astype(np.float64)
        self.choice = np.where(x == -np.inf, -np.inf, choice)
        nan = np.isnan(self.choice)
        index = np.broadcast_to(np.arange(x.shape[1]), x.shape)
        self.order = np.lexsort((index, -np.where(nan, 0.0, self.choice), nan), axis=-1)
        # Class of equal (logit, bias), and the place of each expert in its class by index.
        bias = np.zeros(x.shape[1]) if self.bias is None else self.bias.astype(np.float64)
        self.group = np.empty(x.shape, np.int64)
        self.rank = np.empty(x.shape, np.int64)
        for t in range(len(x)):
            row = np.where(np.isnan(self.choice[t]), np.nan, x[t])
            pair = np.stack([np.nan_to_num(row, nan=1e30, posinf=2e30, neginf=-2e30) + 0.0, bias], 1)
            if np.isnan(self.choice[t]).any() or not np.isfinite(x[t]).all():
                pair[np.isnan(self.choice[t]), 1] = 0.0
                pair[x[t] == -np.inf, 1] = 0.0
            _, group = np.unique(pair, axis=0, return_inverse=True)
            group = group.reshape(-1)
            by = np.argsort(group, kind="stable")
            start = np.searchsorted(group[by], np.arange(group.max() + 1))
            self.group[t] = group
            self.rank[t, by] = np.arange(len(group)) - start[group[by]]

    def key(self, chosen: np.ndarray) -> np.ndarray:
        """Choices of chosen experts, NaN as below every number, for comparisons with a tolerance."""
        c = np.take_along_axis(self.choice[: len(chosen)], chosen, 1)
        return np.where(np.isnan(c), -3e30, np.where(c == -np.inf, -2e30, c))

    def check_choice(self, chosen: np.ndarray, exact: int, tolerance: float = 2e-6) -> None:
        """A valid top-k: exact rows as the stable sort, others within the tolerance; equal choices by index."""
        n, k = chosen.shape
        chosen = chosen.astype(np.int64)
        assert (chosen >= 0).all() and (chosen < self.x.shape[1]).all(), "an index outside [0, E)"
        by = np.sort(chosen, -1)
        assert (by[:, 1:] != by[:, :-1]).all(), "an expert twice in a row"
        want = self.order[:n, :k]
        if exact:
            assert (chosen[:exact] == want[:exact]).all(), "not the stable sort's order"
        mine, best = self.key(chosen), self._best(n, k)
        assert (np.abs(mine - best) <= tolerance).all(), "not a top-k of the float64 choice"
        group = np.take_along_axis(self.group[:n], chosen, 1)
        rank = np.take_along_axis(self.rank[:n], chosen, 1)
        before = (group[:, :, None] == group[:, None, :]) & np.tri(k, k, -1, dtype=bool)
        assert (before.sum(-1) == rank).all(), "equal choices out of order"

    def _best(self, n: int, k: int) -> np.ndarray:
        if not hasattr(self, "_sorted"):
            self._sorted = self.key(self.order)
        return self._sorted[:n, :k]

    def weights(self, chosen: np.ndarray, norm: bool, scale: float) -> np.ndarray:
        s = np.take_along_axis(self.s[: len(chosen)], chosen.astype(np.int64), 1)
        return scale * (s / (s.sum(-1, keepdims=True) + 1e-20) if norm else s)

    def counts(self, chosen: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
        kept = chosen if valid is None else chosen[valid[: len(chosen)]]
        return np.bincount(kept.reshape(-1), minlength=self.x.shape[1])

    def psum(self, n: int, valid: np.ndarray | None) -> np.ndarray:
        s = self.s[:n]
        return (s if valid is None else s[valid[:n]]).sum(0)

    def backward(self, chosen, valid, norm, scale, g_weights, g_psum, g_lse) -> np.ndarray:
        """Gradient to the logits by the chain rule with full Jacobians of the normalisation."""
        s, n = self.s, len(self.s)
        keep = np.ones(n, bool) if valid is None else valid
        ds = np.zeros_like(s)
        with np.errstate(all="ignore"):
            if g_weights is not None:
                c = chosen.astype(np.int64)
                picked, g = np.take_along_axis(s, c, 1), g_weights.astype(np.float64) * scale
                if norm:
                    d = picked.sum(-1, keepdims=True) + 1e-20
                    g = (g - (g * (picked / d)).sum(-1, keepdims=True)) / d
                np.put_along_axis(ds, c, g, 1)
            if g_psum is not None:
                ds = ds + np.where(keep[:, None], g_psum.astype(np.float64), 0.0)
            dx = s * (ds - (s * ds).sum(-1, keepdims=True)) if self.score == "softmax" else ds * s * (1 - s)
            if g_lse is not None:
                dx = dx + np.where(keep[:, None], g_lse.astype(np.float64)[:, None] * self.softmax, 0.0)
        return dx
