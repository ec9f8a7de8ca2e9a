"""Experts: every call really made, every kind of mistake really seen to fail, every answer right."""

import random
import re

import pytest

from environments.vsp.expert import (
    MOST_WRONG_PATHS,
    NO_WRONG_PATH,
    WRONG_PATHS,
    ExpertError,
    Kind,
    demonstrate,
    make_expert,
)
from environments.vsp.hypotheses import Search, Way, cells_of, failures
from environments.vsp.maps import GridMap, random_map
from environments.vsp.prompts import BASE_TOOLS, VSP, navigation_prompt, verification_prompt
from environments.vsp.world import solves
from tools.base import Observation
from tools.cache import ToolResultCache
from tools.draw2dpath import turning_points
from tools.executor import ToolExecutor
from tools.vsp import vsp_registry

ASTAR_TOOLS = (*BASE_TOOLS, "ASTAR")


@pytest.fixture(scope="module")
def environment():
    return VSP()


@pytest.fixture(scope="module")
def executor():
    return ToolExecutor(vsp_registry(), ToolResultCache(64), 60.0)


def _show(environment, executor, seed, kind, task="navigation", tools=BASE_TOOLS, holes=False):
    rng = random.Random(seed)
    size = rng.choice((4, 6, 8, 9))
    grid = random_map(rng, size, 0.2)
    wanted = WRONG_PATHS.get(kind, NO_WRONG_PATH)
    while failures(grid, grid.holes if holes else ()) not in wanted:
        grid = random_map(rng, size, 0.2)
    picture = environment.renderer.render(grid)
    if task == "navigation":
        prompt = navigation_prompt(grid, picture, tools, f"n{seed}")
    else:
        prompt = verification_prompt(
            grid, "".join(rng.choices("LRUD", k=rng.randint(1, 9))), picture, tools, f"v{seed}"
        )
    return grid, demonstrate(prompt, kind, executor, environment, rng, holes)


def _names(shown):
    return [step.turn.call.name for step in shown.steps if step.turn.call]


@pytest.mark.parametrize("seed", range(8))
def test_clean_runs_have_no_mistake_and_the_fewest_calls(environment, executor, seed):
    _, shown = _show(environment, executor, seed, Kind.CLEAN, "verification")
    assert _names(shown) == ["POINT", "DRAW2DPATH"]
    _, shown = _show(environment, executor, seed, Kind.CLEAN, tools=ASTAR_TOOLS)
    assert _names(shown) == ["POINT", "POINT", "ASTAR"]
    grid, shown = _show(environment, executor, seed, Kind.CLEAN, holes=True)
    assert _names(shown) == ["POINT", "POINT", "POINT", "DRAW2DPATH"]
    assert solves(grid, shown.steps[-1].turn.response)
    assert not any(step.turn.mistake for step in shown.steps)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", [Kind.REFLECTION_1, Kind.REFLECTION_2])
def test_reflection_sees_its_wrong_paths_fail_and_then_names_what_failed(environment, executor, seed, kind):
    grid, shown = _show(environment, executor, seed, kind)
    draws = [
        i for i, step in enumerate(shown.steps) if step.turn.call and step.turn.call.name == "DRAW2DPATH"
    ]
    *wrong, right = draws
    assert len(wrong) in WRONG_PATHS[kind]
    for index in wrong:
        assert shown.steps[index].observation.payload["result"] == "path_crosses_hole"
        assert re.search("hole|no way beside it", shown.steps[index + 1].turn.think)
    points = [str(shown.steps[i].turn.call.params["points"]) for i in draws]
    assert len(set(points)) == len(draws)
    assert shown.steps[-1].turn.response == shown.steps[right].observation.payload["moves"]
    assert solves(grid, shown.steps[-1].turn.response)
    assert not any(step.turn.mistake for step in shown.steps)  # a hypothesis is no slip


@pytest.mark.parametrize("seed", range(20))
def test_every_pixel_of_a_drawn_path_has_stood_in_an_observation(environment, executor, seed):
    _, shown = _show(environment, executor, seed, Kind.REFLECTION_2)
    columns, rows = set(), set()
    for step in shown.steps[:-1]:
        for x, y in step.turn.call.params.get("points", ()):
            assert x in columns
            assert y in rows
        told = step.observation.payload
        pixels = [told[key] for key in ("coordinates", "at") if key in told]
        for x, y in [*pixels, *told.get("safe", ()), *told.get("beside", ())]:
            columns.add(x)
            rows.add(y)


@pytest.mark.parametrize("seed", range(60))
def test_the_search_uses_nothing_but_what_drawing_has_told(seed):
    """Demonstrations that lean on the hidden map would teach what no agent can know, and numbers that stand in no
    observation what a small model cannot compute.
    """
    rng = random.Random(seed)
    grid = random_map(rng, rng.choice((3, 5, 8, 9)), 0.25)
    search, tried = Search(grid.start, grid.goal), set()
    rows, columns = ({grid.start[i], grid.goal[i]} for i in (0, 1))
    while (way := search.next_way()) is not None:
        cells = list(cells_of(way.points))
        assert (cells[0], cells[-1]) == (grid.start, grid.goal)
        assert {row for row, _ in way.points} <= rows
        assert {column for _, column in way.points} <= columns
        assert way.points not in tried
        tried.add(way.points)
        met = next((index for index, cell in enumerate(cells) if cell in grid.hole_set), None)
        if met is None:
            break
        before, hole = cells[met - 1], cells[met]
        sides = [grid.step(before, move) for move in ("UD" if hole[0] == before[0] else "LR")]
        beside = [cell for cell in sides if cell != before and cell not in grid.hole_set]
        for cell in (before, *beside):
            rows.add(cell[0])
            columns.add(cell[1])
        search.met(hole, turning_points(cells[:met]), beside)
    assert failures(grid) == (None if way is None else len(tried) - 1)


