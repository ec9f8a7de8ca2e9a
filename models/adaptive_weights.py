"""Reward weights that follow stated rules during a run (S2 §3.2, "dynamic adjustment")."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from models.config import RewardConfig

WINDOW = 10  # steps that are compared with the WINDOW before them
LONGER = 1.1  # growth of calls per episode that counts
SMALLEST_COST, LARGEST_COST = 0.002, 0.05
DOMINATES = 0.5  # share of the main reward's spread that a bonus may have
BONUSES = ("utilisation", "turning_points", "exploration")


@dataclass
class AdaptiveWeights:
    """How the weights in force differ from the configured ones, and the history that decides; in the checkpoint.

    Rules, applied after each step once two windows are full:

    1. Episodes that grow longer (calls per episode up by a tenth) without more success: the step cost rises by a
       quarter. Success that falls: it falls by a quarter, down to the configured value.
    2. A bonus whose weighted spread exceeds half of the main reward's: its weight falls by a fifth, so that the
       answer stays what is learnt.
    """

    extra_step_cost: float = 0.0
    factors: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BONUSES, 1.0))
    calls: deque[float] = field(default_factory=lambda: deque(maxlen=2 * WINDOW))
    success: deque[float] = field(default_factory=lambda: deque(maxlen=2 * WINDOW))

    def apply(self, configured: RewardConfig) -> RewardConfig:
        """The weights in force."""
        if not configured.adaptive:
            return configured
        changes = {name: getattr(configured, name) * factor for name, factor in self.factors.items()}
        cost = min(configured.step_cost + self.extra_step_cost, LARGEST_COST)
        return configured.model_copy(update={**changes, "step_cost": cost})

    def update(
        self,
        configured: RewardConfig,
        calls: float,
        success: float,
        spreads: Mapping[str, float],
        main_spread: float,
    ) -> None:
        """Take in a step: mean calls, share solved, σ of each bonus (unweighted) and of the main reward."""
        self.calls.append(calls)
        self.success.append(success)
        if not configured.adaptive or len(self.calls) < 2 * WINDOW:
            return
        for name in BONUSES:
            weight = getattr(configured, name) * self.factors[name]
            if weight * spreads[name] > DOMINATES * main_spread > 0:
                self.factors[name] *= 0.8
        old_calls, new_calls = _halves(self.calls)
        old_success, new_success = _halves(self.success)
        cost = configured.step_cost + self.extra_step_cost
        if new_calls > LONGER * old_calls and new_success <= old_success:
            self.extra_step_cost += max(0.25 * cost, SMALLEST_COST)
        elif new_success < old_success:
            self.extra_step_cost = max(0.75 * cost - configured.step_cost, 0.0)


def _halves(values: deque[float]) -> tuple[float, float]:
    items = list(values)
    return sum(items[:WINDOW]) / WINDOW, sum(items[WINDOW:]) / WINDOW
