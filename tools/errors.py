"""Error codes of tool calls: a failure is data that the agent can read and recover from, never a crash."""

from __future__ import annotations

from enum import StrEnum


class ToolErrorCode(StrEnum):
    """Everything that can go wrong with a call; `ERROR_TABLE` says what each one means."""

    MALFORMED_CALL = "malformed_call"
    UNKNOWN_TOOL = "unknown_tool"
    MISSING_PARAMETER = "missing_parameter"
    UNKNOWN_PARAMETER = "unknown_parameter"
    INVALID_VALUE = "invalid_value"
    OUT_OF_BOUNDS = "out_of_bounds"
    NOT_FOUND = "not_found"
    NO_ROUTE = "no_route"
    UNREADABLE_IMAGE = "unreadable_image"
    DEADLINE = "deadline"
    TOOL_CRASHED = "tool_crashed"


ERROR_TABLE: dict[ToolErrorCode, str] = {
    ToolErrorCode.MALFORMED_CALL: "the text between the tool_call tags is not one JSON object with name and params",
    ToolErrorCode.UNKNOWN_TOOL: "no tool of that name is offered in this prompt",
    ToolErrorCode.MISSING_PARAMETER: "a required parameter is absent",
    ToolErrorCode.UNKNOWN_PARAMETER: "the tool has no parameter of that name",
    ToolErrorCode.INVALID_VALUE: "a parameter has the wrong type or is outside its set",
    ToolErrorCode.OUT_OF_BOUNDS: "a coordinate lies outside the picture",
    ToolErrorCode.NOT_FOUND: "the target is not in the picture",
    ToolErrorCode.NO_ROUTE: "no safe route joins the two points",
    ToolErrorCode.UNREADABLE_IMAGE: "the picture cannot be decoded or shows no grid",
    ToolErrorCode.DEADLINE: "the call did not end before its deadline",
    ToolErrorCode.TOOL_CRASHED: "the tool raised an unexpected exception",
}


class ToolError(Exception):
    """Raised inside a tool; the executor turns it into an observation `{"error": code, "message": …}`."""

    def __init__(self, code: ToolErrorCode, message: str = "") -> None:
        super().__init__(message or ERROR_TABLE[code])
        self.code = code
        self.message = message or ERROR_TABLE[code]
