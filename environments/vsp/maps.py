"""Square FrozenLake maps: drawing them at random, solving them, and putting each into exactly one split."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

Cell = tuple[int, int]  # (row, column), counted from the top left

MOVES: dict[str, Cell] = {"L": (0, -1), "R": (0, 1), "U": (-1, 0), "D": (1, 0)}
"""Moves as (row step, column step). The order is the tie-break of `shortest_path`: sideways before up and
down.
"""


class Split(StrEnum):
    """Which part of the data a map belongs to."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True)
class GridMap:
    """A square map in gymnasium's letters: S start, G goal, H hole, F frozen.

    Raises ValueError if the rows are not square, hold other letters, or lack exactly one S and one G.
    """

    rows: tuple[str, ...]

    def __post_init__(self) -> None:
        text = "".join(self.rows)
        if not self.rows or any(len(row) != len(self.rows) for row in self.rows):
            raise ValueError(
                f"a map must be square, got {len(self.rows)} rows of {sorted({len(r) for r in self.rows})}"
            )
        if set(text) - set("SGHF") or text.count("S") != 1 or text.count("G") != 1:
            raise ValueError(f"a map has one S, one G, and otherwise H and F, got {'/'.join(self.rows)}")

    @property
    def size(self) -> int:
        """Rows, and columns."""
        return len(self.rows)

    @cached_property
    def start(self) -> Cell:
        return self._cell(self._text.index("S"))

    @cached_property
    def goal(self) -> Cell:
        return self._cell(self._text.index("G"))

    @cached_property
    def holes(self) -> tuple[Cell, ...]:
        """Holes in row-major order."""
        return tuple(self._cell(i) for i, letter in enumerate(self._text) if letter == "H")

    @cached_property
    def hole_set(self) -> frozenset[Cell]:
        return frozenset(self.holes)

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the rows joined by line feeds: the map's identity, and what decides its split."""
        return hashlib.sha256("\n".join(self.rows).encode()).hexdigest()

    def step(self, cell: Cell, move: str) -> Cell:
        """The cell after one move; a move off the edge stays in place."""
        row, column = cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]
        return (row, column) if 0 <= row < self.size and 0 <= column < self.size else cell

    @cached_property
    def _text(self) -> str:
        return "".join(self.rows)

    def _cell(self, index: int) -> Cell:
        return divmod(index, self.size)


def random_map(rng: random.Random, size: int, hole_density: float) -> GridMap:
    """A solvable map: each cell is a hole with probability `hole_density`, then start and goal fall on any
    two distinct cells, and the whole is drawn again until a safe route joins them (reference/adareasoner.md
    §3.1).
    """
    while True:
        letters = ["H" if rng.random() < hole_density else "F" for _ in range(size * size)]
        start, goal = rng.sample(range(size * size), 2)
        letters[start], letters[goal] = "S", "G"
        text = "".join(letters)
        grid = GridMap(tuple(text[i : i + size] for i in range(0, size * size, size)))
        if grid.start in distances_to(grid, [grid.goal]):
            return grid


def distances_to(grid: GridMap, targets: list[Cell]) -> dict[Cell, int]:
    """Moves from each cell to the nearest of `targets` without entering a hole on the way (breadth first).

    Cells that cannot reach one are absent. A target may itself be a hole.
    """
    distance = dict.fromkeys(targets, 0)
    queue = deque(targets)
    while queue:
        cell = queue.popleft()
        for move in MOVES:
            near = grid.step(cell, move)
            if near not in distance and near not in grid.hole_set:
                distance[near] = distance[cell] + 1
                queue.append(near)
    return distance


def shortest_path(grid: GridMap) -> str:
    """The shortest safe path from start to goal; among equals the first in the order of `MOVES` at each step.

    One fixed choice among equals, so that a small policy has one answer to learn. Raises ValueError if no
    safe path exists.
    """
    distance = distances_to(grid, [grid.goal])
    if grid.start not in distance:
        raise ValueError(f"no safe path from start to goal in {'/'.join(grid.rows)}")
    cell, path = grid.start, ""
    while cell != grid.goal:
        for move in MOVES:
            near = grid.step(cell, move)
            if distance.get(near, -1) == distance[cell] - 1:
                cell, path = near, path + move
                break
    return path


def split_of(map_hash: str) -> Split:
    """The split of a map by its hash, at every size: 90 % train, 5 % validation, 5 % test."""
    bucket = int(map_hash[:8], 16) % 100
    if bucket < 90:
        return Split.TRAIN
    return Split.VALIDATION if bucket < 95 else Split.TEST
