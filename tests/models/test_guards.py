"""Guards: what counts as divergence, what diversity measures, and a pool that keeps the SFT policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from models.adaptive_weights import WINDOW, AdaptiveWeights
from models.config import CurriculumConfig, GuardConfig, KLConfig, RewardConfig
from models.curriculum import Curriculum
from models.guards import DivergenceGuard, PolicyPool, plan_diversity
from models.kl_control import kl_beta, next_factor
from models.trajectory import Step, Trajectory
from tests.models.policies import engine_for, small_policy, some_prompts
from tests.models.test_grpo import AGENT, _sampled
from tools.base import Observation, ToolCall

SPREADS = {"utilisation": 0.0, "turning_points": 0.0, "exploration": 0.0}


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"grpo/kl": float("nan")}, "grpo/kl is not finite"),
        ({"grpo/grad_norm": float("inf")}, "grpo/grad_norm is not finite"),
        ({"grpo/kl": 1.5}, "KL of 1.5 per token"),
        ({"grpo/validation_success": 0.3}, "validation success fell from 0.500 to 0.300"),
        ({"grpo/validation_success": 0.45, "grpo/kl": 0.1}, None),
        ({}, None),
    ],
)
def test_divergence_is_named(metrics: dict[str, float], reason: str | None) -> None:
    """S1 §5.3, S2 §5.1: a collapse must end a run's drift, and say why."""
    guard = DivergenceGuard(GuardConfig(max_drop=0.1, max_kl=1.0), best=0.5)
    found = guard.divergence(metrics)
    assert found is None if reason is None else found is not None and reason in found


def test_only_the_best_policy_is_kept() -> None:
    guard = DivergenceGuard(GuardConfig())
    assert [guard.is_best(value) for value in (0.4, 0.3, 0.4, 0.6)] == [True, False, True, True]


def _episodes(plans: list[str]) -> list[Trajectory]:
    base = _sampled(small_policy(agent=AGENT), 1)[0]
    kinds = {
        "s": Step("", ToolCall("POINT", {"target": "start"}), Observation({}), None, True),
        "g": Step("", ToolCall("POINT", {"target": "goal"}), Observation({}), None, True),
        "x": Step("", ToolCall("DRAW2DPATH", {}), Observation({"result": "path_safe"}), None, True),
    }
    return [replace(base, steps=tuple(kinds[letter] for letter in plan)) for plan in plans]


def test_diversity_is_zero_for_one_plan_and_one_for_as_many_as_samples() -> None:
    """S1 §5.3: a policy that knows a single plan per prompt has degenerated."""
    assert plan_diversity(_episodes(["sgx"] * 4)) == 0.0
    assert plan_diversity(_episodes(["sgx", "gsx", "x", "sx"])) == 1.0
    assert plan_diversity(_episodes(["sgx", "sgx", "x", "x"])) == pytest.approx(2 / 3)
    assert plan_diversity([]) == 0.0


def test_the_pool_always_holds_the_sft_policy_and_never_grows() -> None:
    model, rng = nn.Linear(2, 1), np.random.default_rng(0)
    pool = PolicyPool(size=3)
    pool.admit(model)
    first = pool.members[0]["weight"].clone()
    for step in range(8):
        nn.init.constant_(model.weight, float(step))
        pool.admit(model, rng)
        assert len(pool.members) <= 3
        assert torch.equal(pool.members[0]["weight"], first)
    assert float(pool.members[-1]["weight"].mean()) == 7.0  # the newest is there as well
    reference = nn.Linear(2, 1)
    chosen = {pool.choose(reference, rng) for _ in range(30)}
    assert chosen == {0, 1, 2}
    assert torch.equal(reference.weight, pool.members[pool.current]["weight"])


def test_a_pool_of_one_copies_nothing() -> None:
    pool, model = PolicyPool(size=1), nn.Linear(2, 1)
    before = model.weight.clone()
    pool.admit(model)
    pool.choose(model, np.random.default_rng(0))
    assert not pool.members
    assert torch.equal(model.weight, before)


