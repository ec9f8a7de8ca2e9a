"""What keeps a run from falling apart: divergence, diversity of plans, and a pool of earlier policies as reference.

(S1 §5.3 and S2 §5.1: a policy degrades by drifting, by giving up its tools, or by forgetting all plans but one.)
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor, nn

from models.config import GuardConfig
from models.training_engine import CRITIC
from models.trajectory import Trajectory


@dataclass
class DivergenceGuard:
    """Judges each evaluation: keep this state as the best, go on, or go back. Part of the checkpoint."""

    config: GuardConfig
    best: float = -1.0  # highest validation success so far
    rollbacks: int = 0
    notes: list[str] = field(default_factory=list)

    def is_best(self, success: float) -> bool:
        """Whether this validation success is at least as high as every earlier one; remembers it."""
        if success < self.best:
            return False
        self.best = success
        return True

    def divergence(self, metrics: Mapping[str, float]) -> str | None:
        """Why the run counts as diverged, or None. Reads whichever of the metrics below are there.

        Not finite: any metric. KL per token above `max_kl`. Validation success more than `max_drop` below its best.
        """
        if broken := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
            return f"{broken[0]} is not finite"
        if (kl := metrics.get("grpo/kl", 0.0)) > self.config.max_kl:
            return f"KL of {kl:.3g} per token is above {self.config.max_kl:g}"
        success = metrics.get("grpo/validation_success", self.best)
        if success < self.best - self.config.max_drop:
            return f"validation success fell from {self.best:.3f} to {success:.3f}"
        return None

    def note_rollback(self, step: int, reason: str) -> str:
        """Count a rollback and word it for the run's record."""
        self.rollbacks += 1
        self.notes.append(f"step {step}: {reason}; back to the best checkpoint")
        return self.notes[-1]


def plan(trajectory: Trajectory) -> tuple[str, ...]:
    """An episode's plan: the tools it called in order, with POINT's target, and whether each call succeeded."""
    names = []
    for step in trajectory.steps:
        if step.call is None:
            names.append("answer" if step.response is not None else "unreadable")
            continue
        target = step.call.params.get("target")
        name = f"{step.call.name}:{target}" if isinstance(target, str) else step.call.name
        result = step.observation.payload.get("result", "") if step.observation else ""
        names.append(f"{name}/{result or (step.observation is not None and step.observation.ok)}")
    return tuple(names)


def plan_diversity(trajectories: Sequence[Trajectory]) -> float:
    """Chance that two sampled episodes of the same prompt follow different plans, in [0, 1]; 0 for no pair.

    Gini-Simpson index 1 − Σp² of the plans of each prompt without replacement, averaged over prompts. It falls to 0
    when the policy knows one plan per prompt (S1 §5.3, "evaluate the diversity of the policy on the validation set").
    """
    plans: dict[str, list[tuple[str, ...]]] = {}
    for trajectory in trajectories:
        plans.setdefault(trajectory.prompt.prompt_id, []).append(plan(trajectory))
    indices = [
        1 - sum(n * (n - 1) for n in Counter(own).values()) / (len(own) * (len(own) - 1))
        for own in plans.values()
        if len(own) > 1
    ]
    return float(np.mean(indices)) if indices else 0.0


@dataclass
class PolicyPool:
    """Weights of earlier policies that serve as KL reference (S1 §5.3, "a random set of historical policies").

    The SFT policy is always a member; beyond `size`, a random other one leaves. Part of the checkpoint.
    """

    size: int
    members: list[dict[str, Tensor]] = field(default_factory=list)
    current: int = 0

    def admit(self, model: nn.Module, rng: np.random.Generator | None = None) -> None:
        """Take in a copy of the model's weights. A pool of one holds the SFT policy, which the reference is."""
        if self.size == 1:
            return
        self.members.append({k: copy.deepcopy(v.detach().cpu()) for k, v in model.state_dict().items()})
        if len(self.members) > self.size:
            assert rng is not None  # only the first member, the SFT policy, comes without one
            del self.members[int(rng.integers(1, self.size))]

    def choose(self, reference: nn.Module, rng: np.random.Generator) -> int:
        """Give the reference the weights of a random member; returns which."""
        if self.size > 1:
            self.current = int(rng.integers(len(self.members)))
            self.load_current_into(reference)
        return self.current

    def load_current_into(self, reference: nn.Module) -> None:
        """The weights that the reference had, after a restart. A critic's are left out."""
        if self.size > 1:
            weights = self.members[self.current]
            reference.load_state_dict({k: v for k, v in weights.items() if not k.startswith(CRITIC)})
