"""The ShareGPT tool format, as LLaMA-Factory reads it: human, function_call, observation, gpt in turn.

{"conversations": [{"from": "human", "value": "<image>…"},
                   {"from": "function_call", "value": "<think>…</think>{\\"name\\": …, \\"arguments\\": {…}}"},
                   {"from": "observation", "value": "{…}"},
                   {"from": "gpt", "value": "<think>…</think><response>…</response>"}],
 "tools": "[{…}]", "images": ["images/1.png"]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from environments.vsp.expert import Demonstration
from models.agent_format import OBS_CLOSE, OBS_OPEN
from tasks.conversations.conversation import (
    Conversation,
    Draft,
    Record,
    UnfitError,
    read_call_text,
    read_tools,
    response_text,
    say,
    split_thought,
    thought_text,
)
from tasks.conversations.pictures import PictureLoader
from tools.base import Picture
from tools.registry import ToolRegistry

IMAGE = "<image>"


def read(record: Record, load: PictureLoader) -> Conversation:
    """The conversation of a record. Raises UnfitError."""
    entries = record["conversations"]
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise UnfitError("conversations: must be a list of objects")
    names = record.get("images") or []
    if not isinstance(names, list):
        raise UnfitError("images: must be a list of file names or data URLs")
    draft, images = Draft(read_tools(record.get("tools"))), iter(names)
    for position, entry in enumerate(entries, start=1):
        speaker, value = entry.get("from"), entry.get("value")
        where = f"entry {position}"
        if not isinstance(value, str):
            raise UnfitError(f"{where}: value must be text")
        if speaker == "system":
            if position > 1:
                raise UnfitError(f"{where}: system may only come first")
        elif speaker == "human":
            draft.ask(*_pictures(value, images, load, where))
        elif speaker == "function_call":
            think, call = split_thought(value)
            draft.call(think, read_call_text(call, where))
        elif speaker == "observation":
            text, pictures = _pictures(value, images, load, where)
            draft.observe(text.removeprefix(OBS_OPEN).removesuffix(OBS_CLOSE), pictures)
        elif speaker == "gpt":
            say(draft, value)
        else:
            raise UnfitError(f"{where}: from {speaker!r}; known are human, function_call, observation, gpt")
    if next(images, None) is not None:
        raise UnfitError(f"images: {len(names)} pictures, but fewer {IMAGE} marks")
    return draft.done()


def _pictures(
    value: str, images: Iterator[Any], load: PictureLoader, where: str
) -> tuple[str, list[Picture]]:
    """The text without its `<image>` marks, and the pictures they stand for."""
    pictures = []
    for _ in range(value.count(IMAGE)):
        reference = next(images, None)
        if reference is None:
            raise UnfitError(f"{where}: more {IMAGE} marks than images")
        pictures.append(load(reference))
    return value.replace(IMAGE, "").strip(), pictures


def write(demonstration: Demonstration, registry: ToolRegistry, store: Callable[[Picture], str]) -> Record:
    """The record of a demonstration; `store` keeps a picture and says its name."""
    prompt = demonstration.prompt
    images = [store(picture) for picture in prompt.pictures]
    entries = [{"from": "human", "value": IMAGE * len(images) + prompt.question}]
    for step in demonstration.steps:
        turn, observation = step.turn, step.observation
        if turn.call is None or observation is None:
            entries.append({"from": "gpt", "value": response_text(turn.think, turn.response or "")})
            continue
        call = json.dumps({"name": turn.call.name, "arguments": turn.call.params}, ensure_ascii=False)
        seen = observation.to_json()
        if observation.picture is not None:
            images.append(store(observation.picture))
            seen += IMAGE
        entries.append({"from": "function_call", "value": thought_text(turn.think) + call})
        entries.append({"from": "observation", "value": seen})
    tools = [schema["function"] for schema in registry.json_schemas(prompt.tools)]
    return {
        "conversations": entries,
        "tools": json.dumps(tools, ensure_ascii=False),
        "images": images,
    }


def dataset_info(name: str, file: str) -> Record:
    """LLaMA-Factory's description of a file of such records."""
    columns = {"messages": "conversations", "tools": "tools", "images": "images"}
    return {name: {"file_name": file, "formatting": "sharegpt", "columns": columns}}
