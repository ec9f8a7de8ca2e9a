"""From a conversation to a row of the cold start: every check that needs the environment and the tools.

Nothing in the line is taken on trust. The map is read from the picture, the answer is graded on it, and every call
is run again: a policy must not learn from observations that it will never see.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from environments.base import Prompt, ScriptedTurn
from environments.vsp.config import ColdStartConfig
from environments.vsp.expert import RECOVERY, Demonstration, Kind, Step
from environments.vsp.maps import GridMap, Split, split_of
from environments.vsp.prompts import (
    BASE_TOOLS,
    NAVIGATION_QUESTION,
    VERIFICATION_QUESTION,
    VSP,
    Task,
    navigation_prompt,
    verification_prompt,
)
from tasks.conversations.conversation import Conversation, Turn, UnfitError
from tasks.gate.facts import PictureReader, question_facts
from tasks.schema import trajectory_row
from tools.base import Observation, Picture
from tools.cache import ToolResultCache
from tools.errors import ToolError
from tools.executor import ToolExecutor
from tools.registry import ToolRegistry
from tools.vision import read_grid

CALL_DEADLINE_S = 60.0  # far above any call's time: a slow machine must not turn a result into an error
CACHED_RESULTS = 4096
ID_PREFIX = "ingested-"

_VERIFICATION = re.compile(re.escape(VERIFICATION_QUESTION).replace(re.escape("{path}"), "([LRUD]+)"))
_SHOWN = 120  # characters of a value in a message


class Fitter:
    """Turns conversations into rows of tasks.schema.TRAJECTORIES."""

    def __init__(self, registry: ToolRegistry, data: ColdStartConfig) -> None:
        self._registry = registry
        self._data = data
        self._executor = ToolExecutor(registry, ToolResultCache(CACHED_RESULTS), CALL_DEADLINE_S)
        self._environment = VSP()
        self._read_picture = PictureReader()

    def row(self, conversation: Conversation) -> dict[str, Any]:
        """The row. Its id is a hash of the content, so equal trajectories have equal ids. Raises UnfitError."""
        if len(conversation.pictures) != 1:
            raise UnfitError(f"the question has {len(conversation.pictures)} pictures; VSP asks about one")
        picture = conversation.pictures[0]
        grid = self._map(picture)
        prompt = self._prompt(conversation, grid, picture)
        steps = [self._step(turn, prompt, n) for n, turn in enumerate(conversation.turns, start=1)]
        response = steps[-1].turn.response or ""
        if not self._environment.grade(prompt, response):
            raise UnfitError(f"the answer {response[:_SHOWN]!r} is wrong on the map in the picture")
        shown = Demonstration(prompt, _kind(prompt, steps), tuple(steps), 1.0)
        row = trajectory_row(shown, Split.TRAIN, self._data.stored_pictures)
        row["trajectory_id"] = ID_PREFIX + content_hash(row)
        sides = self._data.shown_cells_px
        facts = question_facts(row, self._read_picture(row["image"]), self._registry, Split.TRAIN, sides)
        if not facts["image_has_the_right_side"]:
            others = f", or {', '.join(map(str, sides))} a cell" if sides else ""
            raise UnfitError(
                f"the picture is {facts['image']}; it must have 64 a cell, 512 a side at most{others}"
            )
        return row

    def _map(self, picture: Picture) -> GridMap:
        try:
            grid = GridMap(tuple(read_grid(picture.decode()).rows))
        except (ToolError, ValueError) as error:
            raise UnfitError(f"no map can be read in the picture: {error}") from None
        split = split_of(grid.sha256)
        if split is not Split.TRAIN:
            raise UnfitError(f"its map belongs to the {split} split, which training must not see")
        if grid.size not in self._data.sizes:
            sizes = ", ".join(map(str, self._data.sizes))
            raise UnfitError(f"its map has {grid.size} cells a side; data.sizes has {sizes}")
        return grid

    def _prompt(self, conversation: Conversation, grid: GridMap, picture: Picture) -> Prompt:
        known = self._registry.names
        called = [turn.call.name for turn in conversation.turns if turn.call is not None]
        tools = conversation.tools
        if tools is None:  # the line does not say: the usual ones, and those that it calls
            tools = (*BASE_TOOLS, *(name for name in known if name in called and name not in BASE_TOOLS))
        for name in tools:
            if name not in known:
                raise UnfitError(f"offers {name[:40]!r}, which is no tool here; there are {', '.join(known)}")
        if conversation.question == NAVIGATION_QUESTION:
            return navigation_prompt(grid, picture, tools, "")
        match = _VERIFICATION.fullmatch(conversation.question)
        if match is None:
            questions = f"{NAVIGATION_QUESTION!r} or {VERIFICATION_QUESTION!r}"
            raise UnfitError(f"asks {conversation.question[:_SHOWN]!r}; VSP's questions are {questions}")
        return verification_prompt(grid, match[1], picture, tools, "")

    def _step(self, turn: Turn, prompt: Prompt, number: int) -> Step:
        where = f"turn {number}"
        for what, text in (("thought", turn.think), ("answer", turn.response or "")):
            if "<" in text:
                raise UnfitError(f"{where}: the {what} holds '<', which could forge a tag of the format")
        if turn.call is None:
            return Step(ScriptedTurn(turn.think, response=turn.response), None)
        real = self._executor.run(turn.call, prompt.pictures[0], prompt.tools)
        self._compare(turn, real, f"{where}: {turn.call.name[:40]}")
        outcome = real.payload.get("error") or real.payload.get("result")
        return Step(ScriptedTurn(turn.think, call=turn.call, mistake=outcome in RECOVERY), real)

    def _compare(self, turn: Turn, real: Observation, where: str) -> None:
        """Refuse a call or an observation that the tools would not have given. A failed call is fine if the
        line shows the failure: the agent learns to recover."""
        seen = turn.observation or {}
        if real.error is not None and "error" not in seen:
            raise UnfitError(f"{where} fails ({real.payload['message']}), but the line shows a result")
        same = seen.get("error") == str(real.error) if real.error is not None else seen == real.payload
        if not same:
            told, given = json.dumps(seen)[:_SHOWN], real.to_json()[:_SHOWN]
            raise UnfitError(f"{where} returns {given}, but the line shows {told}")
        if turn.picture is not None and not _same_pixels(turn.picture, real.picture):
            raise UnfitError(f"{where} does not return the picture that the line shows")


def content_hash(row: Mapping[str, Any]) -> str:
    """16 hex digits that equal trajectories share, whatever file, format or picture encoding they came in."""
    keys = ("think", "call_name", "call_params", "observation", "response")
    turns = [[turn[key] for key in keys] for turn in row["turns"]]
    content = [row["map_hash"], row["question"], list(row["tools"]), turns]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _kind(prompt: Prompt, steps: Sequence[Step]) -> Kind:
    """What a trajectory shows, by the experts' own rule; more than two wrong paths count as two."""
    if any(step.turn.mistake for step in steps):
        return Kind.TOOL_FAILURE
    results = [step.observation.payload.get("result") for step in steps if step.observation]
    wrong = results.count("path_crosses_hole") if prompt.task == Task.NAVIGATION else 0
    return (Kind.CLEAN, Kind.REFLECTION_1, Kind.REFLECTION_2)[min(wrong, 2)]


def _same_pixels(one: Picture, other: Picture | None) -> bool:
    return other is not None and np.array_equal(one.decode(), other.decode())
