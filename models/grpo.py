"""GRPO with cached rollouts: the whole step on one page.

    sample groups → score → store in the replay buffer → train on fresh plus replayed groups → sync → repeat

(S1 §2.1 for the algorithm, S2 §3 for the rollout cache.) Everything random in step k is drawn from (seed, k), so a
run resumed at step k repeats an uninterrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from environments.base import Prompt
from models.advantages import group_advantages
from models.batching import by_tokens
from models.config import GRPOConfig, RewardConfig
from models.objective import ObjectiveTerms, grpo_objective
from models.policy import Policy, Sequence, token_logprobs
from models.replay import ReplayBuffer, ReplayGroup
from models.rewards import components, total
from models.rollout import RolloutEngine, RolloutRequest
from models.training_engine import optimizer_step, set_learning_rate
from models.trajectory import Trajectory


@dataclass
class GRPOState:
    """What changes from step to step, beside the weights: all of it goes into the checkpoint."""

    step: int
    version: int  # policy version, +1 per update
    replay: ReplayBuffer


@dataclass(frozen=True)
class GRPOParts:
    """What a step works with."""

    policy: Policy
    reference: Policy
    engine: Any  # DeepSpeed engine over policy.model
    rollouts: RolloutEngine
    draw_prompts: Callable[[int, float], list[Prompt]]  # (step, progress) -> prompts
    grade: Callable[[Prompt, str], bool]


def grpo_step(
    parts: GRPOParts, state: GRPOState, config: GRPOConfig, reward: RewardConfig, seed: int
) -> tuple[dict[str, float], list[Trajectory]]:
    """One step of the loop; returns its metrics and the fresh trajectories."""
    progress = state.step / max(1, config.steps - 1)
    clip_epsilon, kl_beta = config.clip_epsilon.at(progress), config.kl_beta.at(progress)
    rng = np.random.default_rng([seed, state.step])
    began = time.monotonic()

    # 1. sample N trajectories of each prompt
    prompts = parts.draw_prompts(state.step, progress)
    size = round(config.group_size.at(progress))
    requests = [RolloutRequest(p, n, int(rng.integers(2**62))) for p in prompts for n in range(size)]
    sampled = parts.rollouts.sample(requests, config.temperature)
    sampling_seconds = time.monotonic() - began

    # 2. score: components stay with the trajectory, the sum is made late
    fresh = [score(trajectory, parts.grade) for trajectory in sampled]
    fresh_groups = group(fresh, state.version, reward)

    # 3. cache the rollouts, 4. mix fresh groups with replayed ones
    dropped = state.replay.drop_stale(state.version)
    replayed = state.replay.sample(config.replay.replayed_groups, state.version, rng)
    for each in fresh_groups:
        state.replay.add(each)
    trained = [t for each in (*fresh_groups, *replayed) for t in each.trajectories]
    keys = [each.key for each in (*fresh_groups, *replayed) for _ in each.trajectories]
    advantages, informative = group_advantages(
        [total(t.components, reward) for t in trained], keys, config.std_floor
    )

    # 5. update: groups without spread have no advantage and are left out, KL included (trl#7068)
    rows = np.flatnonzero(informative)
    updates = update(parts, [trained[i] for i in rows], advantages[rows], config, clip_epsilon, kl_beta, rng)

    # 6. the sampler follows
    state.version += 1
    state.step += 1
    parts.rollouts.sync(state.version)
    metrics = {
        "grpo/clip_epsilon": clip_epsilon,
        "grpo/kl_beta": kl_beta,
        "grpo/group_size": size,
        "grpo/zero_variance_share": 1 - float(informative[: len(fresh)].mean()),
        "grpo/sampling_seconds": sampling_seconds,
        "grpo/sampled_tokens_per_second": sum(t.sampled_tokens for t in fresh) / sampling_seconds,
        "grpo/step_seconds": time.monotonic() - began,
        "replay/size": len(state.replay),
        "replay/replayed_groups": len(replayed),
        "replay/dropped_groups": dropped,
        "replay/mean_age": float(np.mean([state.version - 1 - g.version for g in replayed] or [0])),
    }
    return metrics | updates | rollout_metrics(fresh, reward), fresh


def score(trajectory: Trajectory, grade: Callable[[Prompt, str], bool]) -> Trajectory:
    """The trajectory with its reward components."""
    response = trajectory.response
    correct = response is not None and grade(trajectory.prompt, response)
    return replace(trajectory, components=components(trajectory.steps, trajectory.stop_reason, correct))


def group(trajectories: list[Trajectory], version: int, reward: RewardConfig) -> list[ReplayGroup]:
    """Group by prompt; a group's priority is the spread of its rewards."""
    members: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        members.setdefault(trajectory.prompt.prompt_id, []).append(trajectory)
    return [
        ReplayGroup(f"{key}@{version}", own, float(np.std([total(t.components, reward) for t in own])))
        for key, own in members.items()
    ]


