"""Every option of the loop at once: exact resume, rollback, exploration, the critic, old solutions."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from models.checkpoint import Checkpoints
from models.config import (
    CriticConfig,
    CurriculumConfig,
    GRPOConfig,
    GuardConfig,
    KLConfig,
    ReplayConfig,
    RewardConfig,
    Schedule,
)
from models.grpo import GRPOParts, GRPOState, explored_prompts, grpo_step, with_reference, with_success
from models.policy import Policy, Sequence, token_logprobs
from models.replay import ReplayBuffer, ReplayGroup
from models.training_engine import start_engine
from models.trajectory import Trajectory
from models.update import Example, Knobs, kl_weights, per_token, reference_logprobs, update
from tasks.grpo import guard, restore
from tests.models.policies import engine_for, small_policy
from tests.models.test_grpo import AGENT, CONFIG, _parts, _sampled, _weights, _with_reward

EVERYTHING = GRPOConfig(
    steps=5,
    prompts_per_step=3,
    group_size=Schedule(start=2, end=4),
    advantage="gae",
    lr=1e-3,
    clip_high=1.4,
    dual_clip=3.0,
    entropy_bonus=0.01,
    passes=2,
    minibatches=2,
    sizes=(4,),
    std_floor=1e-6,
    kl=KLConfig(control="target", target=0.01, cross_tool=0.5, threshold=0.001),
    curriculum=CurriculumConfig(by="success", success=0.1),
    guards=GuardConfig(policy_pool=2, pool_every=1),
    critic=CriticConfig(lr=1e-2),
    replay=ReplayConfig(
        capacity=50, replayed_groups=2, revisit_share=0.4, exploration_every=2, exploration_groups=1
    ),
)
REWARD = RewardConfig(exploration=0.1, turning_points=0.1, shaping=0.5, step_cost=0.01, adaptive=True)


@pytest.fixture(autouse=True)
def _spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.grpo.score", _with_reward)


def _everything(policy: Policy) -> tuple[GRPOParts, GRPOState]:
    policy.model.add_critic()
    parts = _parts(policy, EVERYTHING)
    state = GRPOState.start(EVERYTHING)
    state.pool.admit(policy.model)
    return parts, state


def test_a_run_with_every_option_resumes_to_the_same_weights(tmp_path: Path) -> None:
    """NeMo-RL#3599, ms-swift#9935: buffer, curriculum, controllers, pool and RNG are one state, or data are lost."""

    def run(
        steps: int, checkpoints: Checkpoints | None, resume: bool
    ) -> tuple[torch.Tensor, dict[str, float]]:
        policy = small_policy(agent=AGENT)
        parts, state = _everything(policy)
        if resume and checkpoints is not None:
            state = restore(parts, state, checkpoints)
        metrics: dict[str, float] = {}
        while state.step < steps:
            metrics, _ = grpo_step(parts, state, EVERYTHING, REWARD, 0)
        if checkpoints is not None and not resume:
            checkpoints.store(parts.engine, {"step": state.step, "state": state})
        return _weights(policy), metrics

    wanted, wanted_metrics = run(5, None, False)
    checkpoints = Checkpoints(tmp_path)
    run(2, checkpoints, False)
    got, metrics = run(5, checkpoints, True)
    torch.testing.assert_close(got, wanted, atol=0, rtol=0)
    timed = ("seconds", "per_second")
    steady = {name: value for name, value in metrics.items() if not name.endswith(timed)}
    assert steady == {name: wanted_metrics[name] for name in steady}


