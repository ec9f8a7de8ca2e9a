"""The rollout cache: whole groups with their behaviour log-probs, replayed with priority (S2 §3.1, §4.2)."""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from environments.base import Prompt
from models.config import ReplayConfig
from models.trajectory import Trajectory
from tools.base import Picture

OBJECT_BYTES = (
    3000  # of a stored trajectory beside its arrays: objects, components, the reference's log-probs
)


class ReplayGroup:
    """The trajectories of one prompt, kept together so that their advantages stay relative to each other.

    Kept without their steps' texts, in memory or in a file (`path`).
    """

    def __init__(self, key: str, trajectories: Sequence[Trajectory], priority: float) -> None:
        self.key = key  # prompt and policy version
        self.version = trajectories[0].policy_version
        self.size = len(trajectories)
        self.priority = priority
        self.replays = 0
        self.bytes = sum(
            t.ids.nbytes + t.mask.nbytes + t.logprobs.nbytes + OBJECT_BYTES for t in trajectories
        )
        self.pictures = {p.sha256 for t in trajectories for p in (*t.pictures, *t.prompt.pictures)}
        self.path: Path | None = None
        self._held: list[Trajectory] | None = list(trajectories)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories, read from disk where they are kept there."""
        if self._held is not None:
            return self._held
        assert self.path is not None
        read: list[Trajectory] = pickle.loads(self.path.read_bytes())
        return read

    def spill(self, folder: Path) -> None:
        """Move the trajectories to a file."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{hashlib.sha256(self.key.encode()).hexdigest()[:24]}.pkl"
        self.path.write_bytes(pickle.dumps(self._held))
        self._held = None

    def forget(self) -> None:
        """Remove the file, if there is one."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        """A checkpoint holds the trajectories themselves, wherever they are kept."""
        return {**self.__dict__, "_held": self.trajectories, "path": None}


@dataclass(frozen=True)
class Replayed:
    """A group drawn from the buffer and the weight that corrects for drawing it more often than others."""

    group: ReplayGroup
    weight: float


@dataclass
class ReplayBuffer:
    """Groups in order of arrival, and solved trajectories by prompt.

    Full: the oldest leave first. Always: groups past `max_age`, and groups whose tokens the present policy finds too
    unlikely or too likely (`max_divergence`), leave.
    """

    config: ReplayConfig
    spill_folder: Path | None = None
    groups: list[ReplayGroup] = field(default_factory=list)
    successes: OrderedDict[str, Trajectory] = field(default_factory=OrderedDict)
    unsolved: OrderedDict[str, Prompt] = field(default_factory=OrderedDict)
    pictures: dict[str, Picture] = field(default_factory=dict)

    def __len__(self) -> int:
        """Trajectories held."""
        return sum(group.size for group in self.groups)

    @property
    def bytes(self) -> int:
        """Memory of the groups that are not on disk, pictures included."""
        held = sum(group.bytes for group in self.groups if group.path is None)
        return held + sum(len(picture.png) for picture in self.pictures.values())

    def add(self, group: ReplayGroup) -> None:
        """Store a group; groups without spread teach nothing and are not stored."""
        if group.priority <= 0:
            return
        stored = ReplayGroup(group.key, [self._compact(t) for t in group.trajectories], group.priority)
        self.groups.append(stored)
        while len(self) > self.config.capacity and self.groups:
            self._drop(self.groups[0])
        if self.spill_folder is not None:
            self._make_room(self.spill_folder)

    def drop_stale(self, version: int) -> int:
        """Forget groups older than `max_age` policy versions; returns how many."""
        stale = [group for group in self.groups if version - group.version > self.config.max_age]
        for group in stale:
            self._drop(group)
        self._forget_pictures()
        return len(stale)

    def forget_after(self, version: int) -> None:
        """Forget groups of policies later than `version`: a run that went back has never had them."""
        for group in [group for group in self.groups if group.version > version]:
            self._drop(group)

    def drop_diverged(self, divergence: dict[str, float]) -> int:
        """Forget groups, by key, whose mean |log π − log μ| per token exceeds the limit; returns how many."""
        limit = self.config.max_divergence
        gone = [group for group in self.groups if divergence.get(group.key, 0.0) > limit]
        for group in gone:
            self._drop(group)
        return len(gone)

    def probabilities(self, groups: Sequence[ReplayGroup], version: int) -> np.ndarray:
        """Chance of each group in one draw: ∝ priority^exponent / (1 + age), newer ones favoured."""
        weights = np.array(
            [g.priority**self.config.priority_exponent / (1 + version - g.version) for g in groups]
        )
        return weights / weights.sum()

    def sample(self, count: int, version: int, rng: np.random.Generator) -> list[Replayed]:
        """Up to `count` distinct groups of earlier versions.

        The weights are (n·p)^−importance_exponent over the largest of the draw (Schaul et al. 2016, §3.4), so they
        are at most 1. Nothing before `warmup` trajectories are stored, and nothing from an empty buffer (trl#6804,
        SPEAR#1).
        """
        old = [group for group in self.groups if group.version < version]
        if not old or count == 0 or len(self) < self.config.warmup:
            return []
        chances = self.probabilities(old, version)
        chosen = rng.choice(len(old), size=min(count, len(old)), replace=False, p=chances)
        weights = (len(old) * chances[chosen]) ** -self.config.importance_exponent
        for index in chosen:
            old[index].replays += 1
        return [
            Replayed(old[index], float(w)) for index, w in zip(chosen, weights / weights.max(), strict=True)
        ]

    # --- solved and unsolved prompts ---------------------------------------------------------------------

    def remember(self, trajectories: Sequence[Trajectory]) -> None:
        """Take note of a fresh group's prompt: solved, then one solution is kept; not, then it is asked again."""
        prompt = trajectories[0].prompt
        key = prompt_key(prompt)
        solved = [t for t in trajectories if t.components["accuracy"] > 0]
        if solved:
            self.unsolved.pop(key, None)
            self.successes[key] = self._compact(solved[0])
        elif key not in self.unsolved:
            self.unsolved[key] = self._compact_prompt(prompt)
        for kept in (self.successes, self.unsolved):
            while len(kept) > self.config.success_capacity:
                kept.popitem(last=False)

    def ask_with_solution(self, trajectory: Trajectory) -> None:
        """Have a prompt asked, with this solution at hand for the case that no fresh trajectory finds one."""
        key = prompt_key(trajectory.prompt)
        self.successes[key] = self._compact(trajectory)
        self.unsolved[key] = self._compact_prompt(trajectory.prompt)

    def success_for(self, prompt: Prompt) -> Trajectory | None:
        """An earlier solution of this very question, if one is kept."""
        return self.successes.get(prompt_key(prompt))

    def revisited(self, count: int) -> list[Prompt]:
        """Up to `count` prompts that were never solved, the longest waiting first; each then waits again."""
        chosen = list(self.unsolved)[:count]
        for key in chosen:
            self.unsolved.move_to_end(key)
        return [self.unsolved[key] for key in chosen]

    # --- keeping it small ----------------------------------------------------------------------------------

    def priorities(self) -> np.ndarray:
        """The priorities of all groups, for statistics."""
        return np.array([group.priority for group in self.groups])

    def _compact(self, trajectory: Trajectory) -> Trajectory:
        """Without the steps' texts, and with pictures that all groups share by content hash."""
        shared = tuple(self._shared(picture) for picture in trajectory.pictures)
        prompt = self._compact_prompt(trajectory.prompt)
        return replace(trajectory, steps=(), pictures=shared, prompt=prompt)

    def _compact_prompt(self, prompt: Prompt) -> Prompt:
        return replace(prompt, pictures=tuple(self._shared(picture) for picture in prompt.pictures))

    def _shared(self, picture: Picture) -> Picture:
        # a copy, since the original keeps its decoded pixels, a hundred times its size
        return self.pictures.setdefault(picture.sha256, Picture(picture.png))

    def _drop(self, group: ReplayGroup) -> None:
        group.forget()
        self.groups.remove(group)

    def _forget_pictures(self) -> None:
        used = set().union(*(group.pictures for group in self.groups))
        used |= {p.sha256 for t in self.successes.values() for p in (*t.pictures, *t.prompt.pictures)}
        used |= {p.sha256 for prompt in self.unsolved.values() for p in prompt.pictures}
        self.pictures = {key: picture for key, picture in self.pictures.items() if key in used}

    def _make_room(self, folder: Path) -> None:
        """Move the oldest groups to disk until the rest fits."""
        for group in self.groups:
            if self.bytes <= self.config.memory_mb * 1e6:
                return
            if group.path is None:
                group.spill(folder)


def prompt_key(prompt: Prompt) -> str:
    """What makes two prompts the same question: its text, pictures and tools."""
    parts = (prompt.question, *(picture.sha256 for picture in prompt.pictures), *prompt.tools)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
