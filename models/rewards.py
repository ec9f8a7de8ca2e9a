"""Reward components of an episode, each bounded, stored and logged on its own (S1 §2.2, §5.3; S2 §3.2).

    R = R_format · (λ_tool · R_tool + λ_acc · R_acc)

R_format is 0 or 1, R_tool the mean level of the calls in [0, 4], R_acc 0 or 4. `total` rescales R to [0, 1] by the
largest reward, so that learning rates and floors do not depend on the weights, and adds the hybrid components.
Components are kept in the trajectory and summed late: other weights re-score an episode without sampling it again.

What keeps them from being farmed: bonuses are shares in [0, 1], not counts, and are paid for right answers only, so
more calls do not earn more (DeepEyes#83); costs are capped inside their component, never in the total, which would
flatten a group to one value (AgenticArXiv-RL#76); and they are taken from right answers only, unless
`cost_on_failures`, so that giving up early is never cheaper than trying.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from models.config import RewardConfig
from models.trajectory import Step, StopReason

MAX_LEVEL = 4.0
CALL_LIMIT = 20.0  # calls beyond these cost no more
REPEAT_COST = 0.25  # of the first repetition of a call, twice that of the second, and so on
SETTLED = 0.5  # rise of the potential in one turn that counts as settling the question
BOUNDS: dict[str, tuple[float, float]] = {
    "format": (0.0, 1.0),
    "tool": (0.0, MAX_LEVEL),
    "accuracy": (0.0, MAX_LEVEL),
    "calls": (0.0, CALL_LIMIT),
    "repeats": (0.0, 1.0),
    "utilisation": (0.0, 1.0),
    "turning_points": (0.0, 1.0),
    "exploration": (0.0, 1.0),
}


def components(
    steps: Sequence[Step],
    stop_reason: StopReason,
    correct: bool,
    offered: Sequence[str] = (),
    potentials: Sequence[float] = (),
) -> dict[str, float]:
    """All components of one episode, before weights; `potentials` are those after each step.

    format: every turn well formed, and answered · tool: mean level of the calls; a turn without a readable call
    counts as level 0, so that malformed calls do not raise the mean by being left out · accuracy: right or not ·
    calls: how many · repeats: identical calls, the n-th costing n/4, together at most 1 · utilisation: share of the
    successful calls of which a result turns up in a later call or in the answer · turning_points: whether one call
    raised the potential by half or more, settling the question · exploration: share of the offered tools that were
    called with success. Calls that the loop forced to explore count nowhere.
    """
    steps = [step for step in steps if not step.forced]
    answered = stop_reason is StopReason.ANSWERED
    calls = [step for step in steps if step.response is None]
    right = answered and correct
    return {
        "format": float(answered and all(step.well_formed for step in steps)),
        "tool": sum(step.call_level for step in calls) / len(calls) if calls else 0.0,
        "accuracy": MAX_LEVEL if right else 0.0,
        "calls": min(float(len(calls)), CALL_LIMIT),
        "repeats": repeats(steps),
        "utilisation": utilisation(steps) if right else 0.0,
        "turning_points": float(right and largest_rise(potentials) >= SETTLED),
        "exploration": exploration(steps, offered) if right else 0.0,
    }


def total(values: Mapping[str, float], config: RewardConfig) -> float:
    """The scalar reward of an episode under the given weights: R in [0, 1], plus bonuses, less costs."""
    weighted = config.lambda_tool * values["tool"] + config.lambda_acc * values["accuracy"]
    reward = values["format"] * weighted / (MAX_LEVEL * (config.lambda_tool + config.lambda_acc))
    bonus = sum(
        getattr(config, name) * values[name] for name in ("utilisation", "turning_points", "exploration")
    )
    cost = config.step_cost * values["calls"] + config.repeats * values["repeats"]
    paid = values["accuracy"] > 0 or config.cost_on_failures
    return reward + values["format"] * bonus - (cost if paid else 0.0)


def repeats(steps: Sequence[Step]) -> float:
    """The linearly growing cost of identical calls (S1 §5.3), in [0, 1]."""
    counts = Counter(step.call.to_json() for step in steps if step.call is not None)
    return min(1.0, sum(REPEAT_COST * n for count in counts.values() for n in range(1, count)))


def utilisation(steps: Sequence[Step]) -> float:
    """Share of successful calls with a result that a later call or the answer holds (S2 §3.2), in [0, 1].

    Matched by value: a coordinate pair, or a text of two characters or more. The last call before the answer counts
    as used, since the answer follows from it.
    """
    done = [i for i, s in enumerate(steps) if s.call is not None and s.observation and s.observation.ok]
    if not done:
        return 0.0
    used = sum(_is_used(steps, index) or index == done[-1] for index in done)
    return used / len(done)


def exploration(steps: Sequence[Step], offered: Sequence[str]) -> float:
    """Share of the offered tools that were called with success (S1 §5.3), in [0, 1]."""
    called = {s.call.name for s in steps if s.call is not None and s.observation and s.observation.ok}
    return len(called & set(offered)) / len(offered) if offered else 0.0


def largest_rise(potentials: Sequence[float]) -> float:
    """Largest rise of the potential in one turn over all that came before, so that falling first gains nothing."""
    best, rise = 0.0, 0.0
    for value in potentials:
        rise = max(rise, value - best)
        best = max(best, value)
    return rise


def turn_rewards(
    reward: float, potentials: Sequence[float], weight: float, gamma: float
) -> tuple[float, ...]:
    """Rewards of an episode's turns: `reward` after the last, shaped by F = γΦ(s') − Φ(s) (S2 §5.2).

    `potentials` are Φ after each turn; Φ is 0 before the first and counts as 0 after the last, so that the
    discounted sum of F is 0 whatever the agent does and the best policy stays the best (Ng, Harada & Russell 1999).
    """
    if not potentials:
        return (reward,)
    before = (0.0, *potentials[:-1])
    after = (*potentials[:-1], 0.0)
    shaped = [weight * (gamma * new - old) for old, new in zip(before, after, strict=True)]
    return (*shaped[:-1], shaped[-1] + reward)


def _is_used(steps: Sequence[Step], index: int) -> bool:
    observation = steps[index].observation
    assert observation is not None
    results = [json.dumps(value) for value in _results(observation.payload)]
    for later in steps[index + 1 :]:
        text = json.dumps(later.call.params) if later.call is not None else (later.response or "")
        if any(result.strip('"') in text for result in results):
            return True
    return False


def _results(payload: Any) -> list[Any]:
    """The values in a payload that can be recognised again: coordinate pairs and texts."""
    if isinstance(payload, Mapping):
        return [found for value in payload.values() for found in _results(value)]
    if isinstance(payload, list):
        if payload and all(isinstance(value, int | float) for value in payload):
            return [payload]
        return [found for value in payload for found in _results(value)]
    return [payload] if isinstance(payload, str) and len(payload) >= 2 else []
