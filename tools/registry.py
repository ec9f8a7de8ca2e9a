"""The set of tools that exist in a run, and how they are described to a policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

from tools.base import Tool
from tools.errors import ToolError, ToolErrorCode


class ToolRegistry:
    """Tools by name. Raises ValueError when two tools share a name."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise ValueError(f"two tools are called {tool.name}: give each its own name")
            self._tools[tool.name] = tool
        # Once per registry: building a schema takes 0.1 ms, prompts ask for them by the ten thousand.
        self._schemas = {
            name: _clean(tool.params_model.model_json_schema()) for name, tool in self._tools.items()
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def get(self, name: str) -> Tool:
        """The tool of that name. Raises ToolError(UNKNOWN_TOOL)."""
        tool = self._tools.get(name)
        if tool is None:
            raise ToolError(ToolErrorCode.UNKNOWN_TOOL, f"no such tool; there are: {', '.join(self._tools)}")
        return tool

    def json_schemas(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """One OpenAI function description per name. Raises ToolError(UNKNOWN_TOOL)."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": self.get(name).description,
                    "parameters": deepcopy(self._schemas[name]),
                },
            }
            for name in names
        ]

    def signatures(self, names: Sequence[str]) -> str:
        """One line per name, `POINT(target: start|goal|holes)`. Raises ToolError(UNKNOWN_TOOL).

        Capital letters stand in tool names only: the moves L, R, U and D are tokens of the tiny policy.
        """
        return "\n".join(_signature(self.get(name).name, self._schemas[name]) for name in names)


def _clean(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without what tells a model nothing: titles, the class docstring, null defaults."""
    properties = {
        name: {
            key: value for key, value in prop.items() if key != "title" and (key, value) != ("default", None)
        }
        for name, prop in schema.get("properties", {}).items()
    }
    dropped = ("title", "description")
    return {key: value for key, value in schema.items() if key not in dropped} | {"properties": properties}


def _signature(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    params = [
        f"{param}{'' if param in required else '?'}: {_type_text(prop)}"
        for param, prop in schema["properties"].items()
    ]
    return f"{name}({', '.join(params)})"


def _type_text(prop: dict[str, Any]) -> str:
    if "enum" in prop:
        return "|".join(str(value) for value in prop["enum"])
    if prop.get("type") != "array":
        return {"string": "text", "integer": "int", "number": "float"}.get(prop.get("type", ""), "any")
    length = prop.get("maxItems")
    if length == prop.get("minItems") == 2:
        return "[x, y]"
    if length == prop.get("minItems") == 4:
        return "[x1, y1, x2, y2]"
    return f"[{_type_text(prop['items'])}, ...]"
