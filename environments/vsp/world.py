"""The rules of the world: what a sequence of moves does on a map."""

from __future__ import annotations

from dataclasses import dataclass

from environments.vsp.maps import Cell, GridMap


@dataclass(frozen=True)
class Walk:
    """Where moves lead: the cells from the start on, up to and including the first hole entered."""

    cells: tuple[Cell, ...]
    fell: bool
    reached_goal: bool


def walk(grid: GridMap, moves: str) -> Walk:
    """Follow moves (letters L R U D) from the start.

    A move off the edge stays in place. `fell`: some move enters a hole (verification asks for this).
    `reached_goal`: the goal is entered before any hole (navigation asks for this), so that moves after the
    goal do not matter to it. Raises KeyError for another letter.
    """
    cells, reached_goal = [grid.start], False
    for move in moves:
        cells.append(grid.step(cells[-1], move))
        if cells[-1] in grid.hole_set:
            return Walk(tuple(cells), True, reached_goal)
        reached_goal = reached_goal or cells[-1] == grid.goal
    return Walk(tuple(cells), False, reached_goal)


def is_safe(grid: GridMap, moves: str) -> bool:
    """Verification: the moves never enter a hole."""
    return not walk(grid, moves).fell


def solves(grid: GridMap, moves: str) -> bool:
    """Navigation: the moves reach the goal and enter no hole before it."""
    return walk(grid, moves).reached_goal
