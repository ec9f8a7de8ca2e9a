"""What a GRPO step reports about its rollouts and its rollout cache (S2 §4.3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.config import RewardConfig
from models.replay import ReplayBuffer, Replayed
from models.rewards import total
from models.trajectory import Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory], reward: RewardConfig) -> dict[str, float]:
    """Of fresh trajectories: reward and its components, success by task, stop reasons, calls, tokens."""
    count = len(trajectories)
    metrics = spread("reward/total", [total(t.components, reward) for t in trajectories])
    metrics["reward/total"] = metrics.pop("reward/total_mean")
    for name in trajectories[0].components:
        values = spread(f"reward/{name}", [t.components[name] for t in trajectories])
        metrics |= values | {f"reward/{name}": values.pop(f"reward/{name}_mean")}
    won = [t.components["accuracy"] > 0 for t in trajectories]
    metrics["grpo/solved"] = float(np.mean(won))
    for task in sorted({t.prompt.task for t in trajectories}):
        own = [w for w, t in zip(won, trajectories, strict=True) if t.prompt.task == task]
        metrics[f"grpo/success_{task}"] = float(np.mean(own))
    for reason in sorted({t.stop_reason for t in trajectories}):
        metrics[f"grpo/stop_{reason}"] = sum(t.stop_reason is reason for t in trajectories) / count
    metrics["grpo/calls_per_episode"] = sum(t.calls for t in trajectories) / count
    metrics["grpo/turns_per_episode"] = sum(len(t.steps) for t in trajectories) / count
    metrics["grpo/tokens_per_episode"] = sum(t.sampled_tokens for t in trajectories) / count
    return metrics


def replay_metrics(replay: ReplayBuffer, replayed: Sequence[Replayed], version: int) -> dict[str, float]:
    """Of the rollout cache: what it holds, its priorities, and how stale what was replayed is (in versions)."""
    ages = [version - 1 - each.group.version for each in replayed]
    priorities = replay.priorities()
    return {
        "replay/size": float(len(replay)),
        "replay/megabytes": replay.bytes / 1e6,
        "replay/successes": float(len(replay.successes)),
        "replay/unsolved_prompts": float(len(replay.unsolved)),
        "replay/replayed_groups": float(len(replayed)),
        "replay/mean_age": float(np.mean(ages or [0])),
        "replay/max_age": float(max(ages, default=0)),
        "replay/min_weight": min((each.weight for each in replayed), default=1.0),
        "replay/priority_mean": float(priorities.mean()) if len(priorities) else 0.0,
        "replay/priority_median": float(np.median(priorities)) if len(priorities) else 0.0,
        "replay/priority_max": float(priorities.max()) if len(priorities) else 0.0,
    }


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, smallest and largest of the values, under `name`_mean, _min and _max."""
    return {
        f"{name}_mean": float(np.mean(values)),
        f"{name}_min": float(np.min(values)),
        f"{name}_max": float(np.max(values)),
    }
