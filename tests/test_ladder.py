import pytest

from trajectory_guard.channel import ChannelSeries
from trajectory_guard.curve import LossCurve
from trajectory_guard.errors import TrajectoryGuardError
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan
from trajectory_guard.recipe import Recipe


def rung(name: str, params: float = 10.0, **fields) -> Rung:
    plan = RunPlan(
        **{
            "total_steps": 2,
            "tokens_per_step": 8,
            "active_params": params,
            "schedule": LRSchedule(shape="constant"),
            **fields,
        }
    )
    return Rung(name=name, plan=plan, curves=(LossCurve(step=[1, 2], tokens=[8, 16], loss=[3, 2]),))


def test_rungs_stand_in_order_of_compute():
    ladder = Ladder(rungs=(rung("b", 20), rung("c", 30), rung("a", 10)))
    assert [r.name for r in ladder.rungs] == ["a", "b", "c"]
    assert ladder.metric == "loss"


def test_no_rung_is_refused():
    with pytest.raises(TrajectoryGuardError, match="at least one rung"):
        Ladder(rungs=())


def test_a_rung_without_a_log_is_refused():
    with pytest.raises(TrajectoryGuardError, match="'a' has no loss curve"):
        Rung(name="a", plan=rung("a").plan, curves=())


def test_every_seed_and_every_rung_carries_the_same_channels():
    plain = rung("a")
    series = (ChannelSeries(step=[1, 2], value=[0.5, 0.4]),)
    norm = Rung(name="b", plan=rung("b", 20).plan, curves=plain.curves, channels={"grad_norm": series})
    assert Ladder(rungs=(norm,)).channels == ("grad_norm",)
    with pytest.raises(TrajectoryGuardError, match=r"'a' and 'b' carry other channels: \[\] and \['grad_norm'\]"):
        Ladder(rungs=(plain, norm))
    with pytest.raises(TrajectoryGuardError, match="channel 'grad_norm' has 2 series for 1 loss curves"):
        Rung(name="b", plan=plain.plan, curves=plain.curves, channels={"grad_norm": series * 2})


def test_equal_names_are_refused():
    with pytest.raises(TrajectoryGuardError, match=r"\['a'\] more than once"):
        Ladder(rungs=(rung("a"), rung("a", 20)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"metric": "val"}, "metric: 'loss' and 'val'"),
        ({"split": "validation"}, "split: 'train' and 'validation'"),
        ({"recipe": Recipe(tokenizer="b")}, "tokenizer: 'a' and 'b'"),
        ({"recipe": Recipe(tokenizer="a", vocab_size=3)}, None),
        ({"flops_convention": "per-token-excluding-lm-head", "flops_per_token": 50.0}, "flops_convention"),
        ({"schedule": LRSchedule(shape="cosine")}, None),
        ({"total_steps": 5}, None),
    ],
)
def test_only_what_makes_losses_incomparable_is_refused(fields, words):
    first = rung("a", recipe=Recipe(tokenizer="a"))
    other = rung("b", 20, **{"recipe": Recipe(tokenizer="a"), **fields})
    if words is None:
        Ladder(rungs=(first, other))
        return
    with pytest.raises(TrajectoryGuardError, match=f"'a' and 'b'.*{words}"):
        Ladder(rungs=(first, other))


def test_the_identity_keeps_what_every_rung_agrees_on():
    same = Ladder(rungs=(rung("a"), rung("b", 10.5))).identity()
    assert {"metric", "lr_schedule", "tokens_per_active_param", "batch_schedule"} <= set(same)
    mixed = Ladder(rungs=(rung("a"), rung("b", 20, schedule=LRSchedule(shape="cosine")))).identity()
    assert "lr_schedule" not in mixed and "tokens_per_active_param" not in mixed and "metric" in mixed
    partly = Ladder(rungs=(rung("a", recipe=Recipe(tokenizer="x")), rung("b", 20))).identity()
    assert "tokenizer" not in partly
