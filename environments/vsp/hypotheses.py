"""How an agent without ASTAR looks for a path: assume, check, correct (seed 000, section 3.3).

It knows the start, the goal, the size of the grid and the holes that it has met so far, and takes every other cell
for ice. Simple paths come before crooked ones, short ones before long ones, and equals in an order of the asker's
own. So each demonstration has one shape at a time to be learned, and many together teach to try around, not to recite
a list.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from itertools import pairwise

from environments.vsp.maps import MOVES, Cell, GridMap, distances_to

Corners = tuple[Cell, ...]  # cells where a path begins, turns and ends


def next_hypothesis(
    grid_size: int, start: Cell, goal: Cell, known_holes: Collection[Cell], order: str
) -> Corners | None:
    """The first path in the order that no known hole blocks; None if the known holes part start and goal.

    Order: one turn, two turns, then the shortest way round; of each, those that begin sideways first. Paths of two
    turns come by length; the text `order`, such as the prompt's id, decides between those of one length.
    """
    for corners in _simple_paths(grid_size, start, goal, order):
        if not any(cell in known_holes for cell in cells_of(corners)):
            return corners
    return _way_round(grid_size, start, goal, known_holes)


def failures(grid: GridMap, order: str) -> int:
    """How many hypotheses meet a hole on this map before one is right."""
    known: set[Cell] = set()
    while True:
        corners = next_hypothesis(grid.size, grid.start, grid.goal, known, order)
        assert corners is not None  # maps are solvable
        hit = next((cell for cell in cells_of(corners) if cell in grid.hole_set), None)
        if hit is None:
            return len(known)
        known.add(hit)


def cells_of(corners: Corners) -> Iterator[Cell]:
    """Every cell on the way, both ends included."""
    yield corners[0]
    for (row, col), (to_row, to_col) in pairwise(corners):
        while (row, col) != (to_row, to_col):
            row += (to_row > row) - (to_row < row)
            col += (to_col > col) - (to_col < col)
            yield row, col


def _simple_paths(size: int, start: Cell, goal: Cell, order: str) -> Iterator[Corners]:
    if start[0] == goal[0] or start[1] == goal[1]:
        yield start, goal
    else:
        yield start, (start[0], goal[1]), goal
        yield start, (goal[0], start[1]), goal
    sideways: list[Corners] = [(start, (start[0], col), (goal[0], col), goal) for col in range(size)]
    upright: list[Corners] = [(start, (row, start[1]), (row, goal[1]), goal) for row in range(size)]
    for paths in (sideways, upright):
        two_turns = [path for path in paths if len(set(path)) == 4]
        random.Random(order).shuffle(two_turns)
        yield from sorted(two_turns, key=lambda path: sum(1 for _ in cells_of(path)))


def _way_round(size: int, start: Cell, goal: Cell, known_holes: Collection[Cell]) -> Corners | None:
    letters = {**dict.fromkeys(known_holes, "H"), start: "S", goal: "G"}
    span = range(size)
    grid = GridMap(tuple("".join(letters.get((row, col), "F") for col in span) for row in span))
    distance = distances_to(grid, [goal])
    if start not in distance:
        return None
    cells = [start]
    while cells[-1] != goal:
        here = cells[-1]
        near = (grid.step(here, move) for move in MOVES)
        cells.append(next(cell for cell in near if distance.get(cell) == distance[here] - 1))
    inner = zip(cells, cells[1:], cells[2:], strict=False)
    turns = [b for a, b, c in inner if (b[0] - a[0], b[1] - a[1]) != (c[0] - b[0], c[1] - b[1])]
    return (start, *turns, goal)
