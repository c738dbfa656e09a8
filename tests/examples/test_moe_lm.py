import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from corpus import standard_library
from faults import Fault
from moe_lm import CausalConv, Experts, MoE, MoEConfig, MoELM
from recipe import BATCH, TOKENS_PER_PARAMETER, Training, plan_of, run_of
from trajectory_guard.kernels.reference import route


def train(width: int, steps: int, *, seed: int = 0, fault: Fault | None = None):
    training = Training(run_of(width), corpus=standard_library(), seed=seed, fault=fault or Fault())
    losses = [training.step(step).item() for step in range(1, steps + 1)]
    return losses, training


def weights(training: Training) -> torch.Tensor:
    return torch.cat([v.flatten().float() for v in training.model.state_dict().values()])


def test_training_repeats_bit_by_bit():
    losses, training = train(20, 12)
    again, repeated = train(20, 12)
    assert losses == again
    assert torch.equal(weights(training), weights(repeated))
    assert losses != train(20, 12, seed=1)[0]


def test_the_first_loss_is_that_of_a_uniform_guess():
    assert train(20, 1)[0][0] == pytest.approx(math.log(256), rel=1e-6)


def test_the_loss_falls_below_the_byte_frequencies_within_sixty_steps():
    losses, _ = train(20, 60)
    assert sum(losses[-10:]) / 10 < 3.0


def test_no_position_sees_a_later_byte():
    torch.manual_seed(0)
    model = MoELM(MoEConfig(width=20)).eval()
    torch.nn.init.normal_(model.head, std=0.1)
    ids = torch.randint(0, 256, (1, 64))
    changed = ids.clone()
    changed[0, 40:] = torch.randint(0, 256, (24,))
    with torch.no_grad():
        before, after = model(ids), model(changed)
    torch.testing.assert_close(before[0, :40], after[0, :40], atol=1e-6, rtol=1e-5)
    assert (before[0, 40:] - after[0, 40:]).abs().max() > 1e-3


def test_the_sorted_experts_equal_a_loop_over_tokens():
    torch.manual_seed(1)
    config = MoEConfig(width=20)
    layer = MoE(config)
    x = torch.randn(2, 9, 20)
    routing = route(x.flatten(0, 1) @ layer.router.weight, 2, bias=torch.zeros(8), score="sigmoid")
    wanted = torch.zeros(18, 20)
    for t, row in enumerate(x.flatten(0, 1)):
        for weight, e in zip(routing.weights[t], routing.experts[t].tolist(), strict=True):
            wanted[t] += weight * (F.silu(row @ layer.experts.up[e]) @ layer.experts.down[e])
    torch.testing.assert_close(layer(x).flatten(0, 1), wanted, atol=1e-5, rtol=1e-5)


def test_grouped_and_looped_products_agree_in_value_and_gradient():
    from moe_lm import _grouped_mm, _looped_mm

    torch.manual_seed(2)
    rows, w = torch.randn(30, 20, requires_grad=True), torch.randn(4, 20, 8, requires_grad=True)
    ends = torch.tensor([7, 7, 19, 30], dtype=torch.int32)
    probe = torch.randn(30, 8)
    results = []
    for product in (_grouped_mm, _looped_mm):
        out = product(rows, w, ends)
        results.append((out, *torch.autograd.grad((out * probe).sum(), (rows, w))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_the_convolution_starts_as_identity_and_has_the_gradient_of_the_padded_one():
    conv = CausalConv(6).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    assert torch.equal(conv(x), x)
    weight = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    conv.weight = torch.nn.Parameter(weight.detach().clone())
    kernel = weight.flip(0).t()[:, None]
    wanted = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), kernel, groups=6).transpose(1, 2)
    torch.testing.assert_close(conv(x), wanted)
    probe = torch.randn_like(wanted)
    got = torch.autograd.grad((conv(x) * probe).sum(), (x, conv.weight))
    for one, other in zip(got, torch.autograd.grad((wanted * probe).sum(), (x, weight)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("shared", "swiglu"), list(itertools.product((False, True), repeat=2)))
def test_options_train_and_count_their_parameters(shared, swiglu):
    torch.manual_seed(0)
    config = MoEConfig(width=20, shared_expert=shared, swiglu=swiglu)
    model = MoELM(config)
    matrices = (3 if swiglu else 2) * 20 * 40
    base = MoELM(MoEConfig(width=20)).active_parameters
    experts = 2 + int(shared)
    assert model.active_parameters - base == 2 * (experts * matrices - 2 * 2 * 20 * 40)
    model.loss(torch.randint(0, 256, (2, 64)), torch.randint(0, 256, (2, 64))).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("balancing", ["quantile", "sign", "aux", "none"])
def test_every_balancing_rule_trains_with_finite_metrics(balancing):
    from trajectory_guard.kernels.balancing import attach

    torch.manual_seed(0)
    model = MoELM(MoEConfig(width=20, balancing=balancing))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(optimizer, model)
    for step in range(3):
        ids = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model.loss(ids, ids) + model.auxiliary_loss()).backward()
        optimizer.step()
    metrics = model.router_metrics()
    assert set(metrics) == {
        f"router/{name}" for name in ("max_violation", "cv", "dead_experts", "entropy", "bias_range")
    }
    assert all(math.isfinite(v) for v in metrics.values())
    assert (metrics["router/bias_range"] > 0) == (balancing in ("quantile", "sign"))


