"""Balancing rules: what they solve, what they keep, and that ranks agree."""

import copy
import itertools
import os

import numpy as np
import pytest
import torch
from trajectory_guard.kernels.balancing import (
    AuxLoss,
    Balancer,
    QuantileBalancing,
    SignRule,
    attach,
    load_metrics,
)
from trajectory_guard.kernels.quantile import exact_quantile, histogram_quantile, solve
from trajectory_guard.kernels.routing import (
    RoutingError,
    gather,
    load_balance_loss,
    permute,
    route,
    unpermute,
    z_loss,
)

RULES = {
    "exact": lambda e, k: QuantileBalancing(e, k, method="exact"),
    "histogram": lambda e, k: QuantileBalancing(e, k),
    "solved": lambda e, k: QuantileBalancing(e, k, method="exact", passes=5),
    "sign": lambda e, k: SignRule(e, k, rate=0.01),
    "aux": lambda e, k: AuxLoss(e, k),
    "none": lambda e, k: Balancer(e, k),
}


def skewed(tokens, n_experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, n_experts, generator=generator) + torch.linspace(-1, 1, n_experts)


def observed(balancer, logits, valid=None, score="softmax"):
    logits = logits.clone().requires_grad_()
    r = route(logits, balancer.k, bias=balancer.bias, cutoff=balancer.wants_cutoff, valid=valid, score=score)
    balancer.observe(r, logits, valid=valid)
    return r


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("method", ["exact", "histogram"])
def test_quantile_balancing_evens_out_a_fixed_batch_in_a_few_steps(method, score):
    logits = skewed(2048, 16)
    balancer = QuantileBalancing(16, 4, score=score, method=method, ema=0.3)
    for _ in range(15):
        observed(balancer, logits, score=score)
        balancer.update()
    assert load_metrics(balancer.load).max_violation < 0.05
    assert abs(balancer.bias.mean()) < 1e-6
    assert load_metrics(observed(balancer, logits, score=score).counts).dead == 0


def test_one_step_is_the_quantile_of_the_required_bias():
    """Against the definition in numpy: alpha - score, its k/E quantile, mean-centred."""
    logits = skewed(512, 8)
    balancer = QuantileBalancing(8, 2, method="exact")
    observed(balancer, logits)
    balancer.update()
    s = logits.double().softmax(-1).numpy()
    required = np.sort(s, -1)[:, ::-1][:, 2:3] - s
    ranked = np.sort(required, 0)
    b = (ranked[127] + ranked[128]) / 2
    np.testing.assert_allclose(balancer.bias.numpy(), b - b.mean(), atol=1e-6)


def test_the_histogram_is_the_exact_quantile_to_a_bin():
    logits = skewed(4096, 32)
    exact, binned = QuantileBalancing(32, 4, method="exact"), QuantileBalancing(32, 4, bins=1000)
    for balancer in (exact, binned):
        observed(balancer, logits)
        balancer.update()
    assert (exact.bias - binned.bias).abs().max() < 2.0 / 1000


def test_more_passes_solve_a_batch_at_once():
    violations = []
    for passes in (1, 5, 20):
        balancer = QuantileBalancing(16, 4, method="exact", passes=passes)
        observed(balancer, skewed(2048, 16))
        balancer.update()
        violations.append(load_metrics(observed(balancer, skewed(2048, 16)).counts).max_violation.item())
    assert violations[0] > 3 * violations[1] > 3 * violations[2] and violations[2] < 0.01


def test_with_rescore_the_batch_is_solved_for_the_weights_after_the_step():
    """Loads of the same batch under weights that have moved: even only for the rule that saw them move."""
    x, weight = (
        skewed(2048, 12),
        torch.nn.Parameter(torch.randn(12, 16, generator=torch.Generator().manual_seed(1)) / 4),
    )
    violations = []
    for rescored in (False, True):
        balancer = QuantileBalancing(16, 4, method="exact", passes=20)
        moving = torch.nn.Parameter(weight.detach().clone())
        logits = x @ moving
        r = route(logits, 4, bias=balancer.bias, cutoff=True)
        balancer.observe(r, logits, rescore=(lambda w=moving: x @ w) if rescored else None)
        with torch.no_grad():
            moving.mul_(2.0)
        balancer.update()
        violations.append(load_metrics(route(x @ moving, 4, bias=balancer.bias).counts).max_violation.item())
    assert violations[1] < 0.05 < 0.3 < violations[0]


def test_solving_keeps_nan_below_and_masked_experts_out():
    logits = skewed(400, 8)
    logits[::7, 2] = float("nan")
    logits[:, 5] = -float("inf")
    balancer = QuantileBalancing(8, 2, method="exact", passes=10, score="sigmoid")
    for _ in range(3):
        observed(balancer, logits, score="sigmoid")
        balancer.update()
    assert balancer.bias.isfinite().all() and balancer.bounds.isfinite().all()
    assert solve(torch.empty(0, 8), balancer.bias, 2, 1).equal(balancer.bias - balancer.bias.mean())


