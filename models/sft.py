"""Supervised fine-tuning on the cold start, as pure planning plus one training step.

The plan of all batches is a pure function of lengths, settings and seed, so a run that was killed goes on at
step k with exactly the batches that an uninterrupted run would see (trl#3247, NeMo-RL#3599).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from models.batching import by_tokens
from models.checkpoint import Checkpoints
from models.config import SFTConfig
from models.policy import Policy, Sequence
from models.training_engine import (
    optimizer_step,
    rank,
    set_learning_rate,
    start_engine,
    sum_over_ranks,
    world_size,
)


@dataclass(frozen=True)
class Plan:
    """Optimizer steps, each a list of micro-batches, each a list of sequence indices."""

    steps: list[list[list[int]]]
    windows: list[int]  # context window of each step
    dropped: int  # sequences longer than the last window

    def tokens(self, lengths: np.ndarray) -> int:
        return int(sum(lengths[index] for step in self.steps for batch in step for index in batch))


def plan_batches(lengths: np.ndarray, config: SFTConfig, seed: int, ranks: int = 1) -> Plan:
    """Plan the whole run. `lengths` are token counts per sequence, shape (n,).

    The context window grows by `context_schedule` (S1 §5.2: progressive extension from 512 to 8192): each phase
    takes an equal share of the tokens from the sequences that fit its window. A micro-batch holds at most
    `micro_batch_tokens` tokens, a step `gradient_accumulation` of them for each of the `ranks`.
    """
    rng = np.random.default_rng(seed)
    usable = lengths <= config.context_schedule[-1]
    total = float(lengths[usable].sum()) * config.epochs
    if config.token_budget is not None:
        total = min(total, config.token_budget)
    plan = Plan([], [], int((~usable).sum()))
    for window in config.context_schedule:
        remaining = total / len(config.context_schedule)
        for step in _endless_steps(np.flatnonzero(lengths <= window), lengths, config, rng, ranks):
            if remaining <= 0:
                break
            plan.steps.append(step)
            plan.windows.append(window)
            remaining -= sum(int(lengths[index]) for batch in step for index in batch)
    return plan


def _endless_steps(
    pool: np.ndarray, lengths: np.ndarray, config: SFTConfig, rng: np.random.Generator, ranks: int
) -> Iterator[list[list[int]]]:
    """Optimizer steps over a pool of sequences, epoch after epoch; none for an empty pool."""
    left_over: list[list[int]] = []
    size = config.gradient_accumulation * ranks
    while len(pool):
        left_over += by_tokens(rng.permutation(pool).tolist(), lengths.tolist(), config.micro_batch_tokens)
        while len(left_over) >= size:
            yield left_over[:size]
            left_over = left_over[size:]


def learning_rate(step: int, total: int, config: SFTConfig) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = max(1, round(total * config.warmup_ratio))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return config.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def train_sft(
    policy: Policy,
    sequences: list[Sequence],
    config: SFTConfig,
    seed: int,
    checkpoints: Checkpoints,
    on_step: Callable[[int, int, dict[str, float]], None],
    validation: Callable[[], dict[str, float]] | None = None,
) -> Any:
    """Train in place and return the engine. Resumes from `checkpoints` when it holds a state.

    `on_step(step, total, metrics)` is called after every optimizer step; `validation()` every `eval_every` steps
    and after the last one.
    """
    lengths = np.array([len(sequence.ids) for sequence in sequences])
    plan = plan_batches(lengths, config, seed, world_size())
    if not plan.steps:
        raise ValueError(
            f"sft: no step fits the settings: {len(sequences)} sequences, context_schedule {config.context_schedule}"
        )
    engine = start_engine(
        policy.model,
        lr=config.lr,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        zero_stage=config.zero_stage,
    )
    state = checkpoints.restore(engine)
    first = state["step"] if state else 0
    tokens_seen = state["tokens"] if state else 0
    total = len(plan.steps)
    policy.model.train()
    for step in range(first, total):
        set_learning_rate(engine, learning_rate(step, total, config))
        loss, grad_norm, agent_tokens, tokens = sft_step(engine, policy, sequences, plan.steps[step])
        tokens_seen += tokens
        metrics = {
            "sft/loss": loss,
            "sft/lr": learning_rate(step, total, config),
            "sft/context_window": plan.windows[step],
            "sft/tokens": tokens_seen,
            "sft/agent_tokens": agent_tokens,
            "sft/grad_norm": grad_norm,
            "sft/dropped_sequences": plan.dropped,
        }
        done = step + 1
        if done % config.checkpoint_every == 0 and done < total:
            checkpoints.store(engine, {"step": done, "tokens": tokens_seen})
        if validation is not None and (done % config.eval_every == 0 or done == total):
            policy.model.eval()
            metrics |= validation()
            policy.model.train()
        on_step(done, total, metrics)
    return engine


def sft_step(
    engine: Any, policy: Policy, sequences: list[Sequence], micro_batches: list[list[int]]
) -> tuple[float, float, int, int]:
    """One optimizer step: mean negative log-prob per agent token over all its micro-batches, on all ranks.

    One denominator for the whole step (trl#6439, open-instruct#1137: a mean per micro-batch depends on the
    split). Returns (loss, gradient norm, agent tokens, tokens), the same on every rank.
    """
    agent_tokens = sum(int(sequences[index].mask[1:].sum()) for batch in micro_batches for index in batch)
    loss_sum = 0.0

    def losses() -> Iterator[Tensor]:
        nonlocal loss_sum
        for micro_batch in micro_batches[rank() :: world_size()]:
            batch = policy.collate([sequences[index] for index in micro_batch])
            logprobs, _ = engine(batch)
            loss = -logprobs.sum() / max(1, agent_tokens)
            loss_sum += float(loss.detach())
            yield loss * world_size()  # DeepSpeed averages gradients over ranks

    grad_norm = optimizer_step(engine, losses())
    tokens = sum(len(sequences[index].ids) for batch in micro_batches for index in batch)
    return sum_over_ranks(loss_sum), grad_norm, agent_tokens, tokens
