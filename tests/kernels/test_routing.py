"""The public operations inside torch: opcheck, compile, checkpoint, autocast, dispatch, and bad input."""

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from trajectory_guard.kernels import reference, routing
from trajectory_guard.kernels.routing import RoutingError, last_backend, permute, qb_histogram_, route

OPS = torch.ops.trajectory_guard


def tied(tokens, n_experts, seed=0):
    x = torch.randn(tokens, n_experts, generator=torch.Generator().manual_seed(seed))
    return (x * 2).round() / 2


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("full", [True, False])
def test_opcheck_of_route(backend, score, full):
    x = torch.randn(9, 6, device=backend.device).requires_grad_()
    bias = torch.randn(6, device=backend.device) if full else None
    valid = (torch.arange(9, device=backend.device) % 2 == 0) if full else None
    torch.library.opcheck(OPS.route.default, (x, bias, valid, 2, score, full, 1.5, full, full, backend.name))


def test_opcheck_of_the_other_operations(backend):
    x = torch.randn(9, 6, device=backend.device)
    r = route(x, 2, cutoff=True, backend=backend.name)
    g = torch.randn(9, 2, device=backend.device)
    grads = (g, torch.randn(6, device=backend.device), torch.randn(9, device=backend.device))
    torch.library.opcheck(OPS.route_backward.default, (x, r.experts, None, *grads, "softmax", True, 1.5, backend.name))
    torch.library.opcheck(OPS.permute.default, (r.experts, 6, backend.name))
    hist = torch.zeros(6, 10, dtype=torch.int32, device=backend.device)
    bounds = torch.tensor([-1.0, 1.0], device=backend.device)
    torch.library.opcheck(OPS.qb_histogram_.default, (hist, x, r.cutoff, bounds, None, "softmax", backend.name))


def block(x, w):
    """A small MoE block around the operations."""
    r = route(x @ w, 2, cutoff=True)
    order, pos, _ = permute(r.experts, w.shape[1])
    y = routing.unpermute(routing.gather(x, order, pos) * 2.0, pos, r.weights)
    return y.square().mean() + reference.load_balance_loss(r) + 0.1 * reference.z_loss(r)


# torch itself warns of its own way to trace an autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_block_compiles_without_breaks_for_any_number_of_tokens():
    w = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 64, 1, 131):
        x = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens))
        want = block(x, w)
        (g_want,) = torch.autograd.grad(want, w)
        (g,) = torch.autograd.grad(compiled(x, w), w)
        assert torch.allclose(compiled(x, w), want) and torch.allclose(g, g_want, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_block_compiles_with_the_default_backend():
    w = torch.randn(16, 8).requires_grad_()
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for tokens in (5, 64, 131):
        x = torch.randn(tokens, 16)
        (g,) = torch.autograd.grad(compiled(x, w), w)
        (g_want,) = torch.autograd.grad(block(x, w), w)
        assert torch.allclose(g, g_want, atol=1e-5)


def test_checkpoint_on_tied_logits_recomputes_the_same_routing(backend):
    seen = []

    def layer(x):
        r = route(x, 3, backend=backend.name)
        seen.append(r.experts.clone())
        return (r.weights * torch.arange(3, device=x.device)).sum() + r.psum.square().sum()

    x = tied(150, 32).to(backend.device).requires_grad_()
    (plain,) = torch.autograd.grad(layer(x), x)
    (again,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False), x)
    assert torch.equal(plain, again) and len(seen) == 3 and all(torch.equal(seen[0], s) for s in seen)


def test_autocast_changes_nothing(backend):
    x = torch.randn(20, 16, device=backend.device).to(torch.bfloat16)
    want = route(x, 2, backend=backend.name)
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        got = route(x, 2, backend=backend.name)
        order, pos, _ = permute(got.experts, 16, backend=backend.name)
        y = routing.unpermute(routing.gather(x, order, pos), pos, got.weights)
    assert y.dtype == x.dtype
    assert got.weights.dtype == torch.float32 and torch.equal(got.weights, want.weights)
    assert torch.equal(got.psum, want.psum)


