"""What a world is to the agent: a prompt to answer, a grader that knows the answer, an expert that shows how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tools.base import Observation, Picture, ToolCall


@dataclass(frozen=True)
class Prompt:
    """One question with its pictures.

    `question`, `pictures` and `tools` are all that the policy and its tools ever see. `hidden` is for the
    grader and for reports (map rows, gold answer, size, path length) and must not reach either.
    """

    prompt_id: str
    environment: str
    task: str
    question: str
    pictures: tuple[Picture, ...]
    tools: tuple[str, ...]
    hidden: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScriptedTurn:
    """One step of an expert: a thought, then exactly one of a call or a response.

    `mistake` marks a step that the trajectory later corrects; training may leave its tokens out of the loss.
    """

    think: str
    call: ToolCall | None = None
    response: str | None = None
    mistake: bool = False


class Environment(Protocol):
    """What the training loop asks of a world."""

    def grade(self, prompt: Prompt, response: str) -> bool:
        """Whether a response is right. Never raises, whatever the response."""
        ...

    def potential(
        self, prompt: Prompt, history: Sequence[tuple[ToolCall | None, Observation | None]]
    ) -> float:
        """How far an episode has come, in [0, 1], from the calls and observations that the agent has seen."""
        ...

    def random_call(self, prompt: Prompt, rng: np.random.Generator) -> ToolCall:
        """A valid call of a random offered tool, to explore with; knows no more than the agent does."""
        ...