def test_quantiles_of_columns_with_nan_and_of_empty_ones():
    values = torch.tensor([[1.0, float("nan")], [3.0, float("nan")], [float("nan"), float("nan")]])
    got = exact_quantile(values, 0.5)
    assert got[0] == 2.0 and got[1].isnan()
    got = histogram_quantile(torch.tensor([[2, 2], [0, 0]], dtype=torch.int32), 0.5, 0.0, 2.0)
    assert got[0] == 1.0 and got[1].isnan()


@pytest.mark.parametrize("method", ["exact", "histogram"])
def test_rows_of_nan_and_masked_experts_leave_finite_biases(method):
    logits = skewed(300, 8)
    logits[::3] = float("nan")
    logits[:, 5] = -float("inf")
    balancer = QuantileBalancing(8, 2, method=method)
    for _ in range(5):
        observed(balancer, logits)
        balancer.update()
    assert balancer.bias.isfinite().all() and balancer.bounds.isfinite().all()
    observed(balancer, torch.full((4, 8), float("nan")))
    before = balancer.bias.clone()
    balancer.update()
    assert torch.allclose(balancer.bias, before, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_micro_batches_add_up_to_the_batch_and_padding_is_left_out(rule):
    whole, parts = RULES[rule](8, 2), RULES[rule](8, 2)
    logits = skewed(600, 8)
    valid = torch.arange(600) % 5 > 0
    observed(whole, logits[valid])
    for piece, mask in zip(logits.chunk(3), valid.chunk(3), strict=True):
        observed(parts, piece, valid=mask)
    whole.update(), parts.update()
    assert torch.equal(whole.load, parts.load) and whole.load.sum() == 2 * valid.sum()
    assert torch.equal(whole.bias, parts.bias)


@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_counted_in_eval_without_grad_or_in_a_recomputation(rule):
    balancer, logits = RULES[rule](8, 2), skewed(50, 8)
    balancer.eval()
    observed(balancer, logits)
    balancer.train()
    with torch.no_grad():
        observed(balancer, logits)
    assert balancer._counts is None
    weight = torch.ones(8, requires_grad=True)

    def layer(w):
        r = route(logits * w, 2, bias=balancer.bias, cutoff=balancer.wants_cutoff)
        balancer.observe(r, logits)
        return r.weights.square().sum()

    torch.utils.checkpoint.checkpoint(layer, weight, use_reentrant=False).backward()
    assert balancer._counts.sum() == 100


def test_sign_rule_lifts_the_idle_and_lowers_the_busy_by_its_rate():
    balancer = SignRule(4, 1, rate=0.25)
    balancer.update(torch.tensor([4, 2, 2, 0], dtype=torch.int32))
    assert balancer.bias.tolist() == [-0.25, 0.0, 0.0, 0.25]


def test_auxiliary_loss_has_a_gradient_that_evens_out():
    balancer = AuxLoss(8, 2, coefficient=1.0)
    logits = skewed(256, 8).requires_grad_()
    first = balancer.loss(route(logits, 2))
    (g,) = torch.autograd.grad(first, logits)
    assert balancer.loss(route(logits - 20 * g, 2)) < first and (balancer.bias == 0).all()
    assert Balancer(8, 2).loss(route(logits, 2)) == 0


@pytest.mark.parametrize("rule", RULES)
def test_state_round_trips_and_the_run_goes_on_as_if_never_stopped(rule, tmp_path):
    def steps(balancer, seeds):
        for seed in seeds:
            observed(balancer, skewed(128, 8, seed))
            balancer.update()

    straight, first = RULES[rule](8, 2), RULES[rule](8, 2)
    steps(straight, range(6))
    steps(first, range(3))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    resumed = RULES[rule](8, 2)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    steps(resumed, range(3, 6))
    assert torch.equal(straight.bias, resumed.bias)
    names = set(resumed.state_dict())
    assert names == ({"bias", "bounds"} if rule in ("exact", "histogram", "solved") else {"bias"})


def test_the_bias_stays_float32_in_a_half_precision_model():
    balancer = QuantileBalancing(4, 1)
    balancer.bias += torch.tensor([1e-4, 2e-4, 3e-4, 1.0001])
    before = balancer.bias.clone()
    model = torch.nn.ModuleDict({"b": balancer}).half().to(torch.bfloat16)
    assert torch.equal(model["b"].bias, before) and balancer.bounds.dtype == torch.float32
    assert model.double()["b"].bias.dtype == torch.float32
    assert copy.deepcopy(model)["b"].bias.dtype == torch.float32


def test_attach_updates_every_balancer_once_a_step_until_removed():
    model = torch.nn.ModuleList([SignRule(4, 1), QuantileBalancing(4, 1)])
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    handle = attach(optimizer, model)
    for balancer in model:
        observed(balancer, skewed(20, 4))
    optimizer.step()
    assert all(b.load.sum() == 20 and b._counts is None for b in model)
    assert all(b.bias.abs().max() > 0 for b in model)
    handle.remove()
    observed(model[0], skewed(20, 4))
    optimizer.step()
    assert model[0]._counts is not None
    with pytest.raises(RoutingError, match="no balancer found"):
        attach(optimizer, torch.nn.Linear(2, 2))


def _rank(rank, rules, path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=2)
    try:
        balancers = [RULES[name](8, 2) for name in rules]
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        attach(optimizer, balancers)
        for step in range(3):
            logits = skewed(150, 8, step)
            mine = logits[:100] if rank == 0 else logits[100:]
            for i, balancer in enumerate(balancers):
                if not (rank == 1 and step == 1 and i == 0):  # a rank may have nothing to count
                    observed(balancer, mine)
            optimizer.step()
        torch.save([(b.bias, b.load) for b in balancers], f"{path}/{rank}.pt")
        torch.distributed.barrier()
        os._exit(0)  # Not through gloo's destructors: now and then they abort while a peer ends.
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_agree_and_equal_one_rank_with_the_whole_batch(tmp_path):
    rules = ["sign", "exact", "histogram", "aux", "solved"]
    torch.multiprocessing.spawn(_rank, args=(rules, str(tmp_path)), nprocs=2)
    zero, one = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(a, b) for p, q in zip(zero, one, strict=True) for a, b in zip(p, q, strict=True))
    alone = [RULES[name](8, 2) for name in rules]
    for step in range(3):
        for i, balancer in enumerate(alone):
            observed(balancer, skewed(150, 8, step)[: 100 if (i == 0 and step == 1) else 150])
            balancer.update()
    for (bias, load), balancer in zip(zero, alone, strict=True):
        assert torch.equal(bias, balancer.bias) and torch.equal(load, balancer.load)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("k must be from 1", lambda: SignRule(4, 5)),
        ("needs k below n_experts", lambda: QuantileBalancing(4, 4)),
        ("ema must be in", lambda: QuantileBalancing(4, 1, ema=1.0)),
        ("bins must be", lambda: QuantileBalancing(4, 1, bins=1)),
        ("method must be", lambda: QuantileBalancing(4, 1, method="other")),
        ("passes must be", lambda: QuantileBalancing(4, 1, passes=2)),
        ("passes must be", lambda: QuantileBalancing(4, 1, method="exact", passes=0)),
        ("rate must be positive", lambda: SignRule(4, 1, rate=0.0)),
        ("must not be negative", lambda: AuxLoss(4, 1, coefficient=-1.0)),
        ("needs the cutoff", lambda: QuantileBalancing(4, 1).observe(route(torch.zeros(2, 4), 1), torch.zeros(2, 4))),
        (
            "needs the statistics",
            lambda: SignRule(4, 1).observe(route(torch.zeros(2, 4), 1, stats=False), torch.zeros(2, 4)),
        ),
    ],
)
def test_bad_arguments_are_refused_in_words(message, call):
    with pytest.raises(RoutingError, match=message):
        call()