def test_beta_never_falls_below_its_floor() -> None:
    """A controller without one (verl) goes to 0 in a quiet phase, and the next drift meets no resistance."""
    config, factor = KLConfig(control="target", target=0.05, floor=0.004), 1.0
    for _ in range(200):
        factor = next_factor(factor, 0.0, config)
    assert kl_beta(0.1, factor, 0.0, config) == 0.004
    for _ in range(200):
        factor = next_factor(factor, 10.0, config)
    assert kl_beta(0.1, factor, 10.0, config) > 1.0
    assert next_factor(1.0, 10.0, KLConfig(control="schedule")) == 1.0


def test_below_the_threshold_nothing_pulls_the_policy_back() -> None:
    """S1 §5.3, as docs/explanation reads it."""
    config = KLConfig(threshold=0.05, floor=0.001)
    assert kl_beta(0.1, 1.0, 0.049, config) == 0.001
    assert kl_beta(0.1, 1.0, 0.051, config) == 0.1


def test_progress_by_success_waits_for_it_and_never_goes_back() -> None:
    curriculum = Curriculum(CurriculumConfig(by="success", success=0.6), steps=11)
    seen = []
    for step, solved in enumerate([0.0] * 5 + [1.0] * 6 + [0.0] * 6, 1):
        curriculum.update(solved, step)
        seen.append(curriculum.progress)
    assert seen[4] == 0.0
    assert seen[10] > 0.0
    assert seen == sorted(seen)
    assert seen[-1] <= 1.0


def test_progress_by_steps_ends_at_one() -> None:
    curriculum = Curriculum(CurriculumConfig(), steps=5)
    for step in range(1, 6):
        curriculum.update(0.0, step)
    assert curriculum.progress == 1.0


def _adapted(
    calls: list[float], success: list[float], reward: RewardConfig, spread: float = 0.0
) -> RewardConfig:
    weights = AdaptiveWeights()
    for c, s in zip(calls, success, strict=True):
        weights.update(reward, c, s, {**SPREADS, "exploration": spread}, main_spread=0.1)
    return weights.apply(reward)


def test_weights_adapt_by_their_rules_only() -> None:
    """S2 §3.2: episodes that grow without more success cost more; a bonus never outweighs the answer."""
    longer = [3.0] * WINDOW + [4.0] * WINDOW
    level, worse = [0.5] * (2 * WINDOW), [0.5] * WINDOW + [0.3] * WINDOW
    reward = RewardConfig(adaptive=True, step_cost=0.01, exploration=0.4)
    assert _adapted(longer, level, reward).step_cost > 0.01
    assert _adapted([3.0] * (2 * WINDOW), worse, reward).step_cost == 0.01
    assert _adapted(level, level, reward, spread=0.5).exploration == pytest.approx(0.4 * 0.8)
    fixed = reward.model_copy(update={"adaptive": False})
    assert _adapted(longer, level, fixed, spread=0.5) == fixed


def test_a_forced_call_is_seen_by_the_agent_and_trained_by_nobody() -> None:
    """S2 §3.1, exploration rollouts: tokens that the policy did not choose carry no gradient."""
    from models.rollout import RolloutRequest

    policy = small_policy(agent=AGENT)
    prompt = some_prompts(1)[0]
    call = ToolCall("POINT", {"target": "goal"})
    plain, forced = engine_for(policy).sample(
        [RolloutRequest(prompt, 0, 1), RolloutRequest(prompt, 1, 1, call)], 1.0
    )
    text = policy.encoder.decode(forced.ids[~np.isin(forced.ids, policy.encoder.forbidden)].tolist())
    assert forced.steps[0].forced
    assert forced.steps[0].call == call
    assert '"target": "goal"}}</tool_call><obs>{"coordinates"' in text
    first = int(np.flatnonzero(forced.mask)[0])
    assert first > int(np.flatnonzero(plain.mask)[0])
    assert not forced.logprobs[:first].any()
