"""The numerics contract of trajectory_guard.kernels.reference, line by line, on every backend."""

import itertools
import math

import numpy as np
import pytest
import routing_oracle
import torch
from trajectory_guard.kernels import reference, routing

INF, NAN = float("inf"), float("nan")


def logits_of(backend, tokens, n_experts, dtype=torch.float32, seed=0, step=None):
    x = torch.randn(tokens, n_experts, generator=torch.Generator().manual_seed(seed))
    if step:
        x = (x / step).round() * step
    return x.to(dtype).to(backend.device)


def route(backend, logits, k, **options):
    r = routing.route(logits, k, backend=backend.name, **options)
    if logits.dtype != torch.float64:
        assert routing.last_backend() == backend.ran
    return r


def plain(logits, experts, score, norm, scale):
    """Weights in float64 by plain differentiable torch, given the experts."""
    s = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    picked = s.gather(1, experts.long())
    w = picked / (picked.sum(-1, keepdim=True) + 1e-20) if norm else picked
    return scale * w, s.sum(0), logits.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_line_1_results_are_float32_and_gradients_have_the_logits_dtype(backend, dtype):
    x = logits_of(backend, 130, 64, dtype).requires_grad_()
    r = route(backend, x, 4, cutoff=True)
    assert {t.dtype for t in (r.weights, r.psum, r.lse, r.cutoff)} == {torch.float32}
    assert r.experts.dtype == r.counts.dtype == torch.int32
    (r.weights.sum() + r.lse.sum()).backward()
    assert x.grad.dtype == dtype
    wide = route(backend, x.detach().float(), 4, cutoff=True)
    assert (wide.experts == r.experts).all() and torch.equal(wide.weights, r.weights)


def test_line_1_float64_runs_in_float64_on_torch(backend):
    x = logits_of(backend, 6, 5).double().requires_grad_()
    r = routing.route(x, 2, backend="torch" if backend.name == "cuda" else backend.name, cutoff=True)
    assert r.weights.dtype == r.psum.dtype == r.lse.dtype == r.cutoff.dtype == torch.float64
    assert routing.last_backend() == "torch"
    for score, norm, masked in itertools.product(("softmax", "sigmoid"), (True, False), (True, False)):
        valid = torch.tensor([True, False] * 3, device=x.device) if masked else None

        def function(z, score=score, norm=norm, valid=valid):
            r = reference.route(z, 2, score=score, norm=norm, scale=1.5, valid=valid)
            return r.weights, r.psum, r.lse

        assert torch.autograd.gradcheck(function, (x,))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
def test_line_2_order_is_choice_descending_then_expert_ascending(backend, score, biased):
    raw, exact, _ = routing_oracle.rows(60, seed=1)
    bias = np.round(np.random.default_rng(0).normal(0, 1, 60) * 8).astype(np.float32) / 64 if biased else None
    truth = routing_oracle.Oracle(raw, score, bias)
    for k in (1, 7, 32):
        r = route(backend, torch.from_numpy(raw).to(backend.device), k, score=score,
                  bias=None if bias is None else torch.from_numpy(bias).to(backend.device))  # fmt: skip
        truth.check_choice(r.experts.cpu().numpy(), 0 if biased else exact)


def test_line_2_small_cases_by_brute_force(backend):
    values = [0.0, -0.0, 1.0, -INF, NAN]
    table = torch.tensor(list(itertools.product(values, repeat=4)), device=backend.device)
    for k in (1, 2, 3, 4):
        got = route(backend, table, k, score="sigmoid").experts.tolist()
        for row, chosen in zip(table.tolist(), got, strict=True):
            rank = [-2.0 if math.isnan(v) else -1.0 if v == -INF else 1 / (1 + math.exp(-v)) for v in row]
            assert chosen == sorted(range(4), key=lambda e: (-rank[e], e))[:k]


def test_line_2_minus_infinity_stays_under_any_bias_and_the_bias_gets_no_gradient(backend):
    x = torch.tensor([[0.0, -INF, 1.0, -INF]], device=backend.device).requires_grad_()
    bias = torch.tensor([0.0, 100.0, 0.0, INF], device=backend.device, requires_grad=True)
    r = route(backend, x, 3, bias=bias)
    assert r.experts.tolist() == [[2, 0, 1]]
    r.weights[0, 0].backward()
    assert bias.grad is None


