"""GRPO with cached rollouts: the whole step on one page.

    sample groups → score → store in the replay buffer → train on fresh plus replayed groups → sync → repeat

(S1 §2.1 for the algorithm, S2 §3 for the rollout cache.) Everything random in step k is drawn from (seed, k,
rollbacks): a run resumed at step k repeats an uninterrupted one, and one that a guard sent back goes another way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from environments.base import Environment, Prompt
from models.adaptive_weights import BONUSES, AdaptiveWeights
from models.advantages import dynamic_advantages, global_advantages, group_advantages, turn_advantages
from models.config import GRPOConfig, RewardConfig
from models.curriculum import Curriculum
from models.guards import DivergenceGuard, PolicyPool
from models.kl_control import kl_beta, next_factor
from models.policy import Policy
from models.replay import ReplayBuffer, ReplayGroup
from models.rewards import components, total, turn_rewards
from models.rollout import RolloutEngine, RolloutRequest
from models.step_metrics import replay_metrics, rollout_metrics
from models.trajectory import Trajectory, joined_from
from models.update import (
    Example,
    Knobs,
    critic_examples,
    per_token_of_turns,
    reference_logprobs,
    update,
)

MAIN = RewardConfig()  # the reward without bonuses and costs
ESTIMATORS = {"group": group_advantages, "global": global_advantages, "dynamic": dynamic_advantages}


@dataclass
class GRPOState:
    """What changes from step to step, beside the weights: all of it goes into the checkpoint."""

    step: int
    version: int  # policy version, +1 per update
    replay: ReplayBuffer
    curriculum: Curriculum
    guard: DivergenceGuard
    pool: PolicyPool
    weights: AdaptiveWeights
    kl_factor: float = 1.0
    last_kl: float = 0.0
    lr_scale: float = 1.0

    @classmethod
    def start(cls, config: GRPOConfig) -> GRPOState:
        """The state before the first step."""
        return cls(
            step=0,
            version=0,
            replay=ReplayBuffer(config.replay),
            curriculum=Curriculum(config.curriculum, config.steps),
            guard=DivergenceGuard(config.guards),
            pool=PolicyPool(config.guards.policy_pool),
            weights=AdaptiveWeights(),
        )


@dataclass(frozen=True)
class GRPOParts:
    """What a step works with."""

    policy: Policy
    reference: Policy
    engine: Any  # DeepSpeed engine over policy.model
    rollouts: RolloutEngine
    draw_prompts: Callable[[int, float], list[Prompt]]  # (step, progress) -> prompts
    environment: Environment


def grpo_step(
    parts: GRPOParts, state: GRPOState, config: GRPOConfig, reward: RewardConfig, seed: int
) -> tuple[dict[str, float], list[Trajectory]]:
    """One step of the loop; returns its metrics and the fresh trajectories."""
    began, weights, replay = time.monotonic(), state.weights.apply(reward), state.replay
    rng = np.random.default_rng([seed, state.step, state.guard.rollbacks])
    progress = state.curriculum.progress
    beta = kl_beta(config.kl_beta.at(progress), state.kl_factor, state.last_kl, config.kl)
    knobs = Knobs(config.clip_epsilon.at(progress), beta, config.lr * state.lr_scale)

    # 1. sample N trajectories of each prompt; prompts that nobody solved yet come back
    prompts = parts.draw_prompts(state.step, progress)
    again = replay.revisited(round(len(prompts) * config.replay.revisit_share))
    prompts = [*prompts[: len(prompts) - len(again)], *again]
    size = round(config.group_size.at(progress))
    explored = explored_prompts(state.step, config, len(prompts))
    sampled = sample(parts, prompts, size, explored, config, rng)
    sampling_seconds = time.monotonic() - began

    # 2. score: components stay with the trajectory, the sum is made late
    fresh = [score(trajectory, parts.environment) for trajectory in sampled]
    fresh_groups = group(fresh, state.version, weights)
    if config.guards.policy_pool == 1:
        fresh_groups = [with_reference(each, parts.reference, config) for each in fresh_groups]

    # 3. cache the rollouts, 4. mix fresh groups with replayed ones and with old solutions of what failed
    stale = replay.drop_stale(state.version)
    due = (state.step + 1) % config.replay.update_frequency == 0
    replayed = replay.sample(config.replay.replayed_groups if due else 0, state.version, rng)
    trained = [(g, with_success(g, replay), 1.0) for g in fresh_groups]
    trained += [(r.group, r.group.trajectories, r.weight) for r in replayed]
    for each in fresh_groups:
        replay.add(each)
        replay.remember(each.trajectories)

    # 5. update: groups without spread have no advantage and are left out, KL included (trl#7068)
    examples, keys, informative = advantages(parts.policy, trained, weights, config)
    updates, gaps = update(parts.policy, parts.reference, parts.engine, examples, config, knobs, rng)
    diverged = replay.drop_diverged(mean_by_key(keys, gaps))

    # 6. the sampler follows, and so does everything that adapts
    state.version += 1
    state.step += 1
    parts.rollouts.sync(state.version)
    metrics = rollout_metrics(fresh, weights) | replay_metrics(replay, replayed, state.version) | updates
    solved = metrics["grpo/solved"]
    state.curriculum.update(solved, state.step)
    spreads = {name: float(np.std([t.components[name] for t in fresh])) for name in BONUSES}
    main = float(np.std([total(t.components, MAIN) for t in fresh]))
    state.weights.update(reward, metrics["grpo/calls_per_episode"], solved, spreads, main)
    state.last_kl = metrics.get("grpo/kl", state.last_kl)
    state.kl_factor = next_factor(state.kl_factor, state.last_kl, config.kl)
    if state.step % config.guards.pool_every == 0:
        state.pool.admit(parts.policy.model, rng)
    reference = state.pool.choose(parts.reference.model, rng)
    return metrics | {
        "grpo/progress": progress,
        "grpo/clip_epsilon": knobs.clip_epsilon,
        "grpo/kl_beta": beta,
        "grpo/reference_policy": reference,
        "grpo/group_size": size,
        "grpo/zero_variance_share": 1 - float(np.mean(informative[: len(fresh_groups)])),
        "grpo/sampling_seconds": sampling_seconds,
        "grpo/sampled_tokens_per_second": sum(t.sampled_tokens for t in fresh) / sampling_seconds,
        "grpo/step_seconds": time.monotonic() - began,
        "replay/dropped_stale": stale,
        "replay/dropped_diverged": diverged,
    }, fresh


def sample(
    parts: GRPOParts,
    prompts: list[Prompt],
    size: int,
    explored: int,
    config: GRPOConfig,
    rng: np.random.Generator,
) -> list[Trajectory]:
    """`size` trajectories of each prompt; those of the first `explored` prompts hotter and with a random first call."""
    requests = [RolloutRequest(p, n, int(rng.integers(2**62))) for p in prompts for n in range(size)]
    split = explored * size
    hot = [
        replace(request, forced=parts.environment.random_call(request.prompt, rng))
        if request.sample % 2
        else request
        for request in requests[:split]
    ]
    cool = parts.rollouts.sample(requests[split:], config.temperature)
    return [*(parts.rollouts.sample(hot, config.replay.exploration_temperature) if hot else []), *cool]


def explored_prompts(step: int, config: GRPOConfig, prompts: int) -> int:
    """How many prompts of this step are explored: none but in every `exploration_every`-th step (S2 §3.1)."""
    every = config.replay.exploration_every
    return min(config.replay.exploration_groups, prompts) if every and step % every == every - 1 else 0


def score(trajectory: Trajectory, environment: Environment) -> Trajectory:
    """The trajectory with its reward components and the potential after each of the agent's turns."""
    response, steps, prompt = trajectory.response, trajectory.steps, trajectory.prompt
    correct = response is not None and environment.grade(prompt, response)
    history = [(step.call, step.observation) for step in steps]
    potentials = [environment.potential(prompt, history[: n + 1]) for n in range(len(steps))]
    own = [p for p, step in zip(potentials, steps, strict=True) if not step.forced]
    turns = len(trajectory.turn_ends)  # one more than the steps where a turn was cut short
    return replace(
        trajectory,
        components=components(steps, trajectory.stop_reason, correct, prompt.tools, potentials),
        potentials=tuple((own + own[-1:] * turns)[:turns]) or (0.0,) * turns,
        joined_from=joined_from(trajectory),
    )


def group(trajectories: list[Trajectory], version: int, reward: RewardConfig) -> list[ReplayGroup]:
    """Group by prompt; a group's priority is the spread of its rewards."""
    members: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        members.setdefault(trajectory.prompt.prompt_id, []).append(trajectory)
    return [
        ReplayGroup(f"{key}@{version}", own, float(np.std([total(t.components, reward) for t in own])))
        for key, own in members.items()
    ]


def with_reference(fresh: ReplayGroup, reference: Policy, config: GRPOConfig) -> ReplayGroup:
    """The group with the reference's log-probs, so that replaying it asks the reference no second time.

    Only for groups with spread, the others are not trained on, and only while the reference stays the same.
    """
    if fresh.priority <= 0:
        return fresh
    logprobs = reference_logprobs(
        reference, fresh.trajectories, config.temperature, config.micro_batch_tokens
    )
    known = [replace(t, reference=own.numpy()) for t, own in zip(fresh.trajectories, logprobs, strict=True)]
    return ReplayGroup(fresh.key, known, fresh.priority)


def with_success(fresh: ReplayGroup, replay: ReplayBuffer) -> list[Trajectory]:
    """The group, its last failure replaced by an earlier solution if no fresh trajectory solved the prompt.

    (ARPO, arXiv 2505.16282: a group without success teaches nothing about how to succeed.)
    """
    own = fresh.trajectories
    solution = replay.success_for(own[0].prompt)
    if solution is None or any(t.components["accuracy"] > 0 for t in own):
        return own
    return [*own[:-1], solution]


