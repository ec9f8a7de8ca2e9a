"""Maps, their pictures, and FrozenLake's rules written down a second time to test the tools against."""

from __future__ import annotations

import os
import random
from collections import deque
from functools import lru_cache
from pathlib import Path

import numpy as np

from tools.base import Picture

Cell = tuple[int, int]

PICTURES = Path(__file__).parent / "pictures"
PUBLISHED = Path(__file__).parents[3] / "shared" / "vsp_sample" / "maze"
_STEPS = {"L": (0, -1), "R": (0, 1), "U": (-1, 0), "D": (1, 0)}


def random_map(size: int, seed: int, hole_share: float = 0.25) -> tuple[str, ...]:
    """Rows in gymnasium's letters, start and goal anywhere, not necessarily solvable."""
    rng = random.Random(f"{size}/{seed}")
    cells = ["H" if rng.random() < hole_share else "F" for _ in range(size * size)]
    start, goal = rng.sample(range(size * size), 2)
    cells[start], cells[goal] = "S", "G"
    return tuple("".join(cells[row * size : (row + 1) * size]) for row in range(size))


@lru_cache(maxsize=256)
def render(rows: tuple[str, ...]) -> Picture:
    """The installed gymnasium's picture of a map after reset."""
    os.environ["SDL_VIDEODRIVER"] = os.environ["SDL_AUDIODRIVER"] = "dummy"
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

    env = FrozenLakeEnv(desc=list(rows), render_mode="rgb_array", is_slippery=False)
    env.reset(seed=0)
    pixels = env.render()
    assert isinstance(pixels, np.ndarray)
    return Picture.from_rgb(pixels)


def cells(rows: tuple[str, ...], letter: str) -> list[Cell]:
    return [(r, c) for r, row in enumerate(rows) for c, found in enumerate(row) if found == letter]


def cell_size(rows: tuple[str, ...]) -> int:
    return min(64, 512 // len(rows))


def centre(rows: tuple[str, ...], cell: Cell) -> list[int]:
    side = cell_size(rows)
    return [cell[1] * side + side // 2, cell[0] * side + side // 2]


def walk(rows: tuple[str, ...], start: Cell, directions: str) -> list[Cell]:
    """The cells a player stands on, edges are walls, holes do not stop the walk."""
    visited = [start]
    for letter in directions:
        down, right = _STEPS[letter]
        there = (visited[-1][0] + down, visited[-1][1] + right)
        visited.append(there if 0 <= there[0] < len(rows) and 0 <= there[1] < len(rows) else visited[-1])
    return visited


def distance(rows: tuple[str, ...], start: Cell, goal: Cell, blocked: set[Cell]) -> int | None:
    """Moves of a shortest route by breadth-first search, None if there is none."""
    if start in blocked or goal in blocked:
        return None
    known, queue = {start: 0}, deque([start])
    while queue:
        cell = queue.popleft()
        for letter in _STEPS:
            there = walk(rows, cell, letter)[1]
            if there not in known and there not in blocked:
                known[there] = known[cell] + 1
                queue.append(there)
    return known.get(goal)