def test_line_2_the_bias_chooses_and_never_weighs(backend):
    x = torch.tensor([[2.0, 1.0, 0.0]], device=backend.device)
    r = route(backend, x, 1, bias=torch.tensor([0.0, 0.0, 5.0], device=backend.device), norm=False)
    assert r.experts.tolist() == [[2]]
    assert torch.allclose(r.weights, x.softmax(-1)[:, 2:])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("fill", [NAN, -INF, INF])
def test_line_3_experts_are_distinct_and_in_range_for_any_row(backend, score, fill):
    x = torch.full((3, 20), fill, device=backend.device)
    x[1, 5] = 0.0
    x[2, ::2] = 0.0
    for k in (1, 9, 20):
        experts = route(backend, x, k, score=score).experts.long()
        assert ((experts >= 0) & (experts < 20)).all()
        assert all(len(set(row)) == k for row in experts.tolist())


def test_line_3_nan_reaches_weights_and_gradients(backend):
    x = logits_of(backend, 4, 16)
    x[2, 3] = NAN
    x.requires_grad_()
    r = route(backend, x, 4)
    assert r.weights.isnan().any(-1).tolist() == [False, False, True, False]
    r.weights.square().sum().backward()
    assert x.grad.isnan().any(-1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("norm", [True, False])
def test_line_4_weights_and_sums_are_the_formula(backend, score, norm):
    x = logits_of(backend, 200, 96)
    r = route(backend, x, 6, score=score, norm=norm, scale=2.5)
    weights, psum, lse = plain(x.double(), r.experts, score, norm, 2.5)
    assert torch.allclose(r.weights.double(), weights, atol=2e-6, rtol=2e-6)
    assert torch.allclose(r.psum.double(), psum, rtol=1e-5)
    assert torch.allclose(r.lse.double(), lse, rtol=2e-6)
    assert (r.counts == torch.bincount(r.experts.flatten(), minlength=96)).all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("tokens", "n_experts", "k"), [(1, 1, 1), (5, 1, 1), (1, 8, 2), (1, 8, 8), (5, 8, 8)])
def test_one_token_one_expert_and_all_experts_follow_the_formula(backend, score, tokens, n_experts, k):
    x = logits_of(backend, tokens, n_experts).requires_grad_()
    r = route(backend, x, k, score=score)
    want = x.detach().cpu().double().requires_grad_()
    s = want.softmax(-1) if score == "softmax" else want.sigmoid()
    picked = s.gather(1, s.argsort(dim=-1, descending=True, stable=True)[:, :k])
    weights = picked / picked.sum(-1, keepdim=True)
    probe = torch.arange(1.0, k + 1)
    (g,) = torch.autograd.grad((r.weights * probe.to(backend.device)).sum() + r.lse.sum(), x)
    (g_want,) = torch.autograd.grad((weights * probe).sum() + want.logsumexp(-1).sum(), want)
    assert torch.allclose(r.weights.cpu().double(), weights, atol=1e-6)
    assert torch.allclose(g.cpu().double(), g_want, atol=1e-6) and r.counts.sum() == tokens * k


