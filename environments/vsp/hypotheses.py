"""How an agent without ASTAR looks for a path: assume, check, step aside (seed 000, section 3.3).

It knows the start and the goal, and of the rest what DRAW2DPATH says where a path meets a hole: where that is, which
move it blocked, the safe part of the path, and which cells to the sides of its end are free. The two paths of one turn
come first. After that a path is the safe part before a hole, a cell beside its end, on in the direction that was
blocked, and a turn to the goal: depth first, from the latest hole that has an untried cell. A hole that was met before
opens no new cells. Every number of every path has stood in an observation: to draw it is a matter of copying, which a
small model can, not of arithmetic, which it cannot; and no step asks whether a line crosses a hole, only whether one
was met before.

Points are pairs of numbers on any grid of equal steps, pixels or cells; a path is given by where it begins, may turn,
and ends. A path around a hole has all points of its pattern, also where two of them are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from environments.vsp.maps import Cell, GridMap
from tools.draw2dpath import turning_points

Point = tuple[int, int]


@dataclass(frozen=True)
class Way:
    """A path to draw. `hole` and `aside`: what it goes round and by which cell, None where it begins anew."""

    points: tuple[Point, ...]
    hole: Point | None = None
    aside: Point | None = None


@dataclass
class Search:
    """One agent's search. `known`: holes seen before the first try; no path through them is drawn."""

    start: Point
    goal: Point
    known: set[Point] = field(default_factory=set)
    holes: set[Point] = field(default_factory=set)  # met so far
    _begun: int = 0  # paths of one turn that were taken or passed over
    _around: list[list[Way]] = field(
        default_factory=list
    )  # untried ways around each hole met, the latest hole last

    def next_way(self) -> Way | None:
        """The path to draw now; None if there is none left."""
        once = dict.fromkeys(
            _without_repetition(self.start, turn, self.goal) for turn in self._turns(self.start)
        )
        for points in list(once)[self._begun :]:
            self._begun += 1
            if not self._blocked(points):
                return Way(points)
        while self._around:
            if self._around[-1]:
                return self._around[-1].pop(0)
            self._around.pop()
        return None

    def met(self, hole: Point, safe: Sequence[Point], beside: Sequence[Point]) -> None:
        """Take in what DRAW2DPATH said about a path that is not safe."""
        if hole in self.holes:
            return
        self.holes.add(hole)
        sideways = hole[0] == safe[-1][0]
        turns = [self._turns(cell)[0 if sideways else 1] for cell in beside]
        self._around.append(
            [
                Way((*safe, cell, turn, self.goal), hole, cell)
                for cell, turn in zip(beside, turns, strict=True)
            ]
        )

    def _turns(self, here: Point) -> tuple[Point, Point]:
        """Where a path of one turn to the goal turns: sideways first, and upright first."""
        return (here[0], self.goal[1]), (self.goal[0], here[1])

    def _blocked(self, points: tuple[Point, ...]) -> bool:
        return any(_on(hole, *ends) for hole in self.known for ends in pairwise(points))


def failures(grid: GridMap, known: Collection[Cell] = ()) -> int | None:
    """How many paths meet a hole on this map before one is right; None if the search ends without one.

    `known`: holes that the agent has seen before its first try.
    """
    search, count = Search(grid.start, grid.goal, set(known)), 0
    while (way := search.next_way()) is not None:
        cells = list(cells_of(way.points))
        hit = next((index for index, cell in enumerate(cells) if cell in grid.hole_set), None)
        if hit is None:
            return count
        row, col = cells[hit - 1]  # the start is no hole
        sideways = cells[hit][0] == row
        sides = [(row - 1, col), (row + 1, col)] if sideways else [(row, col - 1), (row, col + 1)]
        safe = turning_points(cells[:hit])
        search.met(cells[hit], safe, [cell for cell in sides if _free(grid, cell)])
        count += 1
    return None


def cells_of(points: Sequence[Cell]) -> Iterator[Cell]:
    """Every cell on the way, both ends included, of points that are cells."""
    yield points[0]
    for (row, col), (to_row, to_col) in pairwise(points):
        while (row, col) != (to_row, to_col):
            row += (to_row > row) - (to_row < row)
            col += (to_col > col) - (to_col < col)
            yield row, col


def _without_repetition(*points: Point) -> tuple[Point, ...]:
    return points[:1] + tuple(b for a, b in pairwise(points) if a != b)


def _on(point: Point, a: Point, b: Point) -> bool:
    """Whether a point lies on the line from a to b, and that is level or upright."""
    level_or_upright = a[0] == b[0] or a[1] == b[1]
    return level_or_upright and all(min(a[i], b[i]) <= point[i] <= max(a[i], b[i]) for i in (0, 1))


def _free(grid: GridMap, cell: Cell) -> bool:
    return min(cell) >= 0 and max(cell) < grid.size and cell not in grid.hole_set
