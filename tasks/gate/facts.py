"""What is true of one row of the data: booleans, counts and lengths that expectations are then stated on.

Nothing here raises on bad data, since finding it is the point: any value may be null, of another language's
JSON, or false. Every fact is a plain bool, int, float or text. A fact about something that a row rightly
lacks (the parameters of a turn that calls nothing) is true.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from environments.vsp.grade import grade_navigation, grade_verification
from environments.vsp.maps import MOVES, GridMap, split_of
from environments.vsp.prompts import NAVIGATION_QUESTION, VERIFICATION_QUESTION, Task
from environments.vsp.world import is_safe
from tools.base import Picture, ToolCall
from tools.checking import check_params
from tools.errors import ToolError
from tools.registry import ToolRegistry
from tools.vision import read_grid

CELL_PIXELS, PICTURE_PIXELS = 64, 512  # gymnasium's cell, and its cap on the picture's side
ANSWERS = ("Yes", "No")
HOLES_CALL = '{"target": "holes"}'

Row = Mapping[str, Any]
Facts = dict[str, Any]


@dataclass(frozen=True)
class PictureFacts:
    """A picture: height and width in pixels (0 if it cannot be decoded), and the map that it shows."""

    height: int = 0
    width: int = 0
    map_rows: tuple[str, ...] | None = None

    @property
    def decodes(self) -> bool:
        return self.height > 0

    @property
    def text(self) -> str:
        return f"{self.width}x{self.height} pixels" if self.decodes else "not an image"


class PictureReader:
    """Decodes each distinct picture once; rows share them."""

    def __init__(self) -> None:
        self._seen: dict[bytes, PictureFacts] = {}

    def __call__(self, png: bytes | None) -> PictureFacts:
        if not png:
            return PictureFacts()
        key = hashlib.sha256(png).digest()
        if key not in self._seen:
            self._seen[key] = _read_picture(png)
        return self._seen[key]


def _read_picture(png: bytes) -> PictureFacts:
    try:
        rgb = Picture(png).decode()
    except ToolError:
        return PictureFacts()
    try:
        shown = tuple(read_grid(rgb).rows)
    except ToolError:
        shown = None
    return PictureFacts(rgb.shape[0], rgb.shape[1], shown)


def true_map(row: Row) -> GridMap | None:
    """The map of a row, or None if its rows are no map."""
    rows = row["map_rows"]
    if not rows or not all(isinstance(text, str) for text in rows):
        return None
    try:
        return GridMap(tuple(rows))
    except ValueError:
        return None


def question_facts(
    row: Row,
    picture: PictureFacts,
    registry: ToolRegistry,
    expected_split: str,
    other_cells_px: Sequence[int] = (),
) -> Facts:
    """Facts about the question of a trajectory or an item; `expected_split` is what its file belongs to, and
    `other_cells_px` the sides that cells may have besides gymnasium's own.
    """
    grid, size, tools = true_map(row), row["size"], row["tools"]
    own_side = None if size is None else min(CELL_PIXELS * size, PICTURE_PIXELS)
    sides = () if size is None else (own_side, *(cell * size for cell in other_cells_px))
    return {
        **{name: row[name] for name in ("task", "size", "map_hash", "question", "path", "answer")},
        "tools": None if tools is None else ",".join(map(str, tools)),
        "map_rows": None if row["map_rows"] is None else "/".join(map(str, row["map_rows"])),
        "map_is_valid": grid is not None and grid.size == size,
        "map_hash_is_right": grid is not None and grid.sha256 == row["map_hash"],
        "map_is_in_its_split": grid is not None and split_of(grid.sha256) == expected_split,
        "tools_are_known": bool(tools) and all(tool in registry.names for tool in tools),
        "question_is_asked_right": _asks(row),
        "answer_is_true": grid is not None and _answer_is_true(row, grid),
        "image": None if row["image"] is None else picture.text,
        "image_decodes": picture.decodes,
        "image_has_the_right_side": picture.height == picture.width and picture.width in sides,
        "image_has_other_cells": picture.decodes and picture.width != own_side,
        "image_shows_the_map": grid is not None and picture.map_rows == grid.rows,
    }


def _asks(row: Row) -> bool:
    if row["task"] == Task.VERIFICATION:
        return bool(row["path"]) and row["question"] == VERIFICATION_QUESTION.format(path=row["path"])
    return row["path"] == "" and row["question"] == NAVIGATION_QUESTION


def _answer_is_true(row: Row, grid: GridMap) -> bool:
    path, answer = row["path"], row["answer"]
    if row["task"] == Task.VERIFICATION:
        if not path or set(path) - set(MOVES):
            return False
        return answer == ("Yes" if is_safe(grid, path) else "No")
    return isinstance(answer, str) and set(answer) <= set(MOVES) and grade_navigation(grid, answer)


def trajectory_facts(row: Row, tokens: int) -> Facts:
    """Facts about a whole trajectory of `tokens` tokens."""
    turns = row["turns"] or []
    responses = [turn["response"] for turn in turns if turn is not None and turn["response"] is not None]
    ends = len(responses) == 1 and turns[-1] is not None and turns[-1]["response"] is not None
    response = responses[0] if ends else ""
    return {
        **{name: row[name] for name in ("trajectory_id", "split", "kind", "reward")},
        "n_turns": len(turns),
        "tokens": tokens,
        "response": response,
        "points_at_holes": any(
            turn is not None and turn["call_params"] == HOLES_CALL and turn["call_name"] == "POINT"
            for turn in turns
        ),
        "ends_with_its_response": ends,
        "reward_is_earned": row["reward"] == float(_is_right(row, response)),
    }


def _is_right(row: Row, response: str) -> bool:
    if row["task"] == Task.VERIFICATION:
        return row["answer"] in ANSWERS and grade_verification(row["answer"], response)
    grid = true_map(row)
    return grid is not None and grade_navigation(grid, response)


class TurnReader:
    """Facts about single turns. Checks each distinct call once: a data set repeats few calls many times."""

    def __init__(self, registry: ToolRegistry, read_picture: PictureReader) -> None:
        self._registry = registry
        self._read_picture = read_picture
        self._calls: dict[tuple[str, str], tuple[bool, bool]] = {}

    def __call__(self, turn: Row | None, offered: list[str] | None) -> Facts:
        """Facts about a turn; `offered` are the tools of its prompt."""
        if turn is None:
            turn = dict.fromkeys(("think", "call_name", "call_params", "observation", "response", "mistake"))
            turn["observation_image"] = None
        name, params, observation = turn["call_name"], turn["call_params"], turn["observation"]
        calls, mistake = name is not None, bool(turn["mistake"])
        parses, fits = (params is None, True) if name is None else self._check(name, params)
        seen = _json_object(observation) if calls else None
        picture = turn["observation_image"]
        return {
            **{key: turn[key] for key in ("think", "call_name", "call_params", "observation", "response")},
            "mistake": turn["mistake"],
            "calls_or_responds": calls != (turn["response"] is not None),
            "tool_is_known": not calls or mistake or name in self._registry.names,
            "tool_is_offered": not calls or mistake or name in (offered or ()),
            "params_parse": parses,
            "params_fit_the_tool": not calls or mistake or fits,
            "observation_parses": (seen is not None) if calls else observation is None,
            "observation_is_no_error": mistake or seen is None or "error" not in seen,
            "observation_image_decodes": picture is None or self._read_picture(picture).decodes,
        }

    def _check(self, name: str, params: str | None) -> tuple[bool, bool]:
        key = (name, params or "")
        if key not in self._calls:
            parsed = _json_object(params)
            self._calls[key] = (parsed is not None, parsed is not None and self._fits(name, parsed))
        return self._calls[key]

    def _fits(self, name: str, params: dict[str, Any]) -> bool:
        try:
            check_params(self._registry.get(name), ToolCall(name, params))
        except ToolError:
            return False
        return True


def _json_object(text: str | None) -> dict[str, Any] | None:
    try:
        value = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
