"""Advantages stay finite and belong to their own prompt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.advantages import (
    dynamic_advantages,
    gae,
    global_advantages,
    group_advantages,
    turn_advantages,
    whiten,
)


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


def test_global_and_dynamic_keep_groups_without_spread_out() -> None:
    """trl#7068: a group of equal rewards must not push, not even by being above the batch's mean."""
    rewards, keys = [1.0, 1.0, 0.0, 1.0], ["easy", "easy", "hard", "hard"]
    for estimate in (global_advantages, dynamic_advantages):
        advantages, informative = estimate(rewards, keys, 0.05)
        assert advantages[:2].tolist() == [0.0, 0.0]
        assert informative.tolist() == [False, False, True, True]
        assert advantages[3] > 0 > advantages[2]


def test_dynamic_scaling_follows_its_rule() -> None:
    """S1 §5.2: groups of little spread are scaled by the batch's σ, the others by their own."""
    rewards, keys = [0.0, 1.0, 0.50, 0.52], ["wide", "wide", "narrow", "narrow"]
    dynamic, _ = dynamic_advantages(rewards, keys, 1e-6)
    own, _ = group_advantages(rewards, keys, 1e-6)
    batch = np.sqrt(np.mean(np.array([0.5, 0.5, 0.01, 0.01]) ** 2))
    np.testing.assert_allclose(dynamic[:2], own[:2])
    np.testing.assert_allclose(dynamic[2:], np.array([-0.01, 0.01]) / batch)
    np.testing.assert_allclose(own[2:], [-1.0, 1.0])


def test_estimates_of_an_empty_or_uniform_batch_are_zero() -> None:
    for estimate in (group_advantages, global_advantages, dynamic_advantages):
        advantages, informative = estimate([0.5] * 4, list("aabb"), 0.05)
        assert not advantages.any()
        assert not informative.any()
        assert estimate([], [], 0.05)[0].shape == (0,)


@given(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=10),
    st.floats(0.5, 1),
    st.floats(0, 1),
)
def test_gae_is_the_sum_of_its_definition(pairs: list[tuple[float, float]], gamma: float, lam: float) -> None:
    """Schulman et al. 2016, eq. 16, written out."""
    rewards, values = np.array([r for r, _ in pairs]), np.array([v for _, v in pairs])
    following = np.append(values[1:], 0.0)
    deltas = rewards + gamma * following - values
    wanted = [
        sum((gamma * lam) ** k * deltas[t + k] for k in range(len(pairs) - t)) for t in range(len(pairs))
    ]
    advantages, returns = gae(rewards, values, gamma, lam)
    np.testing.assert_allclose(advantages, wanted, atol=1e-12)
    np.testing.assert_allclose(returns, np.array(wanted) + values, atol=1e-12)


def test_gae_with_lambda_one_compares_the_whole_return_with_the_value() -> None:
    advantages, returns = gae(np.array([0.0, 0.0, 1.0]), np.array([0.2, 0.5, 0.9]), 1.0, 1.0)
    np.testing.assert_allclose(returns, [1.0, 1.0, 1.0])
    np.testing.assert_allclose(advantages, [0.8, 0.5, 0.1])


def test_whitening_is_over_all_pieces_together() -> None:
    white = whiten([np.array([1.0, 3.0]), np.array([5.0])], 0.05)
    assert abs(np.concatenate(white).mean()) < 1e-12
    assert abs(np.concatenate(white).std() - 1) < 1e-12
    assert whiten([np.array([0.3]), np.array([0.3])], 0.05)[0].tolist() == [0.0]


def test_a_second_try_is_compared_with_second_tries() -> None:
    """Whole-episode advantages punish trying again: bad luck, not the second try, lowers its reward."""
    lucky, lucky_too = [0.25, 0.5, 1.0, 1.0], [0.25, 0.5, 1.0, 1.0]
    recovered, failed = [0.25, 0.5, 0.5, 1.0, 1.0], [0.25, 0.5, 0.5, 0.5]
    rewards, keys = [1.0, 1.0, 0.9, 0.0], ["p"] * 4
    turns, informative = turn_advantages(rewards, keys, [lucky, lucky_too, recovered, failed], 0.05)
    assert informative.all()
    assert turns[2][3] > 0  # the successful second try, against the failed one
    assert turns[3][3] < 0
    whole, _ = group_advantages(rewards, keys, 0.05)
    assert turns[2][3] > whole[2]
    np.testing.assert_allclose(turns[0][:3], whole[0])  # with no setback so far, the group is the measure


def test_turns_of_a_group_without_spread_have_no_advantage() -> None:
    turns, informative = turn_advantages([1.0, 1.0], ["p", "p"], [[0.5, 1.0], [0.0, 0.0, 1.0]], 0.05)
    assert not informative.any()
    assert all(not own.any() for own in turns)
