"""Risks of a search space: names that do not exist, ranges that a model refuses, weights that were forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from models.config import RewardConfig
from tasks.params import ParamsError, load_params, override
from tasks.sweep_space import base_values, resolve_space
from tests.tasks.sweeps import small_params


def space(**dimensions: Any) -> Any:
    named = {name.replace("__", "."): value for name, value in dimensions.items()}
    return resolve_space(small_params(sweep__space=named))


@pytest.mark.parametrize("profile", ["laptop", "gpu", "a100x8"])
def test_the_shipped_spaces_fit_their_profiles(profile: str) -> None:
    params = load_params(profile=profile)
    found = resolve_space(params)
    for name, value in base_values(params, found).items():
        assert found[name].holds(value)


def test_every_weight_of_the_reward_is_searched() -> None:
    """Also one that is added later."""
    numbers = {
        f"reward.{name}" for name, field in RewardConfig.model_fields.items() if field.annotation is float
    }
    assert numbers == {name for name in resolve_space(load_params()) if name.startswith("reward.")}


def test_what_the_models_say_is_the_limit() -> None:
    found = resolve_space(small_params(sweep__space={"reward.*": {}}))
    assert (found["reward.step_cost"].low, found["reward.step_cost"].high) == (0.0, 0.05)
    assert "reward.lambda_tool" not in found, "a weight without an upper limit needs one in sweep.space"


@pytest.mark.parametrize(
    ("name", "dimension", "message"),
    [
        (
            "reward.lamda_tool",
            {"low": 0.0, "high": 1.0},
            "unknown parameter; did you mean reward.lambda_tool",
        ),
        ("reward.step_cost", {"low": 0.0, "high": 0.2}, "0.2: input should be less than or equal to 0.05"),
        ("reward.lambda_tool", {"low": 3.0, "high": 4.0}, "present value 2.0 is outside of 3 … 4"),
        ("reward.lambda_tool", {"low": 0.0, "high": 4.0, "log": True}, "logarithmic range must be above 0"),
        ("reward.lambda_tool", {"low": 4.0, "high": 1.0}, "low 4 is not below high 1"),
        ("reward.lambda_tool", {"low": 1.0}, "has no high and its model sets no limit"),
        ("reward.lambda_tool", {"choices": [1.0, -2.0, 2.0]}, "-2.0: input should be greater than or equal"),
        ("grpo.passes", {"low": 1.0, "high": 2.5}, "is a whole number"),
        ("grpo.advantage", {"low": 1.0, "high": 2.0}, "is no number; give `choices`"),
        ("grpo.steps", {"low": 1.0, "high": 200.0}, "set it by sweep.steps"),
        ("sft.lr", {"low": 1e-5, "high": 1.0}, "does not change a trial"),
        ("nothing.*", {}, "no block has this name"),
    ],
)
def test_a_mistake_is_one_line(name: str, dimension: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError) as error:
        resolve_space(small_params(sweep__space={name: dimension}))
    assert message in str(error.value)
    assert f"sweep.space.{name}: " in str(error.value)
    assert "\n" not in str(error.value)


def test_a_range_and_choices_together_are_refused_when_parameters_are_read() -> None:
    with pytest.raises(ParamsError, match="both a range and choices"):
        override(load_params(), {"sweep.space": {"grpo.lr": {"low": 1e-5, "choices": [1e-5, 1e-4]}}})


def test_whole_numbers_and_choices_keep_their_kind() -> None:
    found = space(grpo__passes={"low": 1.0, "high": 3.0}, grpo__advantage={"choices": ["group", "dynamic"]})
    assert found["grpo.passes"].integer
    assert found["grpo.advantage"].text() == "group | dynamic"
