"""The rules of the world are gymnasium's own, move by move."""

import random

import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.vsp.maps import GridMap, random_map
from environments.vsp.paths import hole_distance, verification_path
from environments.vsp.world import is_safe, solves, walk

ACTIONS = {"L": 0, "D": 1, "R": 2, "U": 3}


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(3, 9), moves=st.text("LRUD", min_size=1, max_size=30))
def test_walk_agrees_with_gymnasium_step_by_step(seed, size, moves):
    grid = random_map(random.Random(seed), size, 0.2)
    env = FrozenLakeEnv(desc=list(grid.rows), is_slippery=False)
    env.reset(seed=0)
    cells, end = [grid.start], ""
    for move in moves:
        state, _, terminated, _, _ = env.step(ACTIONS[move])
        cells.append(divmod(int(state), size))
        if terminated:
            end = grid.rows[cells[-1][0]][cells[-1][1]]
            break
    ours = walk(grid, moves)
    assert list(ours.cells[: len(cells)]) == cells
    assert ours.reached_goal == (end == "G")
    if end != "G":  # gymnasium ends at the goal, a path to verify may go on
        assert ours.fell == (end == "H")


def test_a_move_off_the_edge_stays_in_place():
    grid = GridMap(("SFF", "FHF", "FFG"))
    assert walk(grid, "LU").cells == ((0, 0), (0, 0), (0, 0))
    assert not walk(grid, "LU").fell


def test_navigation_ignores_moves_after_the_goal_and_verification_does_not():
    grid = GridMap(("SGH", "FFF", "FFF"))
    assert solves(grid, "RR")
    assert not is_safe(grid, "RR")


def test_a_hole_before_the_goal_is_never_a_solution():
    assert not solves(GridMap(("SHG", "FFF", "FFF")), "RR")


@pytest.mark.parametrize("size", [3, 4, 6, 8, 9])
def test_verification_paths_are_as_safe_and_as_long_as_asked(size):
    rng = random.Random(size)
    for _ in range(40):
        grid = random_map(rng, size, 0.2)
        nearest = hole_distance(grid)
        for length in range(1, 10):
            path = verification_path(rng, grid, length, safe=True)
            assert len(path) == length
            assert is_safe(grid, path)
            if nearest is not None and nearest <= length:
                path = verification_path(rng, grid, length, safe=False)
                assert len(path) == length
                assert not is_safe(grid, path)


def test_the_nearest_hole_bounds_unsafe_paths():
    grid = GridMap(("SFF", "FFF", "FHG"))
    assert hole_distance(grid) == 3
    with pytest.raises(ValueError, match="no unsafe path"):
        verification_path(random.Random(0), grid, 2, safe=False)
