"""Experts: every call really made, every kind of mistake really seen to fail, every answer right."""

import random

import pytest

from environments.vsp.expert import NO_WRONG_PATH, WRONG_PATHS, ExpertError, Kind, demonstrate, make_expert
from environments.vsp.hypotheses import cells_of, failures, next_hypothesis
from environments.vsp.maps import random_map
from environments.vsp.prompts import BASE_TOOLS, VSP, navigation_prompt, verification_prompt
from environments.vsp.world import solves
from tools.base import Observation
from tools.cache import ToolResultCache
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
    while kind is not Kind.TOOL_FAILURE and not holes and failures(grid, f"n{seed}") not in wanted:
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
        assert "hole" in shown.steps[index + 1].turn.think
    points = [str(shown.steps[i].turn.call.params["points"]) for i in draws]
    assert len(set(points)) == len(draws)
    assert shown.steps[-1].turn.response == shown.steps[right].observation.payload["moves"]
    assert solves(grid, shown.steps[-1].turn.response)
    assert not any(step.turn.mistake for step in shown.steps)  # a hypothesis is no slip


@pytest.mark.parametrize("seed", range(60))
def test_hypotheses_use_nothing_but_the_holes_met_so_far(seed):
    """Demonstrations that lean on the hidden map would teach what no agent can know."""
    rng = random.Random(seed)
    grid = random_map(rng, rng.choice((3, 5, 8, 9)), 0.25)
    known, tried = set(), set()
    while True:
        corners = next_hypothesis(grid.size, grid.start, grid.goal, frozenset(known), str(seed))
        cells = list(cells_of(corners))
        assert (cells[0], cells[-1]) == (grid.start, grid.goal)
        assert not known & set(cells)
        assert corners not in tried
        tried.add(corners)
        met = next((cell for cell in cells if cell in grid.hole_set), None)
        if met is None:
            break
        known.add(met)
    assert failures(grid, str(seed)) == len(known)


def test_the_order_of_equal_hypotheses_differs_between_prompts_and_never_for_one():
    """One fixed list teaches a policy to recite it, and leaves nothing to explore where it ends."""
    known = {(0, 3), (3, 0)}  # neither path of one turn is free
    seen = [next_hypothesis(6, (0, 0), (5, 5), known, str(order)) for order in range(40)]
    assert seen == [next_hypothesis(6, (0, 0), (5, 5), known, str(order)) for order in range(40)]
    assert len(set(seen)) == 2  # the columns left of the hole in the first row
    assert {sum(1 for _ in cells_of(path)) for path in seen} == {11}


def test_no_hypothesis_is_left_when_known_holes_part_start_and_goal():
    assert next_hypothesis(3, (0, 0), (2, 2), {(0, 1), (1, 0)}, "") is None


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
    for seed in range(80):
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
            thoughts |= {step.turn.think for step in _show(environment, executor, seed, kind)[1].steps}
    assert len(thoughts) < 20
    for think in thoughts:
        assert think == think.lower()
        assert 3 <= len(think.split()) <= 10


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