def test_quantile_balancing_keeps_every_expert_busy():
    _, training = train(20, 49)
    violations = []
    for step in range(50, 90):
        training.step(step)
        metrics = training.model.router_metrics()
        assert metrics["router/dead_experts"] == 0
        violations.append(metrics["router/max_violation"])
    assert sum(violations) / len(violations) < 0.8


def test_active_parameters_are_those_of_the_ladder():
    counts = {width: run_of(width).active_parameters for width in BATCH}
    assert counts == {20: 15_460, 24: 20_856, 28: 27_020, 32: 33_952, 48: 69_360}


@pytest.mark.parametrize("width", sorted(BATCH))
def test_every_run_has_the_same_tokens_per_parameter_and_nearly_the_same_steps(width):
    run = run_of(width)
    plan = plan_of(run, standard_library())
    assert plan.tokens_per_active_param == pytest.approx(TOKENS_PER_PARAMETER, rel=1e-3)
    assert 2_900 <= run.steps <= 3_100


def test_the_target_has_four_times_the_compute_of_the_largest_rung():
    flops = {width: plan_of(run_of(width), standard_library()).total_flops for width in (32, 48)}
    assert flops[48] >= 4 * flops[32]


@pytest.mark.parametrize("change", [{"width": 22}, {"width": 0}, {"width": 20, "top_k": 8}, {"width": 20, "top_k": 0}])
def test_impossible_shapes_are_refused(change):
    with pytest.raises(ValueError, match="must be"):
        MoEConfig(**change)


def test_experts_without_a_token_are_fine():
    experts = Experts(8, 16, 3)
    rows = torch.randn(5, 8)
    out = experts(rows, torch.tensor([0, 5, 5], dtype=torch.int32))
    torch.testing.assert_close(out, F.silu(rows @ experts.up[1]) @ experts.down[1])


def test_the_lr_fault_multiplies_the_rate_from_its_step_on():
    _, healthy = train(20, 4)
    _, faulted = train(20, 4, fault=Fault(kind="lr", step=6))
    rates = []
    for training in (healthy, faulted):
        seen = []
        for step in range(5, 9):
            seen.append(training.optimizer.param_groups[0]["lr"])
            training.step(step)
        rates.append(seen)
    assert [b / a for a, b in zip(*rates, strict=True)] == pytest.approx([1, 10, 10, 10])


def test_the_nan_fault_shows_at_its_own_step():
    losses, _ = train(20, 4, fault=Fault(kind="nan", step=3))
    assert [math.isnan(loss) for loss in losses] == [False, False, True, True]


def test_the_data_fault_raises_the_loss_at_its_own_step():
    healthy, _ = train(20, 31)
    faulted, _ = train(20, 31, fault=Fault(kind="data", step=31))
    assert faulted[:30] == healthy[:30]
    assert faulted[30] > healthy[30] + 0.5
