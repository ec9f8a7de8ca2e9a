"""How well-formed a call is: the four levels of the tool reward (seed 000, section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence

from tools.base import ToolCall
from tools.checking import check_params, check_structure, check_tool
from tools.errors import ToolError, ToolErrorCode
from tools.params import PixelParams
from tools.registry import ToolRegistry

_LEVEL_BEFORE = {
    ToolErrorCode.MALFORMED_CALL: 0,
    ToolErrorCode.UNKNOWN_TOOL: 1,
    ToolErrorCode.MISSING_PARAMETER: 2,
    ToolErrorCode.UNKNOWN_PARAMETER: 2,
    ToolErrorCode.INVALID_VALUE: 3,
}


def call_level(
    call: ToolCall | None, registry: ToolRegistry, offered: Sequence[str], picture_size: tuple[int, int]
) -> int:
    """The highest level that the call passes, each one needing those below it.

    0 unparseable (`call` is None) · 1 structure · 2 an offered tool · 3 the right parameter names ·
    4 parameter values of the right type, with every coordinate inside the picture.
    `picture_size` is (width, height) in pixels. Looks at the call only, never at what the tool returned.
    """
    if call is None:
        return 0
    try:
        check_structure(call)
        params = check_params(check_tool(call, registry, offered), call)
    except ToolError as error:
        return _LEVEL_BEFORE[error.code]
    return 3 if isinstance(params, PixelParams) and not params.inside(*picture_size) else 4
