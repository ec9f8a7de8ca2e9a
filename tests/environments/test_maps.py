"""Maps: always solvable, fairly drawn, and in exactly one split."""

import random
from collections import Counter

import pytest

from environments.vsp.maps import GridMap, Split, random_map, shortest_path, split_of
from environments.vsp.world import solves


@pytest.mark.parametrize("size", range(3, 10))
def test_every_random_map_is_solvable_and_its_shortest_path_solves_it(size):
    rng = random.Random(size)
    for _ in range(100):
        grid = random_map(rng, size, 0.2)
        assert grid.size == size
        assert grid.start != grid.goal
        path = shortest_path(grid)
        assert solves(grid, path)
        assert not solves(grid, path[:-1])


def test_start_and_goal_are_not_stuck_to_some_corner():
    rng = random.Random(0)
    cells = Counter(
        cell for _ in range(2000) for g in [random_map(rng, 4, 0.2)] for cell in (g.start, g.goal)
    )
    assert len(cells) == 16
    assert max(cells.values()) < 2 * min(cells.values())


def test_hole_density_is_the_asked_one():
    rng = random.Random(1)
    maps = [random_map(rng, 8, 0.2) for _ in range(300)]
    share = sum(len(grid.holes) for grid in maps) / (300 * 62)
    assert (
        0.17 < share < 0.22
    )  # a little under 0.2: start and goal replace holes, unsolvable maps are dropped


def test_shortest_path_has_one_fixed_choice_among_equals():
    assert shortest_path(GridMap(("SFF", "FFF", "FFG"))) == "RRDD"
    assert shortest_path(GridMap(("GFF", "FFF", "FFS"))) == "LLUU"


def test_a_map_without_a_route_is_an_error_and_not_an_empty_path():
    with pytest.raises(ValueError, match="no safe path"):
        shortest_path(GridMap(("SHF", "HHF", "FFG")))


@pytest.mark.parametrize(
    "rows",
    [
        (),
        ("SG", "F"),
        ("SGF", "FFF", "FFX"),
        ("SSG", "FFF", "FFF"),
        ("FFF", "FFF", "FFF"),
        ("SFF", "FFF", "FFF"),
    ],
)
def test_broken_maps_are_refused(rows):
    with pytest.raises(ValueError, match="a map"):
        GridMap(rows)


def test_splits_have_the_promised_shares_at_every_size():
    rng = random.Random(2)
    for size in (3, 6, 9):
        counts = Counter(split_of(random_map(rng, size, 0.2).sha256) for _ in range(4000))
        assert 0.87 < counts[Split.TRAIN] / 4000 < 0.93
        assert 0.03 < counts[Split.VALIDATION] / 4000 < 0.07
        assert 0.03 < counts[Split.TEST] / 4000 < 0.07
