"""How far an episode has come, and random calls to explore with: only from what the agent has seen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from environments.base import Prompt
from environments.vsp.task import Task
from tools.base import Observation, ToolCall


def potential(prompt: Prompt, history: Sequence[tuple[ToolCall | None, Observation | None]]) -> float:
    """In [0, 1]: a quarter for the start, a quarter for the goal (navigation), the rest for a verdict.

    Navigation: the last path drawn is safe and ends at the goal, or ASTAR found one. Verification: a path was drawn
    and judged. Nothing of the map itself is looked at.
    """
    pointed = {
        call.params.get("target"): seen.payload.get("coordinates")
        for call, seen in history
        if call is not None and seen is not None and seen.ok and call.name == "POINT"
    }
    drawn = [
        (call, seen)
        for call, seen in history
        if call is not None and seen is not None and seen.ok and call.name in ("DRAW2DPATH", "ASTAR")
    ]
    if prompt.task == Task.VERIFICATION:
        return 0.5 * ("start" in pointed) + 0.5 * bool(drawn)
    known = 0.25 * ("start" in pointed) + 0.25 * ("goal" in pointed)
    if not drawn:
        return known
    call, seen = drawn[-1]
    if call.name == "ASTAR":
        return known + 0.5
    arrived = seen.payload.get("result") == "path_safe" and seen.payload.get("end") == pointed.get("goal")
    return known + 0.5 * arrived


def random_call(prompt: Prompt, rng: np.random.Generator) -> ToolCall:
    """A call of a random offered tool with random parameters inside the picture."""
    width, height = prompt.pictures[0].size
    name = prompt.tools[int(rng.integers(len(prompt.tools)))]

    def pixel() -> list[int]:
        return [int(rng.integers(width)), int(rng.integers(height))]

    if name == "POINT":
        return ToolCall(name, {"target": str(rng.choice(["start", "goal", "holes"]))})
    if name == "DRAW2DPATH":
        moves = "".join(rng.choice(list("LRUD"), size=int(rng.integers(1, 5))))
        return ToolCall(name, {"start": pixel(), "directions": moves})
    if name == "ASTAR":
        return ToolCall(name, {"start": pixel(), "goal": pixel()})
    left, top = int(rng.integers(width // 2)), int(rng.integers(height // 2))
    return ToolCall("CROP", {"box": [left, top, left + width // 2, top + height // 2]})
