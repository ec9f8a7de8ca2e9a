"""The optimizer's part of a GRPO step: log-probs before the update, then `passes` × `minibatches` steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.advantages import gae, whiten
from models.batching import by_tokens
from models.config import GRPOConfig
from models.objective import Clip, grpo_objective, value_loss
from models.policy import Policy, Sequence, token_logprobs, token_values
from models.training_engine import optimizer_step, set_learning_rate
from models.trajectory import Trajectory

FAR = 1e6  # importance cap that never binds: for the ablation without importance weights


@dataclass(frozen=True)
class Example:
    """A trajectory to train on. `advantage` is one number, or one per agent token (GAE)."""

    trajectory: Trajectory
    advantage: float | np.ndarray
    returns: np.ndarray | None = None  # (tokens,), for the critic
    values: np.ndarray | None = None  # (tokens,), the critic's before the update


@dataclass(frozen=True)
class Knobs:
    """What the curriculum and the guards set for this step."""

    clip_epsilon: float
    kl_beta: float
    lr: float


def update(
    policy: Policy,
    reference: Policy,
    engine: Any,
    examples: list[Example],
    config: GRPOConfig,
    knobs: Knobs,
    rng: np.random.Generator,
) -> tuple[dict[str, float], list[float]]:
    """Train on the examples; returns metrics per token and each example's mean |log π_old − log μ|.

    One token denominator per optimizer step, over all micro-batches (verl#3741, ms-swift#10117).
    """
    if not examples:
        return {"grpo/updated_tokens": 0.0}, []
    sequences = [Sequence(e.trajectory.ids, e.trajectory.mask, e.trajectory.pictures) for e in examples]
    lengths = [len(sequence.ids) for sequence in sequences]
    temperature, size = config.temperature, config.micro_batch_tokens
    # with a single optimizer step the policy before it is the one in the forward pass
    single = config.passes == 1 and min(config.minibatches, len(sequences)) == 1
    old = [] if single else token_logprobs(policy, sequences, temperature, size)
    frozen = reference_logprobs(reference, [e.trajectory for e in examples], temperature, size)
    behaviour = [torch.from_numpy(e.trajectory.logprobs[1:][e.trajectory.mask[1:]]) for e in examples]
    counts = [len(piece) for piece in behaviour]
    set_learning_rate(engine, knobs.lr, config.critic.lr)
    clip = Clip(knobs.clip_epsilon, knobs.clip_epsilon * config.clip_high, config.dual_clip)
    sums = dict.fromkeys(
        ("policy", "kl", "clipped", "masked", "weight", "entropy", "sampler_gap", "value_loss", "tokens"), 0.0
    )
    gaps, ratio_max, grad_norm = [0.0] * len(examples), 1.0, 0.0
    policy.model.train()

    def losses(part: np.ndarray) -> Iterator[Tensor]:
        nonlocal ratio_max
        tokens = sum(counts[i] for i in part)
        for micro in by_tokens(part.tolist(), lengths, size):
            batch = policy.collate([sequences[i] for i in micro])
            current, entropy, *values = engine(batch, temperature, config.advantage == "gae")
            device = current.device
            joined = torch.cat([behaviour[i] for i in micro]).to(device)
            before = current.detach() if single else torch.cat([old[i] for i in micro]).to(device)
            sampler = joined if config.replay.importance_weights else before
            terms = grpo_objective(
                current,
                sampler,
                before,
                torch.cat([frozen[i] for i in micro]).to(device),
                per_token([examples[i].advantage for i in micro], [counts[i] for i in micro]).to(device),
                clip=clip,
                kl_beta=knobs.kl_beta,
                is_cap=config.is_cap,
                kl_weights=kl_weights([examples[i].trajectory for i in micro], config.kl.cross_tool, device),
            )
            loss = terms.loss - config.entropy_bonus * entropy.sum()
            if values:
                critic = value_loss(
                    values[0], *critic_targets([examples[i] for i in micro], device), config.critic.value_clip
                )
                loss = loss + config.critic.weight * critic
                sums["value_loss"] += float(critic.detach())
            for name in ("policy", "kl", "clipped", "masked", "weight"):
                sums[name] += getattr(terms, name)
            gap = (before - joined).abs()
            sums["entropy"] += float(entropy.detach().sum())
            sums["sampler_gap"] += float(gap.sum())
            sums["tokens"] += len(current)
            ratio_max = max(ratio_max, terms.ratio_max)
            for index, piece in zip(micro, gap.split([counts[i] for i in micro]), strict=True):
                gaps[index] = float(piece.mean()) if len(piece) else 0.0
            yield loss / tokens

    for _ in range(config.passes):
        order = rng.permutation(len(examples))
        for part in np.array_split(order, min(config.minibatches, len(order))):
            grad_norm = optimizer_step(engine, losses(part))
    total = sums.pop("tokens")
    metrics = {f"grpo/{name}": value / total for name, value in sums.items()}
    return metrics | {
        "grpo/updated_tokens": total,
        "grpo/grad_norm": grad_norm,
        "grpo/ratio_max": ratio_max,
        "grpo/lr": knobs.lr,
    }, gaps


def reference_logprobs(
    reference: Policy, trajectories: list[Trajectory], temperature: float, size: int
) -> list[Tensor]:
    """The reference's log-probs of agent tokens; a trajectory that holds them is not asked for again."""
    known = {i: torch.from_numpy(t.reference) for i, t in enumerate(trajectories) if t.reference is not None}
    missing = [i for i in range(len(trajectories)) if i not in known]
    sequences = [Sequence(t.ids, t.mask, t.pictures) for t in (trajectories[i] for i in missing)]
    known |= zip(missing, token_logprobs(reference, sequences, temperature, size), strict=True)
    return [known[i] for i in range(len(trajectories))]


def per_token(advantages: list[float | np.ndarray], counts: list[int]) -> Tensor:
    """Advantages of all agent tokens in order, float32 (sum of counts,)."""
    return torch.from_numpy(
        np.concatenate([np.broadcast_to(a, n) for a, n in zip(advantages, counts, strict=True)]).astype(
            np.float32
        )
    )


def per_token_of_turns(trajectory: Trajectory, turns: np.ndarray) -> np.ndarray:
    """A number per turn, repeated for each of the turn's tokens: (agent tokens,)."""
    return np.repeat(turns, trajectory.turn_ends - trajectory.turn_starts + 1)


def kl_weights(trajectories: list[Trajectory], extra: float, device: torch.device) -> Tensor | None:
    """1 + `extra` on agent tokens written when results of two tools had been seen, 1 elsewhere (S1 §4.2)."""
    if extra == 0:
        return None
    pieces = []
    for t in trajectories:
        where = np.flatnonzero(t.mask[1:]) + 1
        pieces.append(1.0 + extra * (where >= t.joined_from))
    return torch.from_numpy(np.concatenate(pieces).astype(np.float32)).to(device)


def critic_targets(examples: list[Example], device: torch.device) -> tuple[Tensor, Tensor]:
    """Values before the update and returns of the examples' agent tokens."""
    old = np.concatenate([e.values for e in examples if e.values is not None]).astype(np.float32)
    returns = np.concatenate([e.returns for e in examples if e.returns is not None]).astype(np.float32)
    return torch.from_numpy(old).to(device), torch.from_numpy(returns).to(device)


def critic_examples(
    policy: Policy, trajectories: list[Trajectory], rewards: list[tuple[float, ...]], config: GRPOConfig
) -> list[Example]:
    """Examples with the critic's token-level advantages, whitened over the batch (S2 §4.2, §5.1).

    `rewards` are those of each trajectory's turns, paid at the turn's last token. γ and λ act from turn to turn: a
    discount per token would make the worth of a plan depend on how wordy it is.
    """
    sequences = [Sequence(t.ids, t.mask, t.pictures) for t in trajectories]
    values = token_values(policy, sequences, config.micro_batch_tokens)
    pairs = []
    for trajectory, paid, own in zip(trajectories, rewards, values, strict=True):
        lengths = trajectory.turn_ends - trajectory.turn_starts + 1
        starts = np.cumsum(lengths) - lengths
        turn_advantages, _ = gae(
            np.asarray(paid), own.numpy()[starts], config.critic.gamma, config.critic.lam
        )
        advantages = np.repeat(turn_advantages, lengths)
        pairs.append((advantages, advantages + np.repeat(own.numpy()[starts], lengths), own.numpy()))
    whitened = whiten([advantages for advantages, _, _ in pairs], config.std_floor)
    return [
        Example(t, advantages, returns, own)
        for t, advantages, (_, returns, own) in zip(trajectories, whitened, pairs, strict=True)
    ]
