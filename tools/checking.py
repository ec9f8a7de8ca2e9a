"""Checks of a call before it runs. The executor and the tool reward share them, so they cannot disagree."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from tools.base import Tool, ToolCall, ToolParams
from tools.errors import ToolError, ToolErrorCode
from tools.registry import ToolRegistry

_NAME_ERRORS = {
    "missing": ToolErrorCode.MISSING_PARAMETER,
    "extra_forbidden": ToolErrorCode.UNKNOWN_PARAMETER,
}
_MESSAGE_LENGTH = 200


def check_structure(call: ToolCall) -> None:
    """Raises ToolError(MALFORMED_CALL) unless the name is text and the parameters are an object."""
    # The fields hold whatever JSON the agent wrote: their annotations are a promise nobody has checked yet.
    if not isinstance(call.name, str):
        raise ToolError(ToolErrorCode.MALFORMED_CALL, "name is not text")
    if not isinstance(call.params, dict) or not all(isinstance(key, str) for key in call.params):
        raise ToolError(ToolErrorCode.MALFORMED_CALL, "params is not a JSON object")


def check_tool(call: ToolCall, registry: ToolRegistry, offered: Sequence[str]) -> Tool:
    """The tool that the call names. Raises ToolError(UNKNOWN_TOOL) unless it is offered in this prompt."""
    if call.name not in offered:
        message = f"{plain(call.name, 40)} is not offered; use {' or '.join(offered)}"
        raise ToolError(ToolErrorCode.UNKNOWN_TOOL, message)
    return registry.get(call.name)


def check_params(tool: Tool, call: ToolCall) -> ToolParams:
    """The typed parameters.

    Raises ToolError: MISSING_PARAMETER and UNKNOWN_PARAMETER come before INVALID_VALUE, because the tool
    reward grades names (level 3) before values (level 4).
    """
    try:
        return tool.params_model.model_validate(call.params)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False, include_context=False)
    named = [(detail, _NAME_ERRORS[detail["type"]]) for detail in details if detail["type"] in _NAME_ERRORS]
    detail, code = named[0] if named else (details[0], ToolErrorCode.INVALID_VALUE)
    where = ".".join(str(part) for part in detail["loc"])
    message = detail["msg"][:1].lower() + detail["msg"][1:]
    raise ToolError(code, plain(f"{where}: {message}" if where else message))


def plain(text: str, length: int = _MESSAGE_LENGTH) -> str:
    """Text that is safe to show: printable ASCII, bounded, no tags.

    Names that the agent wrote are echoed into its context. They may hold lone surrogates, which no tokenizer
    takes, or `</obs>`, which would let it write its own observations.
    """
    kept = "".join(
        char if char.isascii() and char.isprintable() and char not in "<>" else "?" for char in text
    )
    return kept if len(kept) <= length else kept[: length - 3] + "..."
