"""What every format holds, before anything is checked against tools or environment."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from models.agent_format import (
    RESPONSE_CLOSE,
    RESPONSE_OPEN,
    TAGS,
    THINK_CLOSE,
    THINK_OPEN,
    ParsedTurn,
    parse_call,
    parse_turn,
)
from tools.base import Picture, ToolCall

Record = dict[str, Any]

_THOUGHT = re.compile(rf"\s*{THINK_OPEN}(.*?){THINK_CLOSE}", re.DOTALL)


class UnfitError(Exception):
    """A line cannot become a trajectory; the message is the reason, in one line."""


@dataclass(frozen=True)
class Turn:
    """One turn as the file has it: a call with what came back, or the response."""

    think: str
    call: ToolCall | None = None
    observation: dict[str, Any] | None = None
    picture: Picture | None = None  # that came with the observation
    response: str | None = None


@dataclass(frozen=True)
class Conversation:
    """One line of a file. `tools`: names offered, None if the line does not say."""

    question: str
    pictures: tuple[Picture, ...]
    tools: tuple[str, ...] | None
    turns: tuple[Turn, ...]


@dataclass
class Draft:
    """Collects the turns of a conversation and refuses roles out of order.

    A question, then calls each followed by what came back, then one answer and nothing more.
    """

    tools: tuple[str, ...] | None
    question: str | None = None
    pictures: tuple[Picture, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    waiting: tuple[str, ToolCall] | None = None  # a thought and a call without its observation

    def ask(self, question: str, pictures: Sequence[Picture]) -> None:
        if self.question is not None:
            raise UnfitError("asks a second question; a trajectory is one question and its answer")
        self.question, self.pictures = question, tuple(pictures)

    def call(self, think: str, call: ToolCall) -> None:
        self._agent_speaks()
        self.waiting = think, call

    def observe(self, text: str, pictures: Sequence[Picture]) -> None:
        if self.waiting is None:
            raise UnfitError(f"{self._where()}: an observation without a call before it")
        if len(pictures) > 1:
            raise UnfitError(f"{self._where()}: the observation has {len(pictures)} pictures, at most one")
        think, call = self.waiting
        payload = read_object(text, f"{self._where()}: the observation")
        self.turns.append(Turn(think, call, payload, next(iter(pictures), None)))
        self.waiting = None

    def answer(self, think: str, response: str) -> None:
        self._agent_speaks()
        self.turns.append(Turn(think, response=response))

    def done(self) -> Conversation:
        """The whole. Raises UnfitError unless it ends with an answer."""
        if self.question is None:
            raise UnfitError("asks no question")
        if self.waiting is not None:
            raise UnfitError(f"{self._where()}: the call of {self.waiting[1].name} has no observation")
        if not self.turns or self.turns[-1].response is None:
            raise UnfitError("does not end with an answer")
        return Conversation(self.question, self.pictures, self.tools, tuple(self.turns))

    def _agent_speaks(self) -> None:
        if self.question is None:
            raise UnfitError("the agent speaks before the question")
        if self.waiting is not None:
            raise UnfitError(f"{self._where()}: the call of {self.waiting[1].name} has no observation")
        if self.turns and self.turns[-1].response is not None:
            raise UnfitError("goes on after the answer")

    def _where(self) -> str:
        return f"turn {len(self.turns) + 1}"


def say(draft: Draft, text: str) -> None:
    """Add a turn that is written out as text, in the agent's own format or as a thought and an answer."""
    if any(tag in text for tag in TAGS if tag not in (THINK_OPEN, THINK_CLOSE)):
        parsed: ParsedTurn = parse_turn(text)
        if parsed.call is not None and parsed.well_formed:
            draft.call(parsed.think, parsed.call)
        elif parsed.response is not None and parsed.well_formed:
            draft.answer(parsed.think, parsed.response)
        else:
            defect = parsed.defect or "must be one thought, then one call or one response, each in its tags"
            raise UnfitError(f"turn {len(draft.turns) + 1}: {defect}")
    else:
        draft.answer(*split_thought(text))


def split_thought(text: str) -> tuple[str, str]:
    """("find the start", "rest") of "<think>find the start</think>rest"; without tags the thought is ""."""
    match = _THOUGHT.match(text)
    return ("", text.strip()) if match is None else (match[1].strip(), text[match.end() :].strip())


def thought_text(think: str) -> str:
    return f"{THINK_OPEN}{think}{THINK_CLOSE}"


def response_text(think: str, response: str) -> str:
    return f"{thought_text(think)}{RESPONSE_OPEN}{response}{RESPONSE_CLOSE}"


def read_call(name: Any, arguments: Any, where: str) -> ToolCall:
    """A call from its name and its arguments, which are an object or the JSON text of one."""
    if not isinstance(name, str) or not name:
        raise UnfitError(f"{where}: the call has no name")
    if isinstance(arguments, str):
        arguments = read_object(arguments, f"{where}: the arguments of {name}")
    elif arguments is None:
        arguments = {}
    elif not isinstance(arguments, dict):
        raise UnfitError(f"{where}: the arguments of {name} are neither an object nor its JSON text")
    return ToolCall(name, arguments)


def read_call_text(text: str, where: str) -> ToolCall:
    """A call from the JSON text of name and arguments."""
    call, defect = parse_call(text)
    if call is None:
        raise UnfitError(f"{where}: {defect}")
    return call


def read_object(text: str, what: str) -> dict[str, Any]:
    """The JSON object in a text. Raises UnfitError; NaN and Infinity are no JSON."""
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise UnfitError(f"{what}: not valid JSON: {text[:60]!r}") from None
    if not isinstance(value, dict):
        raise UnfitError(f"{what}: a {type(value).__name__}, not a JSON object")
    return value


def read_tools(value: Any) -> tuple[str, ...] | None:
    """Names in a list of tool descriptions, which may be JSON text; None if there is no such list."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise UnfitError(f"tools: not valid JSON: {value[:60]!r}") from None
    if not value:
        return None
    if not isinstance(value, list):
        raise UnfitError(f"tools: a {type(value).__name__}, not a list")
    return tuple(_tool_name(each) for each in value)


def _tool_name(value: Any) -> str:
    described = value.get("function", value) if isinstance(value, dict) else value
    name = described.get("name") if isinstance(described, dict) else described
    if not isinstance(name, str):
        raise UnfitError(f"tools: {str(value)[:60]!r} has no name")
    return name


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
