"""DRAW2DPATH: draws a path and says whether it is safe."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Annotated, Any

import cv2
import numpy as np
from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from tools.astar import MOVES
from tools.base import Picture, Purity, Tool, ToolOutput, encode_png
from tools.errors import ToolErrorCode
from tools.params import PixelParam, PixelParams
from tools.vision import Cell, Grid, GridReader

_RED = (255, 0, 0)
_LINE_WIDTH = 3
_MARK_RADIUS = 6
_LETTERS = {step: letter for letter, step in MOVES.items()}

Pixel = tuple[int, int]


class Draw2DPathParams(PixelParams):
    # Either points, or start and directions. Absent is None; a written null is a wrong value.
    points: Annotated[list[PixelParam], Field(min_length=1, max_length=200)] = None  # type: ignore[assignment]
    start: PixelParam = None  # type: ignore[assignment]
    directions: Annotated[str, Field(pattern="^[LRUD]{1,200}$")] = None  # type: ignore[assignment]

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, params: dict[str, Any]) -> dict[str, Any]:
        if "points" in params and ("start" in params or "directions" in params):
            raise PydanticCustomError("extra_forbidden", "give points, or start and directions, not both")
        if "points" not in params and not ("start" in params and "directions" in params):
            raise PydanticCustomError("missing", "give points, or start and directions")
        return params

    @field_validator("points")
    @classmethod
    def _without_repeats(cls, points: list[PixelParam]) -> list[PixelParam]:
        """A point given twice in a row draws the same path as given once, so it shares its place in the cache."""
        return [point for point, _ in groupby(points)]

    def pixels(self) -> list[Pixel]:
        return [(x, y) for x, y in (self.points or [self.start])]


def draw2dpath_tool(reader: GridReader) -> Tool:
    """DRAW2DPATH(points) or DRAW2DPATH(start, directions), and the picture with the path on it.

    The payload is one of
    {"result": "path_safe", "end": centre of the last cell, "moves": the moves along the points},
    {"result": "path_crosses_hole", "at": centre of the first hole on the way, the start's own cell included,
     "blocked": the move that it blocked, absent where the path went over a cell's corner,
     "safe": the points where the path turned before that, and the centre of its last safe cell,
     "beside": centres of the cells to the sides of that cell, as seen along the way, which are on the map and no
     holes}; the last three are absent where the path begins in the hole,
    {"result": "path_out_of_bounds", "at": the first given point that is off the map},
    whichever comes first on the way. Points are joined by straight lines; `moves` is there for points whose lines
    lead from cell to neighbouring cell. Directions step from cell to cell by the world's rule: a step off the edge
    stays in place.
    """

    def run(picture: Picture, params: Draw2DPathParams) -> ToolOutput:
        grid = reader.read(picture)
        corners = params.pixels() if params.points else _step(grid, params.pixels()[0], params.directions)
        payload, drawn = _verdict(grid, corners)
        moves = _moves(grid, drawn) if params.points and payload["result"] == "path_safe" else None
        if moves is not None:
            payload["moves"] = moves
        safe = payload["result"] == "path_safe"
        return ToolOutput(payload, Picture(partial(_draw, picture.png, drawn, safe)))

    return Tool(
        name="DRAW2DPATH",
        version="4",
        description=(
            "Draws a path through pixel points, or from a start pixel along moves, "
            "and says whether it crosses a hole."
        ),
        params_model=Draw2DPathParams,
        purity=Purity.PURE,
        error_codes=(ToolErrorCode.UNREADABLE_IMAGE,),
        run=run,
    )


def _step(grid: Grid, start: Pixel, directions: str) -> list[Pixel]:
    """The centres of the cells that the moves lead through; only the start if that is off the map."""
    cell = grid.cell_at(*start)
    if cell is None:
        return [start]
    row, col = cell
    cells = [cell]
    for letter in directions:
        down, right = MOVES[letter]
        row = min(max(row + down, 0), grid.size - 1)
        col = min(max(col + right, 0), grid.size - 1)
        cells.append((row, col))
    return [(x, y) for x, y in map(grid.centre, cells)]


def _verdict(grid: Grid, corners: list[Pixel]) -> tuple[dict[str, Any], list[Pixel]]:
    """The payload, and the corners of the part of the path that was walked."""
    walked: list[Pixel] = []
    last: Cell | None = None
    for corner in corners:
        for x, y in _between(walked[-1] if walked else corner, corner):
            cell = grid.cell_at(x, y)
            if cell is None:
                return {"result": "path_out_of_bounds", "at": list(corner)}, [*walked, (x, y)]
            if cell in grid.holes:
                payload = {"result": "path_crosses_hole", "at": grid.centre(cell)}
                return payload | _way_out(grid, walked, last, cell), [*walked, (x, y)]
            last = cell
        walked.append(corner)
    assert last is not None  # there is a point, and every pixel of the way was on the map
    return {"result": "path_safe", "end": grid.centre(last)}, walked


def _way_out(grid: Grid, walked: list[Pixel], last: Cell | None, hole: Cell) -> dict[str, Any]:
    """The move into the hole, the safe part before it, and the cells to its sides where the path could go on."""
    if last is None:
        return {}
    (row, col), down, right = last, hole[0] - last[0], hole[1] - last[1]
    x, y = grid.centre(last)
    reached = walked if grid.cell_at(*walked[-1]) == last else [*walked, (x, y)]
    sides = [(row - right, col - down), (row + right, col + down)]
    free = [cell for cell in sides if cell not in grid.holes and max(cell) < grid.size and min(cell) >= 0]
    safe = [list(point) for point in turning_points(reached)]
    letter = _LETTERS.get((down, right))
    blocked = {} if letter is None else {"blocked": letter}
    return {**blocked, "safe": safe, "beside": [grid.centre(cell) for cell in sorted(free)]}


def turning_points(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without the points that are repeated or lie straight on the way; the first and the last stay."""
    kept: list[tuple[int, int]] = []
    for point in points:
        if kept and point == kept[-1]:
            continue
        while len(kept) > 1 and _straight_on(kept[-2], kept[-1], point):
            kept.pop()
        kept.append(point)
    return kept


