"""Reading a FrozenLake picture: from pixels to the grid of cells and what stands on them.

Knows both looks by their colours, at any cell size: gymnasium 1.0 to 1.3 (elf, gift, round holes), in which
the public VSP benchmark is drawn too, and gymnasium 1.4 (robot, flag, square holes).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import cv2
import numpy as np

from tools.base import Picture
from tools.errors import ToolError, ToolErrorCode

Cell = tuple[int, int]  # row, column, from 0

# gymnasium draws a one-pixel frame of this colour around every cell (frozen_lake.py, _render_gui).
_LINE_RGB = (180, 200, 230)
_LINE_TOLERANCE = 16  # the ice differs by 18 and more in red
_LINE_SHARE = 0.5  # of its pixels; in a 3×3 picture a player who broke through the ice hides a third
_SMALLEST_CELL = 16

# Shares of a cell's pixels, with the range of each kind on 64 px and 56 px cells of both looks. The pictures
# must be lossless: JPEG moves these colours.
_HOLE_SHARE = 0.3  # strongly blue: holes 0.52-0.60, all else up to 0.022
_ELF_SHARE = 0.015  # green: elf 0.029-0.041, all else 0
_ROBOT_SHARE = 0.03  # light grey: robot 0.054, all else 0
_GOAL_SHARE = 0.04  # red or brown: gift 0.18, flag 0.051, an empty stool 0.025
_GOAL_UNDER_ELF_SHARE = 0.09  # red or brown: elf on gift 0.11-0.13, elf alone 0.04-0.059
_GOAL_UNDER_ROBOT_SHARE = 0.156  # dark: robot on flag 0.162-0.166, robot on its start up to 0.149


@dataclass(frozen=True)
class Grid:
    """What a picture shows: `size`×`size` square cells of `cell` pixels, the first in the top left corner.

    `start` is where the player stands. `start` and `goal` are None when not in the picture; they may be one
    cell.
    """

    size: int
    cell: int
    start: Cell | None
    goal: Cell | None
    holes: frozenset[Cell]

    @property
    def rows(self) -> list[str]:
        """The map in gymnasium's letters: S, G, H, F. Where start and goal share a cell, S."""
        return ["".join(self._letter((row, col)) for col in range(self.size)) for row in range(self.size)]

    def centre(self, cell: Cell) -> list[int]:
        """The pixel [x, y] in the middle of a cell."""
        row, col = cell
        return [col * self.cell + self.cell // 2, row * self.cell + self.cell // 2]

    def cell_at(self, x: int, y: int) -> Cell | None:
        """The cell that holds a pixel, or None off the grid (9×9 pictures have a black rim of 8 px)."""
        edge = self.size * self.cell
        return (y // self.cell, x // self.cell) if 0 <= x < edge and 0 <= y < edge else None

    def _letter(self, cell: Cell) -> str:
        if cell == self.start:
            return "S"
        if cell == self.goal:
            return "G"
        return "H" if cell in self.holes else "F"


def read_grid(rgb: np.ndarray) -> Grid:
    """The grid in uint8 pixels of shape (height, width, 3). Raises ToolError(UNREADABLE_IMAGE)."""
    size, cell = _find_lines(rgb)
    red, green, blue = cv2.split(rgb[: size * cell, : size * cell])

    def share(*masks: np.ndarray) -> np.ndarray:
        """Share of each cell's pixels that all masks (0 or 255 per pixel) contain, shape (size, size)."""
        both = masks[0] if len(masks) == 1 else cv2.min(masks[0], masks[1])
        return cv2.resize(both.astype(np.float32), (size, size), interpolation=cv2.INTER_AREA) / 255.0

    red_over_blue, blue_over_red = cv2.subtract(red, blue), cv2.subtract(blue, red)
    grey = cv2.inRange(cv2.max(red_over_blue, blue_over_red), 0.0, 12.0)  # type: ignore[call-overload]
    hole = share(_above(blue_over_red, 85)) > _HOLE_SHARE
    elf = share(_above(cv2.subtract(green, red), 40), _above(cv2.subtract(green, blue), 20))
    robot = share(grey, cv2.inRange(red, 191.0, 224.0))  # type: ignore[call-overload]
    warm = share(_above(red_over_blue, 90))
    dark = share(_above(255 - cv2.max(red, blue), 155))

    start = _strongest(np.where(hole, 0.0, np.maximum(elf / _ELF_SHARE, robot / _ROBOT_SHARE)), 1.0)
    outside_start = np.where(hole, 0.0, warm)
    if start is not None:
        outside_start[start] = 0.0
    goal = _strongest(outside_start, _GOAL_SHARE)
    if goal is None and start is not None:
        elf_on_gift = elf[start] > _ELF_SHARE and warm[start] > _GOAL_UNDER_ELF_SHARE
        robot_on_flag = robot[start] > _ROBOT_SHARE and dark[start] > _GOAL_UNDER_ROBOT_SHARE
        goal = start if elf_on_gift or robot_on_flag else None
    return Grid(size, cell, start, goal, frozenset((int(row), int(col)) for row, col in np.argwhere(hole)))


class GridReader:
    """Reads each picture once and remembers the last `capacity` of them by hash (a grid is about 1 kB). Thread safe."""

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._grids: OrderedDict[str, Grid] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, picture: Picture) -> Grid:
        """Raises ToolError(UNREADABLE_IMAGE) if the picture cannot be decoded or shows no grid."""
        with self._lock:
            grid = self._grids.get(picture.sha256)
        if grid is None:
            grid = read_grid(picture.decode())
            with self._lock:
                self._grids[picture.sha256] = grid
                if len(self._grids) > self._capacity:
                    self._grids.popitem(last=False)
        return grid


def _find_lines(rgb: np.ndarray) -> tuple[int, int]:
    """Number of cells per side and the side of a cell in pixels, from the lines between the cells."""
    low, high = (tuple(float(value + sign * _LINE_TOLERANCE) for value in _LINE_RGB) for sign in (-1, 1))
    mask = cv2.inRange(rgb, low, high)  # type: ignore[call-overload]
    columns, rows = (
        cv2.reduce(mask, axis, cv2.REDUCE_AVG, dtype=cv2.CV_32F).ravel() > 255 * _LINE_SHARE
        for axis in (0, 1)
    )
    cell = _line_distance(columns)
    if cell is None or cell != _line_distance(rows) or len(columns) // cell != len(rows) // cell:
        raise ToolError(ToolErrorCode.UNREADABLE_IMAGE, "the picture shows no square grid")
    return len(columns) // cell, cell


def _line_distance(is_line: np.ndarray) -> int | None:
    """The smallest distance d such that a line runs on both sides of every multiple of d, or None.

    Cells are framed on each side, so an inner line is two pixels wide (five in gymnasium 1.4, whose tiles
    have an edge of nearly the same colour). `is_line` is a bool per pixel column or row.
    """
    if is_line.mean() > 0.5:  # one flat colour, every distance would fit
        return None
    pairs = np.flatnonzero(is_line[:-1] & is_line[1:]) + 1
    for distance in pairs[pairs >= _SMALLEST_CELL].tolist():
        edges = np.arange(distance, len(is_line) + 1, distance)
        inner_edges = edges[edges < len(is_line)]
        if is_line[0] and is_line[edges - 1].all() and is_line[inner_edges[: len(edges) - 1]].all():
            return distance
    return None


def _above(channel: np.ndarray, level: int) -> np.ndarray:
    """255 where the channel is above the level, else 0."""
    return cv2.threshold(channel, level, 255, cv2.THRESH_BINARY)[1]


def _strongest(evidence: np.ndarray, threshold: float) -> Cell | None:
    """The cell with the most evidence, of equals the first in reading order; None if not above threshold."""
    row, col = divmod(int(evidence.argmax()), evidence.shape[1])
    return (row, col) if evidence[row, col] > threshold else None
