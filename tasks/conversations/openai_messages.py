"""OpenAI's chat messages: roles system, user, assistant (content, tool_calls) and tool.

{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:…"}}, …]},
              {"role": "assistant", "content": "<think>…</think>", "tool_calls": [{"id": …, …}]},
              {"role": "tool", "tool_call_id": …, "content": "{…}"},
              {"role": "assistant", "content": "<think>…</think><response>…</response>"}],
 "tools": [{"type": "function", "function": {…}}]}
"""

from __future__ import annotations

import json
from typing import Any

from environments.vsp.expert import Demonstration
from models.agent_format import OBS_CLOSE, OBS_OPEN
from tasks.conversations.conversation import (
    Conversation,
    Draft,
    Record,
    UnfitError,
    read_call,
    read_tools,
    response_text,
    say,
    split_thought,
    thought_text,
)
from tasks.conversations.pictures import PictureLoader, data_url
from tools.base import Picture
from tools.registry import ToolRegistry


def read(record: Record, load: PictureLoader) -> Conversation:
    """The conversation of a record. Raises UnfitError."""
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise UnfitError("messages: must be a list of objects")
    draft = Draft(read_tools(record.get("tools")))
    loose = iter(record.get("images") or ())  # of `{"type": "image"}` parts, as transformers has them
    call_id: Any = None
    for position, message in enumerate(messages, start=1):
        role = message.get("role")
        where = f"message {position}"
        text, pictures = _content(message.get("content"), load, loose, where)
        if role in ("system", "developer"):
            if position > 1:
                raise UnfitError(f"{where}: {role} may only come first")
        elif role == "user":
            draft.ask(text, pictures)
        elif role == "assistant":
            call_id = _assistant(draft, message, text, where)
        elif role == "tool":
            answered = message.get("tool_call_id")
            if None not in (answered, call_id) and answered != call_id:
                raise UnfitError(f"{where}: tool_call_id {answered!r}, but the call before is {call_id!r}")
            draft.observe(text.strip().removeprefix(OBS_OPEN).removesuffix(OBS_CLOSE), pictures)
        else:
            raise UnfitError(f"{where}: unknown role {role!r}")
    if next(loose, None) is not None:
        raise UnfitError("images: more than the messages have places for")
    return draft.done()


def _assistant(draft: Draft, message: Record, text: str, where: str) -> Any:
    """Add what the assistant says; the id of its call, if it makes one."""
    if message.get("function_call"):
        raise UnfitError(f"{where}: function_call is the old form; write tool_calls")
    calls = message.get("tool_calls") or []
    reasoning = message.get("reasoning_content") or ""
    if not calls:
        say(draft, thought_text(reasoning) + text if reasoning else text)
        return None
    if not isinstance(calls, list) or len(calls) != 1 or not isinstance(calls[0], dict):
        raise UnfitError(f"{where}: {len(calls)} tool_calls; the agent makes one call per turn")
    function = calls[0].get("function")
    if not isinstance(function, dict):
        raise UnfitError(f"{where}: the tool call has no function")
    think, rest = split_thought(text)
    thought = " ".join(part for part in (reasoning, think, rest) if part)
    draft.call(thought, read_call(function.get("name"), function.get("arguments"), where))
    return calls[0].get("id")


def _content(content: Any, load: PictureLoader, loose: Any, where: str) -> tuple[str, list[Picture]]:
    """Text and pictures of a content, which is text, a list of parts, or null."""
    if content is None:
        return "", []
    if isinstance(content, str):
        return content, []
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise UnfitError(f"{where}: content must be text or a list of parts")
    texts, pictures = [], []
    for part in content:
        kind = part.get("type")
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "image_url":
            url = part.get("image_url")
            pictures.append(load(url.get("url") if isinstance(url, dict) else url))
        elif kind == "image":
            given = part.get("image")
            reference = given if given is not None else next(loose, None)
            if reference is None:
                raise UnfitError(f"{where}: has a place for a picture, but images has none left")
            pictures.append(load(reference))
        else:
            raise UnfitError(f"{where}: a part of type {kind!r}; known are text, image_url and image")
    return "".join(texts), pictures


def write(demonstration: Demonstration, registry: ToolRegistry) -> Record:
    """The record of a demonstration, pictures as data URLs."""
    prompt = demonstration.prompt
    parts: list[Record] = [_picture_part(picture) for picture in prompt.pictures]
    messages: list[Record] = [
        {"role": "user", "content": [*parts, {"type": "text", "text": prompt.question}]}
    ]
    for number, step in enumerate(demonstration.steps, start=1):
        turn, observation = step.turn, step.observation
        if turn.call is None or observation is None:
            text = response_text(turn.think, turn.response or "")
            messages.append({"role": "assistant", "content": text})
            continue
        identity = f"call_{number}"
        function = {"name": turn.call.name, "arguments": json.dumps(turn.call.params, ensure_ascii=False)}
        call = {"id": identity, "type": "function", "function": function}
        said = {"role": "assistant", "content": thought_text(turn.think), "tool_calls": [call]}
        seen: Any = observation.to_json()
        if observation.picture is not None:
            seen = [{"type": "text", "text": seen}, _picture_part(observation.picture)]
        messages += [said, {"role": "tool", "tool_call_id": identity, "content": seen}]
    return {"messages": messages, "tools": registry.json_schemas(prompt.tools)}


def _picture_part(picture: Picture) -> Record:
    return {"type": "image_url", "image_url": {"url": data_url(picture)}}