def update(
    parts: GRPOParts,
    trajectories: list[Trajectory],
    advantages: np.ndarray,
    config: GRPOConfig,
    clip_epsilon: float,
    kl_beta: float,
    rng: np.random.Generator,
) -> dict[str, float]:
    """`passes` × `minibatches` optimizer steps; one token denominator per optimizer step."""
    if not trajectories:
        return {"grpo/updated_tokens": 0.0}
    sequences = [Sequence(t.ids, t.mask, t.pictures) for t in trajectories]
    temperature = config.temperature
    lengths = [len(sequence.ids) for sequence in sequences]
    # with a single optimizer step the policy before it is the one in the forward pass
    single = config.passes == 1 and min(config.minibatches, len(sequences)) == 1
    old = [] if single else token_logprobs(parts.policy, sequences, temperature, config.micro_batch_tokens)
    reference = token_logprobs(parts.reference, sequences, temperature, config.micro_batch_tokens)
    behaviour = [torch.from_numpy(t.logprobs[1:][t.mask[1:]]) for t in trajectories]
    set_learning_rate(parts.engine, config.lr)
    sums = dict.fromkeys(("policy", "kl", "clipped", "entropy", "sampler_gap", "tokens"), 0.0)
    parts.policy.model.train()
    grad_norm = 0.0
    for _ in range(config.passes):
        order = rng.permutation(len(sequences))
        for part in np.array_split(order, min(config.minibatches, len(order))):
            tokens = sum(int(sequences[i].mask[1:].sum()) for i in part)

            def losses(part: np.ndarray = part, tokens: int = tokens) -> Any:
                for micro in by_tokens(part.tolist(), lengths, config.micro_batch_tokens):
                    current, entropy = parts.engine(
                        parts.policy.collate([sequences[i] for i in micro]), temperature
                    )
                    device, repeats = current.device, [len(behaviour[i]) for i in micro]
                    before = current.detach() if single else torch.cat([old[i] for i in micro]).to(device)
                    sampler = torch.cat([behaviour[i] for i in micro]).to(device)
                    per_token = torch.tensor(np.repeat(advantages[micro], repeats), dtype=torch.float32)
                    terms: ObjectiveTerms = grpo_objective(
                        current,
                        sampler,
                        before,
                        torch.cat([reference[i] for i in micro]).to(device),
                        per_token.to(device),
                        clip_epsilon=clip_epsilon,
                        kl_beta=kl_beta,
                        is_cap=config.is_cap,
                    )
                    sums["policy"] += terms.policy
                    sums["kl"] += terms.kl
                    sums["clipped"] += terms.clipped
                    sums["entropy"] += float(entropy.detach().sum())
                    sums["sampler_gap"] += float((before - sampler).abs().sum())
                    sums["tokens"] += len(current)
                    yield terms.loss / tokens

            grad_norm = optimizer_step(parts.engine, losses())
    total_tokens = sums.pop("tokens")
    return {f"grpo/{name}": value / total_tokens for name, value in sums.items()} | {
        "grpo/updated_tokens": total_tokens,
        "grpo/grad_norm": grad_norm,
    }


def rollout_metrics(trajectories: list[Trajectory], reward: RewardConfig) -> dict[str, float]:
    """Means over fresh trajectories: reward and its components, success by task, stop reasons, tools."""
    count = len(trajectories)
    rewards = [total(t.components, reward) for t in trajectories]
    metrics = {"reward/total": float(np.mean(rewards))}
    for name in trajectories[0].components:
        values = [t.components[name] for t in trajectories]
        metrics |= {
            f"reward/{name}": float(np.mean(values)),
            f"reward/{name}_min": float(np.min(values)),
            f"reward/{name}_max": float(np.max(values)),
        }
    for task in sorted({t.prompt.task for t in trajectories}):
        won = [t.components["accuracy"] > 0 for t in trajectories if t.prompt.task == task]
        metrics[f"grpo/success_{task}"] = float(np.mean(won))
    for reason in sorted({t.stop_reason for t in trajectories}):
        metrics[f"grpo/stop_{reason}"] = sum(t.stop_reason is reason for t in trajectories) / count
    metrics["grpo/calls_per_episode"] = sum(t.calls for t in trajectories) / count
    metrics["grpo/tokens_per_episode"] = sum(t.sampled_tokens for t in trajectories) / count
    return metrics
