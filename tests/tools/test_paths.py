"""DRAW2DPATH and ASTAR must agree with the world: their verdicts are the evidence that answers rest on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.worlds import cell_size, cells, centre, distance, random_map, render, walk
from tools.base import Observation, ToolCall
from tools.draw2dpath import turning_points
from tools.errors import ToolErrorCode
from tools.executor import ToolExecutor
from tools.vsp import VSP_TOOLS, vsp_registry

EXECUTOR = ToolExecutor(vsp_registry(), None, 5.0)
MAPS = [random_map(size, seed) for size in range(3, 10) for seed in range(3)]
OPEN = ("SFFF", "FFFF", "FHFF", "FFFG")


def way_out(rows: tuple[str, ...], safe: list[tuple[int, int]], hole: tuple[int, int]) -> dict[str, object]:
    """The move into the hole, the turns of the safe cells, and the free cells to the sides of the last of them."""
    row, col = safe[-1]
    sides = [(row - 1, col), (row + 1, col)] if hole[0] == row else [(row, col - 1), (row, col + 1)]
    free = [(r, c) for r, c in sides if min(r, c) >= 0 and max(r, c) < len(rows) and rows[r][c] != "H"]
    turns = turning_points(safe)
    move = {(0, -1): "L", (0, 1): "R", (-1, 0): "U", (1, 0): "D"}[hole[0] - row, hole[1] - col]
    centres = {
        "safe": [centre(rows, cell) for cell in turns],
        "beside": [centre(rows, cell) for cell in free],
    }
    return {"blocked": move, **centres}


def run(name: str, rows: tuple[str, ...], **params: object) -> Observation:
    return EXECUTOR.run(ToolCall(name, params), render(rows), VSP_TOOLS)


@settings(max_examples=300, deadline=None)
@given(rows=st.sampled_from(MAPS), directions=st.text("LRUD", min_size=1, max_size=40), data=st.data())
def test_directions_get_the_verdict_of_the_world(
    rows: tuple[str, ...], directions: str, data: st.DataObject
) -> None:
    n, side = len(rows), cell_size(rows)
    x, y = data.draw(st.tuples(st.integers(0, n * side - 1), st.integers(0, n * side - 1)))
    visited = walk(rows, (y // side, x // side), directions)
    fell = next((index for index, (row, col) in enumerate(visited) if rows[row][col] == "H"), None)
    if fell is None:
        expected: dict[str, object] = {"result": "path_safe", "end": centre(rows, visited[-1])}
    else:
        expected = {"result": "path_crosses_hole", "at": centre(rows, visited[fell])}
        expected |= way_out(rows, visited[:fell], visited[fell]) if fell else {}
    assert run("DRAW2DPATH", rows, start=[x, y], directions=directions).payload == expected


@settings(max_examples=200, deadline=None)
@given(rows=st.sampled_from(MAPS), directions=st.text("LRUD", min_size=1, max_size=40))
def test_points_from_cell_to_cell_get_the_verdict_of_the_directions(
    rows: tuple[str, ...], directions: str
) -> None:
    start = cells(rows, "S")[0]
    points = [centre(rows, cell) for cell in walk(rows, start, directions)]
    by_points = run("DRAW2DPATH", rows, points=points)
    by_directions = run("DRAW2DPATH", rows, start=points[0], directions=directions)
    moves = by_points.payload.pop("moves", None)
    assert by_points.payload == by_directions.payload
    if by_points.payload["result"] == "path_safe":  # the points' own moves: bumps leave no trace in them
        again = run("DRAW2DPATH", rows, start=points[0], directions=moves) if moves else by_points
        assert again.payload == by_points.payload
    assert by_points.picture == by_directions.picture


def test_points_several_cells_apart_do_not_jump_over_a_hole() -> None:
    points = [centre(OPEN, (2, 0)), centre(OPEN, (2, 3))]
    expected = {"result": "path_crosses_hole", "at": centre(OPEN, (2, 1)), **way_out(OPEN, [(2, 0)], (2, 1))}
    assert run("DRAW2DPATH", OPEN, points=points).payload == expected


def test_turning_points_are_where_a_path_begins_turns_and_ends() -> None:
    assert turning_points([(0, 0), (0, 1), (0, 3), (0, 3), (2, 3)]) == [(0, 0), (0, 3), (2, 3)]
    assert turning_points([(0, 0), (0, 3), (0, 1)]) == [(0, 0), (0, 3), (0, 1)], "turning back is a turn"
    assert turning_points([(0, 0), (1, 1), (3, 3)]) == [(0, 0), (3, 3)]
    assert turning_points([(5, 5)]) == [(5, 5)]


def test_the_safe_part_of_a_path_is_safe_and_free_cells_beside_it_can_be_gone_to() -> None:
    points = [centre(OPEN, cell) for cell in ((0, 0), (0, 1), (0, 1), (3, 1))]
    told = run("DRAW2DPATH", OPEN, points=points).payload
    assert told["at"] == centre(OPEN, (2, 1))
    assert told["safe"] == [centre(OPEN, cell) for cell in ((0, 0), (0, 1), (1, 1))]
    assert told["beside"] == [centre(OPEN, cell) for cell in ((1, 0), (1, 2))]
    for cell in told["beside"]:
        assert run("DRAW2DPATH", OPEN, points=[*told["safe"], cell]).payload["result"] == "path_safe"


def test_steps_smaller_than_a_cell_are_followed_as_in_the_seed() -> None:
    observation = run("DRAW2DPATH", OPEN, points=[[125, 80], [155, 80], [185, 80]])
    assert observation.payload == {"result": "path_safe", "end": centre(OPEN, (1, 2)), "moves": "R"}


def test_a_line_over_a_corner_into_a_hole_names_no_move() -> None:
    told = run("DRAW2DPATH", OPEN, points=[centre(OPEN, (1, 0)), centre(OPEN, (2, 1))]).payload
    assert told["at"] == centre(OPEN, (2, 1))
    assert "blocked" not in told


def test_a_line_over_a_corner_has_no_moves() -> None:
    points = [centre(OPEN, (0, 0)), centre(OPEN, (1, 1))]
    observation = run("DRAW2DPATH", OPEN, points=points)
    assert observation.payload == {"result": "path_safe", "end": centre(OPEN, (1, 1))}


@pytest.mark.parametrize("points", [[[70, 140]], [[70, 140], [10, 10]]])
def test_a_path_that_starts_in_a_hole_crosses_it(points: list[list[int]]) -> None:
    expected = {"result": "path_crosses_hole", "at": centre(OPEN, (2, 1))}
    assert run("DRAW2DPATH", OPEN, points=points).payload == expected


@pytest.mark.parametrize(
    ("params", "at"),
    [
        ({"points": [[32, 32], [256, 32], [300, 32]]}, [256, 32]),
        ({"points": [[-1, 32]]}, [-1, 32]),
        ({"start": [32, 9000], "directions": "R"}, [32, 9000]),
    ],
)
def test_a_point_off_the_picture_is_reported_as_given(params: dict[str, object], at: list[int]) -> None:
    observation = run("DRAW2DPATH", OPEN, **params)
    assert observation.payload == {"result": "path_out_of_bounds", "at": at}
    assert observation.picture is not None


def test_the_black_rim_of_a_nine_by_nine_picture_is_off_the_map() -> None:
    rows = random_map(9, 0, hole_share=0)
    assert run("DRAW2DPATH", rows, points=[[508, 20]]).payload["result"] == "path_out_of_bounds"
    assert run("ASTAR", rows, start=[20, 20], goal=[508, 20]).error is ToolErrorCode.OUT_OF_BOUNDS


def test_what_comes_first_on_the_way_is_reported() -> None:
    points = [centre(OPEN, (2, 0)), [1000, centre(OPEN, (2, 0))[1]]]  # through the hole, then off the picture
    assert run("DRAW2DPATH", OPEN, points=points).payload["result"] == "path_crosses_hole"


def test_the_drawn_picture_shows_the_path_and_keeps_its_size() -> None:
    observation = run("DRAW2DPATH", OPEN, start=centre(OPEN, (0, 0)), directions="RR")
    assert observation.picture is not None
    before, after = render(OPEN).rgb, observation.picture.rgb
    assert after.shape == before.shape
    changed = np.argwhere((before != after).any(axis=2))
    assert (after[32, 32:160] == (255, 0, 0)).all()
    assert changed[:, 0].max() < 64
    assert changed[:, 1].max() < 192


@settings(max_examples=200, deadline=None)
@given(rows=st.sampled_from(MAPS), own_obstacles=st.booleans(), data=st.data())
def test_astar_is_shortest_and_safe_or_there_is_no_route(
    rows: tuple[str, ...], own_obstacles: bool, data: st.DataObject
) -> None:
    cell = st.tuples(st.integers(0, len(rows) - 1), st.integers(0, len(rows) - 1))
    start, goal = data.draw(cell), data.draw(cell)
    blocked = data.draw(st.sets(cell, max_size=20)) if own_obstacles else set(cells(rows, "H"))
    obstacles = {"obstacles": [centre(rows, c) for c in sorted(blocked)]} if own_obstacles else {}
    observation = run("ASTAR", rows, start=centre(rows, start), goal=centre(rows, goal), **obstacles)
    shortest = distance(rows, start, goal, blocked)
    if shortest is None:
        assert observation.error is ToolErrorCode.NO_ROUTE
        return
    path = observation.payload["path"]
    visited = walk(rows, start, path)
    assert len(path) == shortest
    assert visited[-1] == goal
    assert not blocked & set(visited)


def test_crop_returns_exactly_the_pixels_of_the_box() -> None:
    observation = run("CROP", OPEN, box=[10, 20, 74, 256])
    assert observation.payload == {"size": [64, 236]}
    assert observation.picture is not None
    assert (observation.picture.rgb == render(OPEN).rgb[20:256, 10:74]).all()