def test_load_metrics_are_the_textbook_ones():
    for load in itertools.product([0, 1, 5], repeat=3):
        if sum(load) == 0:
            continue
        m, p = load_metrics(torch.tensor(load)), np.array(load) / sum(load)
        assert m.max_violation == pytest.approx(max(load) / np.mean(load) - 1, abs=1e-6)
        assert m.cv == pytest.approx(np.std(load) / np.mean(load), abs=1e-6)
        assert m.dead == load.count(0)
        assert m.entropy == pytest.approx(-(p[p > 0] * np.log(p[p > 0])).sum() / np.log(3), abs=1e-6)
    assert load_metrics(torch.zeros(4)).max_violation == -1.0


def test_training_a_layer_is_bitwise_repeatable():
    def train():
        torch.manual_seed(0)
        gate = torch.nn.Parameter(torch.randn(12, 8))
        experts = torch.nn.Parameter(torch.randn(8, 12, 12) * 0.1)
        balancer = QuantileBalancing(8, 2)
        optimizer = torch.optim.AdamW([gate, experts], lr=0.01)
        attach(optimizer, [balancer])
        for _ in range(10):
            x = torch.randn(200, 12)
            r = route(x @ gate, 2, bias=balancer.bias, cutoff=True)
            balancer.observe(r, x @ gate)
            order, pos, offs = permute(r.experts, 8)
            rows = gather(x, order, pos).split(offs.diff(prepend=offs.new_zeros(1)).tolist())
            y = unpermute(torch.cat([a @ w for a, w in zip(rows, experts, strict=True)]), pos, r.weights)
            optimizer.zero_grad()
            ((y - x.flip(1)).square().mean() + load_balance_loss(r) + z_loss(r)).backward()
            optimizer.step()
        return gate.detach(), experts.detach(), balancer.bias.clone()

    assert all(torch.equal(a, b) for a, b in zip(train(), train(), strict=True))
