"""Advantages: how much better than expected a trajectory, or a token, was. Pure functions of rewards.

Groups are formed by key, never by reshape (RAGEN#146, grpo-flat#2). Variances are two-pass in float64, and σ never
falls below a floor: seven equal rewards in float32 gave σ = 1.6e-4 and advantages of thousands (NeMo-RL#4161). A
group of one, or of equal rewards, has advantage 0 (trl#5773, rllm#924) and is counted as uninformative.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

SMALL_SPREAD = 0.5  # of the batch's: groups of less spread than that are scaled by the batch's (`dynamic`)


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], std_floor: float
) -> tuple[np.ndarray, np.ndarray]:
    """A_i = (r_i − μ_group) / σ_group (S1 §2.1) and the mask of groups with any spread, both of shape (n,).

    Raises ValueError for rewards that are not finite, or lengths that differ (trl#6533).
    """
    centred, spreads, informative = _centred(rewards, groups)
    return centred / np.maximum(spreads, std_floor), informative


def global_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], std_floor: float
) -> tuple[np.ndarray, np.ndarray]:
    """A_i = (r_i − μ_batch) / σ_batch over all groups with spread; the mask as in `group_advantages`.

    An easy prompt's failures then weigh less than a hard prompt's successes. Groups without spread stay out of
    both the mean and the update: their advantage would only say which prompt was easy.
    """
    values = np.asarray(rewards, dtype=np.float64)
    _, _, informative = _centred(rewards, groups)
    advantages = np.zeros_like(values)
    if informative.any():
        own = values[informative] - values[informative].mean()
        advantages[informative] = own / max(float(np.sqrt(np.mean(own**2))), std_floor)
    return advantages, informative


def dynamic_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], std_floor: float
) -> tuple[np.ndarray, np.ndarray]:
    """Centred by group, scaled by the group's σ or by the batch's (S1 §5.2, "per-group vs global").

    The rule: a group whose σ is at least half of the batch's (root mean square of the centred rewards of all groups
    with spread) keeps its own; a group of less spread, where the rewards differ by little that matters, is scaled by
    the batch's, so that small differences stay small.
    """
    centred, spreads, informative = _centred(rewards, groups)
    if not informative.any():
        return centred, informative
    batch = float(np.sqrt(np.mean(centred[informative] ** 2)))
    scale = np.where(spreads >= SMALL_SPREAD * batch, spreads, batch)
    return centred / np.maximum(scale, std_floor), informative


def turn_advantages(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    potentials: Sequence[Sequence[float]],
    std_floor: float,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Advantages of each trajectory's turns, each (turns,), and the mask of groups with spread.

    A turn is compared with the turns of its group that were taken in a like situation: after as many setbacks, a
    setback being a turn that did not raise the potential. A = (r − mean reward of those trajectories) / σ_group.
    Compared with the whole group, a second try would look bad only because bad luck made it necessary, and a policy
    so trained gives up its second tries (anchor states: GiGPO, arXiv 2505.10978).
    """
    values = np.asarray(rewards, dtype=np.float64)
    _, spreads, informative = _centred(rewards, groups)
    situations: dict[tuple[Hashable, int], list[int]] = {}
    setbacks = [_setbacks_before(own) for own in potentials]
    for index, (key, own) in enumerate(zip(groups, setbacks, strict=True)):
        for count in sorted(set(own.tolist())):
            situations.setdefault((key, count), []).append(index)
    baselines = {situation: float(values[members].mean()) for situation, members in situations.items()}
    advantages = []
    for index, (key, own) in enumerate(zip(groups, setbacks, strict=True)):
        baseline = np.array([baselines[key, count] for count in own.tolist()])
        scale = max(float(spreads[index]), std_floor)
        advantages.append((values[index] - baseline) / scale if informative[index] else np.zeros(len(own)))
    return advantages, informative


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimates and returns of one episode (Schulman et al. 2016, eq. 16), both (T,).

    `rewards[t]` is paid after action t, `values[t]` is the critic's estimate before it; after the last action the
    value is 0. δ_t = r_t + γV_{t+1} − V_t and A_t = δ_t + γλA_{t+1}; returns are A + V.
    """
    advantages = np.zeros(len(rewards), dtype=np.float64)
    following, later = 0.0, 0.0
    for t in range(len(rewards) - 1, -1, -1):
        delta = float(rewards[t]) + gamma * following - float(values[t])
        later = delta + gamma * lam * later
        advantages[t], following = later, float(values[t])
    return advantages, advantages + np.asarray(values, dtype=np.float64)


def whiten(pieces: Sequence[np.ndarray], std_floor: float) -> list[np.ndarray]:
    """The same arrays with the mean of all their entries subtracted, divided by their common σ (S2 §5.1)."""
    everything = np.concatenate(pieces) if pieces else np.zeros(0)
    if not len(everything):
        return list(pieces)
    mean = everything.mean()
    std = max(float(np.sqrt(np.mean((everything - mean) ** 2))), std_floor)
    return [(piece - mean) / std for piece in pieces]


def _setbacks_before(potentials: Sequence[float]) -> np.ndarray:
    """How many turns before each one left the potential no higher than it had been at its best, int (turns,)."""
    counts, best, setbacks = [], 0.0, 0
    for value in potentials:
        counts.append(setbacks)
        setbacks += value <= best
        best = max(best, value)
    return np.array(counts, dtype=np.int64)


def _centred(
    rewards: Sequence[float], groups: Sequence[Hashable]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards less their group's mean (0 in groups without spread), σ of each one's group, groups with spread."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or len(values) != len(groups):
        raise ValueError(f"{len(groups)} group keys for rewards of shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"reward {int(np.flatnonzero(~np.isfinite(values))[0])} is not finite")
    members: dict[Hashable, list[int]] = {}
    for index, key in enumerate(groups):
        members.setdefault(key, []).append(index)
    centred, spreads = np.zeros_like(values), np.zeros_like(values)
    informative = np.zeros(len(values), dtype=bool)
    for indices in members.values():
        own = values[indices]
        if len(indices) < 2 or np.ptp(own) <= 1e-9:
            continue
        centred[indices] = own - own.mean()
        spreads[indices] = np.sqrt(np.mean(centred[indices] ** 2))
        informative[indices] = True
    return centred, spreads, informative
