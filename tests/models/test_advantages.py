"""Advantages stay finite and belong to their own prompt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.advantages import group_advantages


def test_nearly_equal_rewards_do_not_explode() -> None:
    """NeMo-RL#4161: seven rewards of 0.35 in float32 had σ = 1.6e-4 and advantages of thousands."""
    advantages, informative = group_advantages(np.float32([0.35] * 7 + [0.3500001]).tolist(), ["p"] * 8, 0.05)
    assert np.abs(advantages).max() < 0.01
    equal, spread = group_advantages([0.35] * 8, ["p"] * 8, 0.05)
    assert not equal.any()
    assert not spread.any()
    assert informative.dtype == bool


def test_a_group_of_one_has_advantage_zero() -> None:
    """rllm#924: groups of one turned rewards into advantages; trl#5773: their std is NaN."""
    advantages, informative = group_advantages([1.0, 0.0, 1.0], ["a", "b", "c"], 0.05)
    assert advantages.tolist() == [0.0, 0.0, 0.0]
    assert not informative.any()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1)), min_size=1, max_size=30), st.randoms())
def test_order_and_neighbours_do_not_matter(rows: list[tuple[str, float]], rng: object) -> None:
    """grpo-flat#2, RAGEN#146: normalising by reshape mixes prompts."""
    keys, rewards = [k for k, _ in rows], [r for _, r in rows]
    advantages, _ = group_advantages(rewards, keys, 0.05)
    order = np.random.default_rng(0).permutation(len(rows))
    shuffled, _ = group_advantages([rewards[i] for i in order], [keys[i] for i in order], 0.05)
    np.testing.assert_allclose(shuffled, advantages[order], atol=1e-9)
    for key in set(keys):
        own = [i for i, k in enumerate(keys) if k == key]
        alone, _ = group_advantages([rewards[i] for i in own], [key] * len(own), 0.05)
        np.testing.assert_allclose(advantages[own], alone, atol=1e-9)
        assert abs(advantages[own].sum()) < 1e-6


def test_broken_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="reward 1 is not finite"):
        group_advantages([1.0, float("nan")], ["a", "a"], 0.05)
    with pytest.raises(ValueError, match="3 group keys"):
        group_advantages([1.0], ["a", "a", "a"], 0.05)
