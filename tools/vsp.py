"""The tools of visual spatial planning (seed 000, section 1.1; ASTAR joins during training)."""

from __future__ import annotations

from tools.astar import astar_tool
from tools.crop import crop_tool
from tools.draw2dpath import draw2dpath_tool
from tools.point import point_tool
from tools.registry import ToolRegistry
from tools.vision import GridReader

VSP_TOOLS: tuple[str, ...] = ("POINT", "DRAW2DPATH", "CROP", "ASTAR")


def vsp_registry() -> ToolRegistry:
    """POINT, DRAW2DPATH, CROP and ASTAR; they share one reading of each picture."""
    reader = GridReader()
    return ToolRegistry([point_tool(reader), draw2dpath_tool(reader), crop_tool(), astar_tool(reader)])