def test_a_path_goes_round_beside_the_cell_where_the_last_one_was_safe():
    search = Search((3, 0), (3, 5))
    assert search.next_way() == Way(((3, 0), (3, 5)))
    search.met(hole=(3, 3), safe=[(3, 0), (3, 2)], beside=[(2, 2), (4, 2)])
    assert search.next_way() == Way(((3, 0), (3, 2), (2, 2), (2, 5), (3, 5)), (3, 3), (2, 2))
    search.met(hole=(2, 4), safe=[(3, 0), (3, 2), (2, 2), (2, 3)], beside=[(1, 3)])
    around = ((3, 0), (3, 2), (2, 2), (2, 3), (1, 3), (1, 5), (3, 5))
    assert search.next_way() == Way(around, (2, 4), (1, 3))


def test_where_no_cell_is_left_the_search_goes_back_to_the_hole_before():
    search = Search((3, 0), (3, 5))
    search.next_way()
    search.met((3, 3), [(3, 0), (3, 2)], [(2, 2), (4, 2)])
    search.next_way()
    search.met((2, 3), [(3, 0), (3, 2), (2, 2)], [])
    assert search.next_way() == Way(((3, 0), (3, 2), (4, 2), (4, 5), (3, 5)), (3, 3), (4, 2))


def test_a_hole_that_is_met_again_opens_no_new_way():
    search = Search((3, 0), (3, 5))
    search.next_way()
    search.met((3, 3), [(3, 0), (3, 2)], [(2, 2)])
    search.next_way()
    search.met((3, 3), [(3, 0), (3, 2), (2, 2), (2, 3)], [(2, 2), (2, 4)])
    assert search.next_way() is None


def test_the_search_finds_nearly_every_path_in_few_tries():
    """Where the experts fail, no policy learns."""
    rng = random.Random(0)
    counts = [failures(random_map(rng, size, 0.2)) for size in (4, 6, 8) for _ in range(200)]
    assert sum(count is not None and count <= MOST_WRONG_PATHS for count in counts) / len(counts) > 0.96


def test_the_search_ends_when_known_holes_part_start_and_goal():
    assert Search((0, 0), (2, 2), {(0, 1), (1, 0)}).next_way() is None
    assert failures(GridMap(("SFF", "HHH", "FFG"))) is None


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(
    ("task", "tools"), [("navigation", BASE_TOOLS), ("navigation", ASTAR_TOOLS), ("verification", BASE_TOOLS)]
)
def test_tool_failure_really_fails_once_and_is_mended_by_the_next_call(
    environment, executor, seed, task, tools
):
    _, shown = _show(environment, executor, seed, Kind.TOOL_FAILURE, task, tools)
    (index,) = [i for i, step in enumerate(shown.steps) if step.turn.mistake]
    failed, mended = shown.steps[index].observation, shown.steps[index + 1].observation
    assert not failed.ok or failed.payload["result"] == "path_out_of_bounds"
    assert mended.ok


def test_all_ways_to_fail_are_shown(environment, executor):
    seen = set()
    for seed in range(120):
        tools, task = (BASE_TOOLS, ASTAR_TOOLS)[seed % 2], ("navigation", "verification")[seed % 3 == 0]
        _, shown = _show(environment, executor, seed, Kind.TOOL_FAILURE, task, tools)
        failed = next(step.observation for step in shown.steps if step.turn.mistake)
        seen.add(failed.payload.get("error") or failed.payload["result"])
    assert seen >= {
        "invalid_value",
        "missing_parameter",
        "unknown_tool",
        "path_out_of_bounds",
        "out_of_bounds",
    }


def test_thoughts_are_short_lower_case_and_free_of_move_letters(environment, executor):
    thoughts = set()
    for seed in range(60):
        for kind in Kind:
            shown = _show(environment, executor, seed, kind)[1].steps
            thoughts |= {re.sub(r"\[\d+, \d+\]", "[x, y]", step.turn.think) for step in shown}
    assert len(thoughts) < 20
    for think in thoughts:
        assert think == think.lower()
        assert 3 <= len(think.split()) <= 11


def test_reflection_is_refused_where_there_is_nothing_to_reflect_on(environment, executor):
    with pytest.raises(ValueError, match="needs a navigation prompt without ASTAR"):
        _show(environment, executor, 0, Kind.REFLECTION_1, tools=ASTAR_TOOLS)


def test_a_tool_that_misbehaves_stops_the_expert_instead_of_teaching_nonsense(environment):
    grid = random_map(random.Random(0), 4, 0.2)
    prompt = navigation_prompt(grid, environment.renderer.render(grid), BASE_TOOLS, "n")
    expert = make_expert(prompt, Kind.CLEAN, random.Random(0), False)
    next(expert)
    with pytest.raises(ExpertError, match="not_found"):
        expert.send(Observation({"error": "not_found", "message": ""}, error="not_found"))