def _straight_on(a: Pixel, b: Pixel, c: Pixel) -> bool:
    (x1, y1), (x2, y2) = (b[0] - a[0], b[1] - a[1]), (c[0] - b[0], c[1] - b[1])
    return x1 * y2 == x2 * y1 and x1 * x2 + y1 * y2 > 0


def _moves(grid: Grid, corners: list[Pixel]) -> str | None:
    """The moves of a safe polyline; None where it steps over a cell's corner."""
    ways = (pixel for a, b in pairwise(corners) for pixel in _between(a, b))
    cells = [cell for cell, _ in groupby(grid.cell_at(*pixel) for pixel in ways)]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(cells) if a is not None and b is not None]
    return "".join(_LETTERS[step] for step in steps) if all(step in _LETTERS for step in steps) else None


def _between(a: Pixel, b: Pixel) -> list[Pixel]:
    """The pixels of a one-pixel line from a to b, both included: one per step along the longer axis."""
    (x0, y0), (x1, y1) = a, b
    steps = max(abs(x1 - x0), abs(y1 - y0))
    if steps == 0:
        return [b]
    along = np.arange(steps + 1)
    xs = x0 + (2 * along * (x1 - x0) + steps) // (2 * steps)
    ys = y0 + (2 * along * (y1 - y0) + steps) // (2 * steps)
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


def _draw(png: bytes, corners: list[Pixel], safe: bool) -> bytes:
    canvas = Picture(png).decode()
    cv2.polylines(canvas, [np.array(corners, dtype=np.int32)], False, _RED, _LINE_WIDTH)
    cv2.circle(canvas, corners[0], _MARK_RADIUS, _RED, cv2.FILLED)
    if safe:
        cv2.circle(canvas, corners[-1], _MARK_RADIUS, _RED, _LINE_WIDTH)
    else:
        cv2.drawMarker(canvas, corners[-1], _RED, cv2.MARKER_TILTED_CROSS, 4 * _MARK_RADIUS, _LINE_WIDTH)
    return encode_png(canvas)