def test_divergence_sends_the_run_back_with_a_smaller_step(tmp_path: Path) -> None:
    """S1 §5.3: the last good policy, a note, and other random numbers than the ones that led astray."""
    policy = small_policy(agent=AGENT)
    parts, state = _parts(policy), GRPOState.start(CONFIG)
    best = Checkpoints(tmp_path)
    assert guard(parts, state, {"grpo/validation_success": 0.5}, best) is None
    good = _weights(policy).clone()
    for _ in range(2):
        grpo_step(parts, state, CONFIG, REWARD, 0)
    assert not torch.equal(_weights(policy), good)
    metrics = {"grpo/validation_success": 0.1, "grpo/kl": float("nan")}
    note = guard(parts, state, metrics, best)
    assert note is not None
    assert "step 2" in note
    assert torch.equal(_weights(policy), good)
    assert state.step == 2
    assert state.lr_scale == CONFIG.guards.lr_factor
    assert {group.version for group in state.replay.groups} == {0}  # the good policy's own
    assert metrics == {"grpo/validation_success": 0.1, "grpo/rollbacks": 1.0}
    again, _ = grpo_step(parts, state, CONFIG, REWARD, 0)
    assert all(np.isfinite(value) for value in again.values())


def test_divergence_before_any_good_policy_is_an_error(tmp_path: Path) -> None:
    policy = small_policy(agent=AGENT)
    with pytest.raises(ValueError, match="before its first evaluation"):
        guard(_parts(policy), GRPOState.start(CONFIG), {"grpo/kl": float("inf")}, Checkpoints(tmp_path))


def test_exploration_is_injected_on_schedule_and_marked() -> None:
    config = EVERYTHING.model_copy(update={"advantage": "group", "guards": GuardConfig()})
    assert [explored_prompts(step, config, 3) for step in range(5)] == [0, 1, 0, 1, 0]
    policy = small_policy(agent=AGENT)
    parts, state = _parts(policy, config), GRPOState.start(config)
    state.step = 1
    _, fresh = grpo_step(parts, state, config, REWARD, 0)
    hot = [t for t in fresh if t.temperature == config.replay.exploration_temperature]
    assert len(hot) == len(fresh) // 3
    assert [bool(t.steps and t.steps[0].forced) for t in hot] == [t.sample % 2 == 1 for t in hot]


def test_an_old_solution_joins_a_group_that_found_none() -> None:
    """ARPO: and never one that did, nor a group of another prompt."""
    solved, *others = _sampled(small_policy(agent=AGENT), 3)
    failed = [replace(t, components={"accuracy": 0.0}) for t in (others[0], others[0])]
    solution = replace(others[0], components={"accuracy": 4.0}, policy_version=-1)
    replay = ReplayBuffer(ReplayConfig())
    replay.remember([solution])
    joined = with_success(ReplayGroup("a", failed, 0.0), replay)
    assert [t.components["accuracy"] for t in joined] == [0.0, 4.0]
    won = ReplayGroup("a", [failed[0], replace(failed[0], components={"accuracy": 4.0})], 1.0)
    assert with_success(won, replay) == won.trajectories
    elsewhere = ReplayGroup("b", [replace(solved, components={"accuracy": 0.0})], 0.0)
    assert with_success(elsewhere, replay) == elsewhere.trajectories


