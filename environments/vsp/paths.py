"""Paths to ask about: random walks that are safe or unsafe."""

from __future__ import annotations

import random

from environments.vsp.maps import MOVES, GridMap, distances_to
from environments.vsp.world import is_safe

BUMP_WEIGHT = 0.3  # of a move off the edge, against 1 for a move inside: published paths never bump
TRIES = 60


def hole_distance(grid: GridMap) -> int | None:
    """Moves from the start to the nearest hole, which is the length of the shortest unsafe path; None without
    holes.
    """
    return distances_to(grid, list(grid.holes)).get(grid.start)


def verification_path(rng: random.Random, grid: GridMap, length: int, safe: bool) -> str:
    """A random walk of `length` moves that is safe or not, as wanted.

    Both kinds come from one process by rejection, so that the style of a path says nothing about its answer;
    where rejection takes too long the walk is steered. Raises ValueError for an unsafe path shorter than
    `hole_distance`.
    """
    for _ in range(TRIES):
        path = _random_walk(rng, grid, length, avoid_holes=False)
        if is_safe(grid, path) == safe:
            return path
    if safe:
        return _random_walk(rng, grid, length, avoid_holes=True)
    return _walk_to_hole(rng, grid, length)


def _random_walk(rng: random.Random, grid: GridMap, length: int, avoid_holes: bool) -> str:
    cell, path = grid.start, ""
    for _ in range(length):
        weights = {}
        for move in MOVES:
            near = grid.step(cell, move)
            if not (avoid_holes and near in grid.hole_set):
                weights[move] = BUMP_WEIGHT if near == cell else 1.0
        move = rng.choices(list(weights), list(weights.values()))[0]
        cell, path = grid.step(cell, move), path + move
    return path


def _walk_to_hole(rng: random.Random, grid: GridMap, length: int) -> str:
    distance = distances_to(grid, list(grid.holes))
    if distance.get(grid.start, length + 1) > length:
        raise ValueError(f"no unsafe path of {length} moves in {'/'.join(grid.rows)}")
    cell, path = grid.start, ""
    while distance[cell] > 0:
        move = rng.choice([m for m in MOVES if distance.get(grid.step(cell, m), -1) == distance[cell] - 1])
        cell, path = grid.step(cell, move), path + move
    return path + "".join(rng.choice(list(MOVES)) for _ in range(length - len(path)))
