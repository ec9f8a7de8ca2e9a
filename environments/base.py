"""What a world is to the agent: a prompt to answer, a grader that knows the answer, an expert that shows how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tools.base import Picture, ToolCall


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
