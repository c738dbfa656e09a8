import pytest

from trajectory_guard.errors import RecipeMismatchError, TrajectoryGuardError
from trajectory_guard.recipe import Recipe, RecipeCheck, check_recipe

LINEAR = {"shape": "linear", "warmup": 0.02}


def test_equal_identities_agree():
    same = {"metric": "loss", "lr_schedule": LINEAR, "tokens_per_active_param": 20.0}
    assert check_recipe(same, dict(same)) == RecipeCheck()
    assert RecipeCheck().message() == "the recipes agree"


def test_every_error_warning_and_unknown_is_told_at_once():
    fit = {"metric": "a", "tokenizer": "x", "data": "d", "optimizer": "adam", "vocab_size": 10}
    plan = {"metric": "b", "tokenizer": "y", "data": "e", "optimizer": "adam", "sequence_length": 5}
    with pytest.raises(RecipeMismatchError) as caught:
        check_recipe(fit, plan)
    text = str(caught.value)
    for part in (
        "error: metric: fit 'a', plan 'b'",
        "error: tokenizer: fit 'x', plan 'y'",
        "warning: data: fit 'd', plan 'e'",
        "unknown, not compared: vocab_size, sequence_length",
        "override_recipe=True",
    ):
        assert part in text


def test_an_override_keeps_the_errors_and_says_so():
    check = check_recipe({"metric": "a"}, {"metric": "b"}, override=True)
    assert check.overridden and check.errors
    assert "overridden" in check.message()


@pytest.mark.parametrize(
    ("name", "fit", "plan", "outcome"),
    [
        ("tokens_per_active_param", 20.0, 21.9, None),
        ("tokens_per_active_param", 20.0, 22.1, "errors"),
        ("tokens_per_active_param", 20.0, 18.0, "errors"),
        ("lr_schedule", LINEAR, {"shape": "linear", "warmup": 0.03}, None),
        ("lr_schedule", LINEAR, {"shape": "linear", "final": 0.1}, "errors"),
        ("data_phases", [0.5], [0.505], None),
        ("data_phases", [0.5], [0.6], "errors"),
        ("data_phases", [0.5], [0.5, 0.8], "errors"),
        ("warmup", 0.02, 0.024, None),
        ("warmup", 0.02, 0.04, "warnings"),
        ("warmup", 0.0, 0.0, None),
        ("data_fingerprint", "ab", "cd", "warnings"),
        ("software", {"python": "3.11"}, {"python": "3.12"}, "warnings"),
        ("batch_schedule", [[0.0, 1.0]], [[0.0, 1.0], [0.3, 2.0]], "warnings"),
        ("sequence_length", 64, 128, "errors"),
        ("flops_convention", "6ND", "per-token-including-lm-head", "errors"),
    ],
)
def test_each_field_is_judged_by_its_own_measure(name, fit, plan, outcome):
    check = check_recipe({name: fit}, {name: plan}, override=True)
    assert bool(check.errors) == (outcome == "errors")
    assert bool(check.warnings) == (outcome == "warnings")


def test_a_recipe_survives_json_and_refuses_unknown_or_wrong_fields():
    recipe = Recipe(tokenizer="byte", vocab_size=256, data_phases=(0.2, 0.8), optimizer_constants={"beta1": 0.9})
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    for content in (
        {"tokens": 1},
        {"vocab_size": 1.5},
        {"vocab_size": True},
        {"tokenizer": 1},
        {"data_phases": "half"},
    ):
        with pytest.raises(TrajectoryGuardError):
            Recipe.from_dict(content)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr_schedule", {"shape": "saw"}), ("tokens_per_active_param", "many"), ("warmup", None), ("data_phases", 3)],
)
def test_a_damaged_identity_gives_our_own_error(name, value):
    good = {"lr_schedule": LINEAR, "tokens_per_active_param": 20.0, "warmup": 0.1, "data_phases": [0.5]}
    with pytest.raises(TrajectoryGuardError):
        check_recipe({name: value}, {name: good[name]})


@pytest.mark.parametrize("name", ["vocab_size", "sequence_length"])
@pytest.mark.parametrize("value", [0, True, 1.5, "256", 10**40])
def test_a_count_that_is_none_is_refused(name: str, value: object):
    with pytest.raises(TrajectoryGuardError, match=f"{name}.*2\\^53"):
        Recipe(**{name: value})
