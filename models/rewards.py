"""Reward components of an episode, each bounded, stored and logged on its own (S1 §2.2).

    R = R_format · (λ_tool · R_tool + λ_acc · R_acc)

R_format is 0 or 1, R_tool the mean level of the calls in [0, 4], R_acc 0 or 4. `total` rescales R to [0, 1] by the
largest reward, so that learning rates and floors do not depend on the weights. Components are kept in the
trajectory and summed late: other weights re-score an episode without sampling it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from models.config import RewardConfig
from models.trajectory import Step, StopReason

MAX_LEVEL = 4.0
BOUNDS: dict[str, tuple[float, float]] = {
    "format": (0.0, 1.0),
    "tool": (0.0, MAX_LEVEL),
    "accuracy": (0.0, MAX_LEVEL),
    "calls": (0.0, math.inf),
}


def components(steps: Sequence[Step], stop_reason: StopReason, correct: bool) -> dict[str, float]:
    """All components of one episode, before weights.

    `calls` is the number of tool calls, for `RewardConfig.step_cost`. A turn without a readable call counts as
    a call of level 0: malformed calls must not raise the mean by being left out.
    """
    answered = stop_reason is StopReason.ANSWERED
    calls = [step for step in steps if step.response is None]
    return {
        "format": float(answered and all(step.well_formed for step in steps)),
        "tool": sum(step.call_level for step in calls) / len(calls) if calls else 0.0,
        "accuracy": MAX_LEVEL if answered and correct else 0.0,
        "calls": float(len(calls)),
    }


def total(values: Mapping[str, float], config: RewardConfig) -> float:
    """The scalar reward in [0, 1] under the given weights (less the step cost, never below 0)."""
    weighted = config.lambda_tool * values["tool"] + config.lambda_acc * values["accuracy"]
    reward = values["format"] * weighted / (MAX_LEVEL * (config.lambda_tool + config.lambda_acc))
    return max(0.0, reward - config.step_cost * values["calls"])