def test_the_critic_learns_and_its_errors_never_touch_the_policy() -> None:
    policy = small_policy(agent=AGENT)
    policy.model.add_critic()
    engine = start_engine(policy.model, lr=0.0, weight_decay=0.0, max_grad_norm=1.0, zero_stage=0)
    trajectories = _sampled(policy, 4)
    counts = [int(t.mask[1:].sum()) for t in trajectories]
    examples = [
        Example(t, np.zeros(n), np.ones(n), np.full(n, 0.9))
        for t, n in zip(trajectories, counts, strict=True)
    ]
    config = EVERYTHING.model_copy(update={"passes": 1, "minibatches": 1, "entropy_bonus": 0.0})
    actor = [p.clone() for n, p in policy.model.named_parameters() if not n.startswith("value_head.")]
    knobs = Knobs(clip_epsilon=0.2, kl_beta=0.0, lr=1e-3)
    errors = [
        update(policy, policy, engine, examples, config, knobs, np.random.default_rng(0))[0][
            "grpo/value_loss"
        ]
        for _ in range(5)
    ]
    assert errors[-1] < errors[0]
    after = [p for n, p in policy.model.named_parameters() if not n.startswith("value_head.")]
    for old, new in zip(actor, after, strict=True):
        torch.testing.assert_close(new, old, atol=1e-6, rtol=0)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_ratio_is_exactly_one_at_any_temperature(temperature: float) -> None:
    """trl#4159: log-probs of another temperature than the sampler's gave a ratio of 2 on the first token."""
    policy = small_policy(agent=AGENT)
    from models.rollout import RolloutRequest
    from tests.models.policies import some_prompts

    requests = [RolloutRequest(p, 0, i) for i, p in enumerate(some_prompts(4))]
    trajectories = engine_for(policy).sample(requests, temperature)
    own = token_logprobs(
        policy, [Sequence(t.ids, t.mask, t.pictures) for t in trajectories], temperature, 5000
    )
    for trajectory, logprobs in zip(trajectories, own, strict=True):
        sampled = torch.from_numpy(trajectory.logprobs[trajectory.mask])
        torch.testing.assert_close(logprobs, sampled, atol=2e-5, rtol=0)


def test_replayed_rollouts_of_age_zero_train_like_fresh_ones() -> None:
    results = []
    for stored in (False, True):
        policy = small_policy(agent=AGENT)
        trajectories = [replace(t, components={"accuracy": 0.0}) for t in _sampled(policy, 4)]
        if stored:
            replay = ReplayBuffer(ReplayConfig())
            replay.add(ReplayGroup("a", trajectories, 0.5))
            trajectories = copy.deepcopy(replay.groups[0].trajectories)
        examples = [Example(t, a) for t, a in zip(trajectories, (1.0, -1.0, 0.5, -0.5), strict=True)]
        parts = _parts(policy)
        update(
            parts.policy,
            parts.reference,
            parts.engine,
            examples,
            CONFIG,
            Knobs(0.2, 0.1, 1e-3),
            np.random.default_rng(0),
        )
        results.append(_weights(policy))
    torch.testing.assert_close(results[1], results[0], atol=0, rtol=0)


def test_integrating_turns_carry_more_kl() -> None:
    """S1 §4.2: only tokens written after results of two tools were in view."""
    base: Trajectory = _sampled(small_policy(agent=AGENT), 1)[0]
    mask = np.zeros(8, dtype=bool)
    mask[[2, 3, 5, 6]] = True
    trajectory = replace(base, ids=np.zeros(8, dtype=np.int32), mask=mask, joined_from=5)
    weights = kl_weights([trajectory], 0.5, torch.device("cpu"))
    assert weights is not None
    assert weights.tolist() == [1.0, 1.0, 1.5, 1.5]
    assert kl_weights([trajectory], 0.0, torch.device("cpu")) is None
    assert per_token([1.0, np.array([2.0, 3.0])], [2, 2]).tolist() == [1.0, 1.0, 2.0, 3.0]


def test_remembered_reference_logprobs_change_nothing() -> None:
    policy, reference = small_policy(agent=AGENT), small_policy(seed=1, agent=AGENT)
    trajectories = [replace(t, components={"accuracy": 0.0}) for t in _sampled(policy, 4)]
    fresh = ReplayGroup("a", trajectories, 0.5)
    known = with_reference(fresh, reference, CONFIG).trajectories
    again = reference_logprobs(reference, trajectories, CONFIG.temperature, CONFIG.micro_batch_tokens)
    kept = reference_logprobs(policy, known, CONFIG.temperature, CONFIG.micro_batch_tokens)
    for old, new in zip(again, kept, strict=True):
        assert torch.equal(old, new)
    assert (
        with_reference(ReplayGroup("b", trajectories, 0.0), reference, CONFIG).trajectories[0].reference
        is None
    )
