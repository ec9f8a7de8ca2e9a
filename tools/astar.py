"""ASTAR: a shortest safe route between two points."""

from __future__ import annotations

import heapq
from collections.abc import Set
from typing import Annotated

from pydantic import Field

from tools.base import Picture, Purity, Tool, ToolOutput
from tools.errors import ToolError, ToolErrorCode
from tools.params import PixelParam, PixelParams
from tools.vision import Cell, Grid, GridReader

MOVES: dict[str, Cell] = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}  # (row, column) steps


class AStarParams(PixelParams):
    start: PixelParam
    goal: PixelParam
    # Absent means the holes that are seen; a written null is a wrong value.
    obstacles: Annotated[list[PixelParam], Field(max_length=400)] = None  # type: ignore[assignment]

    def pixels(self) -> list[tuple[int, int]]:
        return [(x, y) for x, y in (self.start, self.goal, *(self.obstacles or ()))]


def astar_tool(reader: GridReader) -> Tool:
    """ASTAR(start, goal, obstacles?) -> {"path": "RRDD"}; every pixel stands for the cell it is in."""

    def run(picture: Picture, params: AStarParams) -> ToolOutput:
        grid = reader.read(picture)
        start, goal = _cell(grid, params.start), _cell(grid, params.goal)
        blocked = (
            grid.holes if params.obstacles is None else {_cell(grid, pixel) for pixel in params.obstacles}
        )
        path = shortest_path(grid.size, start, goal, blocked)
        if path is None:
            raise ToolError(ToolErrorCode.NO_ROUTE)
        return ToolOutput({"path": path})

    return Tool(
        name="ASTAR",
        version="1",
        description=(
            "Finds a shortest safe path between two pixels, as moves. "
            "Obstacles are pixels too; without them, the holes in the picture are avoided."
        ),
        params_model=AStarParams,
        purity=Purity.PURE,
        error_codes=(ToolErrorCode.OUT_OF_BOUNDS, ToolErrorCode.NO_ROUTE, ToolErrorCode.UNREADABLE_IMAGE),
        run=run,
    )


def shortest_path(size: int, start: Cell, goal: Cell, blocked: Set[Cell]) -> str | None:
    """A* with Manhattan distance on a `size`×`size` grid with four neighbours; None if there is no route.

    Nor is there one from or to a blocked cell. Of equal routes it finds the same one every time.
    """
    if start in blocked or goal in blocked:
        return None
    # Entries: (length so far + distance left, distance left, order of arrival, cell, path). The order of
    # arrival is unique, so cells and paths are never compared.
    arrivals = 0
    frontier = [(_distance(start, goal), _distance(start, goal), arrivals, start, "")]
    seen: set[Cell] = set()
    while frontier:
        *_, cell, path = heapq.heappop(frontier)
        if cell == goal:
            return path
        if cell in seen:
            continue
        seen.add(cell)
        for letter, (down, right) in MOVES.items():
            there = (cell[0] + down, cell[1] + right)
            if 0 <= there[0] < size and 0 <= there[1] < size and there not in blocked and there not in seen:
                arrivals += 1
                left = _distance(there, goal)
                heapq.heappush(frontier, (len(path) + 1 + left, left, arrivals, there, path + letter))
    return None


def _distance(a: Cell, b: Cell) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _cell(grid: Grid, pixel: list[int]) -> Cell:
    x, y = pixel
    cell = grid.cell_at(x, y)
    if cell is None:
        edge = grid.size * grid.cell
        raise ToolError(
            ToolErrorCode.OUT_OF_BOUNDS, f"[{x}, {y}] is outside the map of {edge} by {edge} pixels"
        )
    return cell