def test_the_gradient_of_a_gradient_is_an_error(backend):
    x = torch.randn(4, 8, device=backend.device).requires_grad_()
    (g,) = torch.autograd.grad(route(x, 2, backend=backend.name).weights[:, 0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        g.sum().backward()


def test_gather_and_unpermute_are_inverse_and_have_the_right_gradients():
    x = torch.randn(7, 5, dtype=torch.float64).requires_grad_()
    weights = torch.rand(7, 3, dtype=torch.float64).requires_grad_()
    order, pos, _ = permute(route(torch.randn(7, 6), 3).experts, 6)
    home = routing.unpermute(routing.gather(x, order, pos), pos, torch.ones(7, 3))
    assert torch.allclose(home, 3 * x)
    assert torch.autograd.gradcheck(lambda a: routing.gather(a, order, pos), (x,))
    y = torch.randn(21, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: routing.unpermute(a, pos, b), (y, weights))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_on_cpu_the_custom_ops_equal_the_reference_bit_for_bit(score):
    x = torch.randn(300, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    g = torch.randn(300, 2, generator=torch.Generator().manual_seed(1))
    results = []
    for function in (reference.route, route):
        r = function(x, 2, bias=torch.linspace(0, 0.1, 8), score=score, cutoff=True)
        loss = (r.weights * g).sum() + reference.load_balance_loss(r) + reference.z_loss(r)
        results.append([*r, *torch.autograd.grad(loss, x)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for a, b in zip(reference.permute(r.experts, 8), permute(r.experts, 8), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


def test_the_backend_is_forced_by_argument_or_environment_and_told(monkeypatch):
    x = torch.zeros(2, 4)
    route(x, 1)
    assert last_backend() == "torch"
    with pytest.raises(RoutingError, match="needs tensors on a CUDA device, got cpu"):
        route(x, 1, backend="cuda")
    monkeypatch.setenv("TRAJECTORY_GUARD_KERNELS", "cuda")
    for call in (lambda: route(x, 1), lambda: permute(torch.zeros(2, 1, dtype=torch.int32), 4)):
        with pytest.raises(RoutingError, match="CUDA device"):
            call()
    assert route(x, 1, backend="torch").experts.tolist() == [[0], [0]]
    monkeypatch.setenv("TRAJECTORY_GUARD_KERNELS", "triton")
    with pytest.raises(RoutingError, match="`auto`, `torch` or `cuda`, got 'triton'"):
        route(x, 1)


def test_a_fallback_on_cuda_is_said_once():
    class OnCuda:
        device = torch.device("cuda", 0)

    routing._warn_fallback.cache_clear()
    with pytest.warns(RuntimeWarning, match="falls back to plain torch: 2000 experts"):
        assert not routing._use_cuda("auto", OnCuda, "2000 experts")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not routing._use_cuda("auto", OnCuda, "2000 experts")
    with pytest.raises(RoutingError, match="2000 experts; use 'auto'"):
        routing._use_cuda("cuda", OnCuda, "2000 experts")


BAD = {
    "k must be": lambda: route(torch.zeros(2, 4), 5),
    "k must be an integer from 1": lambda: route(torch.zeros(2, 4), 0),
    "k must be an integer": lambda: route(torch.zeros(2, 4), 1.5),
    "leaves none of 4": lambda: route(torch.zeros(2, 4), 4, cutoff=True),
    "got torch.int64": lambda: route(torch.zeros(2, 4, dtype=torch.int64), 1),
    r"got shape \[4\]": lambda: route(torch.zeros(4), 1),
    r"\[experts\] = \[4\], got shape \[3\]": lambda: route(torch.zeros(2, 4), 1, bias=torch.zeros(3)),
    "bias must be floating point": lambda: route(torch.zeros(2, 4), 1, bias=torch.zeros(4, dtype=torch.int32)),
    "bias is on meta": lambda: route(torch.zeros(2, 4), 1, bias=torch.zeros(4, device="meta")),
    "valid must be bool": lambda: route(torch.zeros(2, 4), 1, valid=torch.ones(2)),
    r"got torch.bool \[3\]": lambda: route(torch.zeros(2, 4), 1, valid=torch.ones(3, dtype=torch.bool)),
    "valid is on meta": lambda: route(torch.zeros(2, 4), 1, valid=torch.ones(2, dtype=torch.bool, device="meta")),
    "`softmax` or `sigmoid`": lambda: route(torch.zeros(2, 4), 1, score="relu"),
    "experts must be int32": lambda: permute(torch.zeros(2, 1, dtype=torch.int64), 4),
    "n_experts must be": lambda: permute(torch.zeros(2, 1, dtype=torch.int32), 0),
    "holds an index of 7": lambda: permute(torch.full((2, 1), 7, dtype=torch.int32), 4),
    r"hist must be int32 \[experts, bins\]": lambda: qb_histogram_(
        torch.zeros(4, 3), torch.zeros(2, 4), torch.zeros(2), 0, 1
    ),
    r"cutoff must be \[tokens\]": lambda: qb_histogram_(
        torch.zeros(4, 3, dtype=torch.int32), torch.zeros(2, 4), None, 0, 1
    ),
    "needs the statistics": lambda: reference.z_loss(route(torch.zeros(2, 4), 1, stats=False)),
    "load_balance_loss needs": lambda: reference.load_balance_loss(route(torch.zeros(2, 4), 1, stats=False)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_in_words(message):
    with pytest.raises(RoutingError, match=message):
        BAD[message]()
