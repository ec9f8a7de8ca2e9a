"""The agent's format as text: one writer and one parser for SFT, rollouts and evaluation (DESIGN.md).

    <think>…</think><tool_call>{"name": "POINT", "params": {"target": "start"}}</tool_call>
    <obs>{"coordinates": [125, 80]}</obs>
    <think>…</think><response>…</response>

Parsing never raises: whatever the policy wrote is either a call, a response, or a named defect that becomes an
error observation (verifiers#1763, hermes-agent#1796, headroom#2071: malformed calls must neither crash, nor
run with guessed arguments).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tools.base import ToolCall

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
OBS_OPEN, OBS_CLOSE = "<obs>", "</obs>"
RESPONSE_OPEN, RESPONSE_CLOSE = "<response>", "</response>"
TAGS = (THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE, OBS_OPEN, OBS_CLOSE, RESPONSE_OPEN, RESPONSE_CLOSE)

_PARAMETER_KEYS = ("params", "parameters", "arguments")  # the first is canonical
_MAX_DEPTH = 32  # json recurses on nesting; deeper text is hostile, not a call
_WELL_FORMED = re.compile(
    rf"\s*{THINK_OPEN}(?P<think>[^<]*){THINK_CLOSE}\s*"
    rf"(?:{CALL_OPEN}(?P<call>.*){CALL_CLOSE}|{RESPONSE_OPEN}(?P<response>[^<]*){RESPONSE_CLOSE})\s*",
    re.DOTALL,
)


@dataclass(frozen=True)
class ParsedTurn:
    """What one agent turn says. At most one of `call` and `response` is set; with neither, `defect` says why."""

    think: str = ""
    call: ToolCall | None = None
    response: str | None = None
    defect: str | None = None
    well_formed: bool = False


def write_call(think: str, call: ToolCall) -> str:
    """The text of a turn that calls a tool."""
    return f"{THINK_OPEN}{think}{THINK_CLOSE}{CALL_OPEN}{call.to_json()}{CALL_CLOSE}"


def write_response(think: str, response: str) -> str:
    """The text of the turn that answers."""
    return f"{THINK_OPEN}{think}{THINK_CLOSE}{RESPONSE_OPEN}{response}{RESPONSE_CLOSE}"


def parse_turn(text: str) -> ParsedTurn:
    """Read one turn as the policy wrote it, end-of-turn markers removed.

    A turn is well formed when it is exactly one thought followed by exactly one call or one response. A turn
    with a readable call inside a broken frame still runs its call (the agent sees the result), but is not well
    formed, so R_format counts it.
    """
    match = _WELL_FORMED.fullmatch(text)
    if match and not _has_tag(match["call"] or ""):
        if match["response"] is not None:
            return ParsedTurn(match["think"].strip(), response=match["response"].strip(), well_formed=True)
        call, defect = parse_call(match["call"])
        return ParsedTurn(match["think"].strip(), call=call, defect=defect, well_formed=call is not None)
    return _parse_broken_frame(text)


def _parse_broken_frame(text: str) -> ParsedTurn:
    calls = text.count(CALL_OPEN), text.count(CALL_CLOSE)
    responses = text.count(RESPONSE_OPEN), text.count(RESPONSE_CLOSE)
    if calls == (1, 1) and responses == (0, 0):
        inside = text.partition(CALL_OPEN)[2].partition(CALL_CLOSE)[0]
        call, defect = parse_call(inside)
        return ParsedTurn(call=call, defect=defect)
    if responses == (1, 1) and calls == (0, 0):
        return ParsedTurn(response=text.partition(RESPONSE_OPEN)[2].partition(RESPONSE_CLOSE)[0].strip())
    if calls == (0, 0) and responses == (0, 0):
        return ParsedTurn(defect="the turn has neither a tool_call nor a response")
    return ParsedTurn(defect="the turn must hold one tool_call or one response, opened and closed once")


def parse_call(text: str) -> tuple[ToolCall | None, str | None]:
    """Read the JSON between the tool_call tags: (call, None), or (None, what is wrong with it)."""
    if _depth(text) > _MAX_DEPTH:
        return None, f"the call is nested deeper than {_MAX_DEPTH} levels"
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return None, "the call is not valid JSON"
    if not isinstance(value, dict):
        return None, "the call is not a JSON object"
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return None, "the call has no name"
    keys = [key for key in _PARAMETER_KEYS if key in value]
    if len(keys) > 1:
        return None, f"the call gives its parameters twice: {' and '.join(keys)}"
    unknown = set(value) - {"name", *_PARAMETER_KEYS}
    if unknown:
        return None, f"the call has an unknown key {sorted(unknown)[0][:40]!r}"
    params: Any = value[keys[0]] if keys else {}
    if not isinstance(params, dict):
        return None, "the parameters are not a JSON object"
    return ToolCall(name, params), None


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _has_tag(text: str) -> bool:
    return any(tag in text for tag in TAGS)


def _depth(text: str) -> int:
    depth = deepest = 0
    for char in text:
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest
