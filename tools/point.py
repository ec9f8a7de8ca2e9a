"""POINT: where the start, the goal or the holes are, in pixels."""

from __future__ import annotations

from typing import Literal

from tools.base import Picture, Purity, Tool, ToolOutput, ToolParams
from tools.errors import ToolError, ToolErrorCode
from tools.vision import GridReader


class PointParams(ToolParams):
    target: Literal["start", "goal", "holes"]


def point_tool(reader: GridReader) -> Tool:
    """POINT(target) -> {"coordinates": [x, y]}, for holes a list of them in reading order (empty if none)."""

    def run(picture: Picture, params: PointParams) -> ToolOutput:
        grid = reader.read(picture)
        if params.target == "holes":
            return ToolOutput({"coordinates": [grid.centre(cell) for cell in sorted(grid.holes)]})
        cell = grid.start if params.target == "start" else grid.goal
        if cell is None:
            raise ToolError(ToolErrorCode.NOT_FOUND, f"there is no {params.target} in the picture")
        return ToolOutput({"coordinates": grid.centre(cell)})

    return Tool(
        name="POINT",
        version="1",
        description="Finds the start, the goal or all holes; gives the pixels in the middle of their cells.",
        params_model=PointParams,
        purity=Purity.PURE,
        error_codes=(ToolErrorCode.NOT_FOUND, ToolErrorCode.UNREADABLE_IMAGE),
        run=run,
    )
