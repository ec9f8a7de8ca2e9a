"""The rollout cache: whole groups with their behaviour log-probs, replayed with priority (S2 §3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.config import ReplayConfig
from models.trajectory import Trajectory


@dataclass
class ReplayGroup:
    """The trajectories of one prompt, kept together so that their advantages stay relative to each other."""

    key: str  # prompt and policy version
    trajectories: list[Trajectory]
    priority: float
    replays: int = 0

    @property
    def version(self) -> int:
        return self.trajectories[0].policy_version


class ReplayBuffer:
    """Groups in order of arrival. The oldest leave first when it is full, and those past `max_age` leave always."""

    def __init__(self, config: ReplayConfig) -> None:
        self.config = config
        self.groups: list[ReplayGroup] = []

    def __len__(self) -> int:
        """Trajectories held."""
        return sum(len(group.trajectories) for group in self.groups)

    def add(self, group: ReplayGroup) -> None:
        """Store a group; groups without spread teach nothing and are not stored."""
        if group.priority <= 0:
            return
        self.groups.append(group)
        while len(self) > self.config.capacity and self.groups:
            self.groups.pop(0)

    def drop_stale(self, version: int) -> int:
        """Forget groups older than `max_age` policy versions; returns how many."""
        kept = [group for group in self.groups if version - group.version <= self.config.max_age]
        dropped = len(self.groups) - len(kept)
        self.groups = kept
        return dropped

    def sample(self, count: int, version: int, rng: np.random.Generator) -> list[ReplayGroup]:
        """Up to `count` distinct groups of earlier versions, with probability ∝ priority^exponent / (1 + age).

        Nothing before `warmup` trajectories are stored, and nothing from an empty buffer (trl#6804, SPEAR#1).
        """
        old = [group for group in self.groups if group.version < version]
        if not old or count == 0 or len(self) < self.config.warmup:
            return []
        weights = np.array(
            [group.priority**self.config.priority_exponent / (1 + version - group.version) for group in old]
        )
        chosen = rng.choice(len(old), size=min(count, len(old)), replace=False, p=weights / weights.sum())
        for index in chosen:
            old[index].replays += 1
        return [old[index] for index in chosen]
