"""Group-relative advantages (S1 §2.1): A_i = (r_i − μ) / σ within the trajectories of one prompt."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], std_floor: float
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and a mask of groups with any spread, both of shape (n,) in the order given.

    Groups are formed by key, never by reshape (RAGEN#146, grpo-flat#2). The variance is the two-pass one in
    float64 and σ never falls below `std_floor`: seven equal rewards in float32 gave σ = 1.6e-4 and advantages
    of thousands (NeMo-RL#4161). A group of one, or of equal rewards, has advantage 0 (trl#5773, rllm#924).

    Raises ValueError for rewards that are not finite, or lengths that differ (trl#6533).
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or len(values) != len(groups):
        raise ValueError(f"{len(groups)} group keys for rewards of shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"reward {int(np.flatnonzero(~np.isfinite(values))[0])} is not finite")
    members: dict[Hashable, list[int]] = {}
    for index, key in enumerate(groups):
        members.setdefault(key, []).append(index)
    advantages = np.zeros_like(values)
    informative = np.zeros(len(values), dtype=bool)
    for indices in members.values():
        own = values[indices]
        centred = own - own.mean()
        std = float(np.sqrt(np.mean(centred**2)))
        if len(indices) < 2 or np.ptp(own) <= 1e-9:
            continue
        advantages[indices] = centred / max(std, std_floor)
        informative[indices] = True
    return advantages, informative