def test_line_5_softmax_with_norm_is_topk_then_softmax(backend):
    x = logits_of(backend, 50, 128)
    r = route(backend, x, 8)
    top = x.double().gather(1, r.experts.long())
    assert torch.allclose(r.weights.double(), top.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_line_6_gradients_are_those_of_the_formula(backend, score, norm, masked):
    x = logits_of(backend, 140, 48).requires_grad_()
    valid = (torch.arange(140, device=x.device) % 3 > 0) if masked else None
    r = route(backend, x, 5, score=score, norm=norm, scale=1.5, valid=valid)
    generator = torch.Generator().manual_seed(1)
    a, b, c = (torch.randn(t.shape, generator=generator).to(x.device) for t in (r.weights, r.psum, r.lse))
    ((r.weights * a).sum() + (r.psum * b).sum() + (r.lse * c).sum()).backward()
    z = x.detach().double().requires_grad_()
    keep = torch.ones(140, device=x.device).double() if valid is None else valid.double()
    weights, _, lse = plain(z, r.experts, score, norm, 1.5)
    s = z.softmax(-1) if score == "softmax" else z.sigmoid()
    ((weights * a).sum() + ((s * keep[:, None]).sum(0) * b).sum() + (lse * keep * c).sum()).backward()
    assert torch.allclose(x.grad.double(), z.grad, atol=3e-6, rtol=1e-5)


def test_line_6_a_tiny_sum_gives_a_finite_gradient(backend):
    """d is about 4e-23 + 1e-20 here; its square would be 0 in float32."""
    x = (logits_of(backend, 8, 16) - 52.0).requires_grad_()
    route(backend, x, 3, score="sigmoid").weights[:, 0].sum().backward()
    z = x.detach().double().requires_grad_()
    plain(z, route(backend, x.detach(), 3, score="sigmoid").experts, "sigmoid", True, 1.0)[0][:, 0].sum().backward()
    assert x.grad.abs().max() > 0 and torch.allclose(x.grad.double(), z.grad, rtol=1e-4, atol=1e-7)


def test_line_6_nothing_of_shape_tokens_by_experts_is_saved_but_the_logits(backend):
    saved = []
    x = logits_of(backend, 64, 32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        r = route(backend, x, 2)
        reference.load_balance_loss(r) + reference.z_loss(r)
    large = [t for t in saved if t.numel() >= x.numel()]
    assert {t.data_ptr() for t in large} == {x.data_ptr()}


def test_line_7_repeats_are_bitwise_equal(backend):
    x = logits_of(backend, 300, 160, torch.bfloat16).requires_grad_()
    repeats = 50 if backend.device == "cuda" else 3

    def once():
        r = route(backend, x, 8, cutoff=True)
        (g,) = torch.autograd.grad((r.weights.square().sum() + r.psum.square().sum() + r.lse.sum()), x)
        return [*r, g, *routing.permute(r.experts, 160, backend=backend.name)]

    first = once()
    for _ in range(repeats):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def test_line_8_near_ties_are_valid_choices_and_equal_scores_go_by_index(backend):
    raw = np.random.default_rng(3).normal(0, 1, (150, 64)).astype(np.float32)
    raw[:, 1::2] = np.nextafter(raw[:, ::2], np.float32(np.inf))
    raw[75:, 1::2] = raw[75:, ::2]
    r = route(backend, torch.from_numpy(raw).to(backend.device), 8)
    routing_oracle.Oracle(raw, "softmax", None).check_choice(r.experts.cpu().numpy(), 0)


def test_line_9_too_many_copies_are_refused(backend):
    x = torch.zeros(1, 2, device=backend.device).expand(2**30, 2)
    with pytest.raises(routing.RoutingError, match="2\\*\\*31"):
        routing.route(x, 2, backend=backend.name)
    with pytest.raises(routing.RoutingError, match="2\\*\\*31"):
        routing.permute(torch.zeros(1, 2, dtype=torch.int32).expand(2**30, 2), 2)


def test_line_9_no_tokens_give_empty_results_and_zero_losses(backend):
    x = torch.zeros(0, 24, device=backend.device).requires_grad_()
    r = route(backend, x, 3, cutoff=True)
    assert r.weights.shape == r.experts.shape == (0, 3) and r.lse.shape == r.cutoff.shape == (0,)
    assert r.counts.tolist() == [0] * 24 and r.psum.tolist() == [0.0] * 24
    loss = reference.load_balance_loss(r) + reference.z_loss(r) + r.weights.sum()
    assert loss.item() == 0.0
    loss.backward()
    assert x.grad.shape == (0, 24)
    order, pos, offs = routing.permute(r.experts, 24, backend=backend.name)
    assert order.shape == (0,) and pos.shape == (0, 3) and offs.tolist() == [0] * 24


def test_line_10_padding_stays_out_of_counts_sums_and_histogram(backend):
    x = logits_of(backend, 133, 40)
    valid = torch.arange(133, device=x.device) % 4 != 1
    x[~valid] = NAN
    r, kept = route(backend, x, 3, valid=valid, cutoff=True), route(backend, x[valid], 3, cutoff=True)
    assert torch.equal(r.counts, kept.counts) and torch.allclose(r.psum, kept.psum, rtol=1e-5)
    assert torch.equal(r.lse[valid], kept.lse) and (r.lse[~valid] == 0).all()
    assert torch.allclose(reference.z_loss(r), reference.z_loss(kept))
    hists = [torch.zeros(40, 50, dtype=torch.int32, device=x.device) for _ in range(2)]
    routing.qb_histogram_(hists[0], x, r.cutoff, -1.0, 1.0, valid=valid, backend=backend.name)
    routing.qb_histogram_(hists[1], x[valid], kept.cutoff, -1.0, 1.0, backend=backend.name)
    assert torch.equal(*hists) and hists[0].sum() == 40 * valid.sum()


@pytest.mark.parametrize(
    ("tokens", "n_experts", "k"), [(1, 1, 1), (1, 8, 8), (128, 16, 1), (129, 60, 4), (300, 256, 8)]
)
def test_permutation_is_the_stable_sort_by_expert(backend, tokens, n_experts, k):
    experts = route(backend, logits_of(backend, tokens, n_experts, step=0.25), k).experts
    order, pos, offs = routing.permute(experts, n_experts, backend=backend.name)
    flat = experts.flatten().cpu()
    want = torch.sort(flat, stable=True)[1]
    assert (order.cpu() == want).all() and order.dtype == pos.dtype == offs.dtype == torch.int32
    assert (order.cpu()[pos.flatten().long().cpu()] == torch.arange(tokens * k)).all()
    assert offs.tolist() == torch.bincount(flat, minlength=n_experts).cumsum(0).tolist()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_histogram_counts_what_a_loop_counts(backend, score):
    x = logits_of(backend, 70, 12, step=0.125)
    x[3, 4] = -INF
    x[5] = NAN
    r = route(backend, x, 2, score=score, cutoff=True)
    hist = torch.zeros(12, 64, dtype=torch.int32, device=x.device)
    for _ in range(2):
        routing.qb_histogram_(hist, x, r.cutoff, -0.6, 0.4, score=score, backend=backend.name)
    s = (x.double().softmax(-1) if score == "softmax" else x.double().sigmoid()).cpu()
    place = (r.cutoff.double().cpu()[:, None] - s + 0.6) * 64
    want = torch.zeros(12, 64)
    for t, e in itertools.product(range(70), range(12)):
        if x[t, e] == -INF:
            want[e, 63] += 2
        elif not math.isnan(place[t, e]):
            want[e, int(min(max(math.floor(place[t, e]), 0), 63))] += 2
    got = hist.cpu().double()
    assert torch.equal(got.sum(1), want.double().sum(1))
    # Rounding may move a value on a bin's edge to the neighbour.
    assert (got.cumsum(1) - want.cumsum(1)).abs().max() <= 2 and (got != want).sum() <= 12


@pytest.mark.parametrize("form", ["strided", "transposed", "misaligned"])
def test_layout_of_the_logits_does_not_matter(backend, form):
    x = logits_of(backend, 37, 64, torch.bfloat16)
    other = {
        "strided": lambda: torch.cat([x, x], 1)[:, :64],
        "transposed": lambda: x.t().contiguous().t(),
        "misaligned": lambda: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(37, 64),
    }[form]()
    a, b = route(backend, x, 4), route(backend, other, 4)
    assert torch.equal(a.experts, b.experts) and torch.equal(a.counts, b.counts)
    # Torch adds in another order for other strides; the kernels do not.
    exact = backend.ran == "cuda"
    for p, q in ((a.weights, b.weights), (a.psum, b.psum), (a.lse, b.lse)):
        assert torch.equal(p, q) if exact else torch.allclose(p, q, atol=1e-6)


def test_without_requires_grad_nothing_is_recorded(backend):
    r = route(backend, logits_of(backend, 5, 8), 2)
    assert not r.weights.requires_grad and not r.psum.requires_grad
    with torch.no_grad():
        assert not route(backend, logits_of(backend, 5, 8).requires_grad_(), 2).weights.requires_grad


def test_without_stats_there_are_none(backend):
    r = route(backend, logits_of(backend, 5, 8), 2, stats=False)
    assert r.counts is r.psum is r.lse is r.cutoff is None
