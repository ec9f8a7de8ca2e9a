"""What a policy is told about the tools, and how its calls are graded."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tools.base import ToolCall
from tools.errors import ToolError, ToolErrorCode
from tools.grading import call_level
from tools.registry import ToolRegistry
from tools.vsp import VSP_TOOLS, vsp_registry

REGISTRY = vsp_registry()
OFFERED = ("POINT", "DRAW2DPATH", "CROP")


@pytest.mark.parametrize(
    ("level", "call"),
    [
        (0, None),
        (0, ToolCall("POINT", ["start"])),  # type: ignore[arg-type]
        (1, ToolCall("FLY", {"target": "start"})),
        (1, ToolCall("ASTAR", {"start": [1, 1], "goal": [2, 2]})),  # exists, not offered
        (2, ToolCall("POINT", {})),
        (2, ToolCall("POINT", {"targets": "start"})),
        (2, ToolCall("POINT", {"target": "moon", "extra": 1})),  # wrong names outweigh wrong values
        (2, ToolCall("DRAW2DPATH", {"points": [[1, 1]], "start": [1, 1], "directions": "R"})),
        (3, ToolCall("POINT", {"target": "moon"})),
        (3, ToolCall("DRAW2DPATH", {"points": [[1, 256]]})),
        (3, ToolCall("DRAW2DPATH", {"start": [1, 1], "directions": "right"})),
        (3, ToolCall("CROP", {"box": [0, 0, 257, 20]})),
        (4, ToolCall("POINT", {"target": "holes"})),
        (4, ToolCall("DRAW2DPATH", {"points": [[0, 0], [255, 255]]})),
        (4, ToolCall("DRAW2DPATH", {"start": [1, 1], "directions": "RRD"})),
        (4, ToolCall("CROP", {"box": [0, 0, 256, 256]})),
    ],
)
def test_each_level_of_the_tool_reward(level: int, call: ToolCall | None) -> None:
    assert call_level(call, REGISTRY, OFFERED, (256, 256)) == level


def test_signatures_hold_no_letter_that_is_a_move() -> None:
    text = REGISTRY.signatures(VSP_TOOLS)
    assert text.splitlines()[0] == "POINT(target: start|goal|holes)"
    assert len(text.splitlines()) == len(VSP_TOOLS)
    assert not re.search("[LRUD]", re.sub("|".join(VSP_TOOLS), "", text))


def test_schemas_have_the_function_shape_and_cannot_be_changed_from_outside() -> None:
    first: list[dict[str, Any]] = REGISTRY.json_schemas(["CROP"])
    assert first == [
        {
            "type": "function",
            "function": {
                "name": "CROP",
                "description": REGISTRY.get("CROP").description,
                "parameters": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["box"],
                    "properties": {
                        "box": {
                            "type": "array",
                            "items": {"type": "integer", "minimum": -10_000, "maximum": 10_000},
                            "minItems": 4,
                            "maxItems": 4,
                        }
                    },
                },
            },
        }
    ]
    first[0]["function"]["parameters"]["properties"].clear()
    assert REGISTRY.json_schemas(["CROP"])[0]["function"]["parameters"]["properties"]


def test_a_name_that_no_tool_has_is_an_error_and_two_tools_of_one_name_too() -> None:
    with pytest.raises(ToolError) as caught:
        REGISTRY.get("FLY")
    assert caught.value.code is ToolErrorCode.UNKNOWN_TOOL
    with pytest.raises(ValueError, match="POINT"):
        ToolRegistry([REGISTRY.get("POINT"), REGISTRY.get("POINT")])