def advantages(
    policy: Policy,
    trained: list[tuple[ReplayGroup, list[Trajectory], float]],
    reward: RewardConfig,
    config: GRPOConfig,
) -> tuple[list[Example], list[str], list[bool]]:
    """Examples of the groups with spread, the key of each one's group, and which groups have spread."""
    trajectories = [t for _, own, _ in trained for t in own]
    keys = [g.key for g, own, _ in trained for _ in own]
    weights = [weight for _, own, weight in trained for _ in own]
    rewards = [total(t.components, reward) for t in trajectories]
    estimate = ESTIMATORS.get(config.advantage, group_advantages)
    values, spread = estimate(rewards, keys, config.std_floor)
    first = np.cumsum([0] + [len(own) for _, own, _ in trained[:-1]])
    informative = [bool(spread[i]) for i in first]
    if config.advantage == "gae":
        shaped = [
            turn_rewards(r, t.potentials, reward.shaping, config.critic.gamma)
            for r, t in zip(rewards, trajectories, strict=True)
        ]
        return critic_examples(policy, trajectories, shaped, config), keys, informative
    rows = np.flatnonzero(spread)
    found: list[float | np.ndarray] = [float(value) for value in values]
    if config.advantage == "turn":
        turns, _ = turn_advantages(rewards, keys, [t.potentials for t in trajectories], config.std_floor)
        found = [per_token_of_turns(t, own) for t, own in zip(trajectories, turns, strict=True)]
    return (
        [Example(trajectories[i], found[i] * weights[i]) for i in rows],
        [keys[i] for i in rows],
        informative,
    )


def mean_by_key(keys: list[str], values: list[float]) -> dict[str, float]:
    """The mean of the values of each key."""
    found: dict[str, list[float]] = {}
    for key, value in zip(keys, values, strict=True):
        found.setdefault(key, []).append(value)
    return {key: sum(own) / len(own) for key, own in found.items()}
