"""Scripted experts: how someone who uses the tools well would answer, step by step, seeing each
observation.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from environments.base import Prompt, ScriptedTurn
from environments.vsp.hypotheses import Search
from environments.vsp.prompts import VSP, Task
from tools.base import Observation, ToolCall
from tools.executor import ToolExecutor

Expert = Generator[ScriptedTurn, Observation, None]
"""Yields turns, is sent the observation of each call, ends after the turn with the response."""

Point = list[int]  # [x, y] in picture pixels


class Kind(StrEnum):
    """What a demonstration shows."""

    CLEAN = "clean"
    REFLECTION_1 = "reflection_1"  # one wrong path drawn, seen to fail, corrected
    REFLECTION_2 = "reflection_2"  # two of them, or more
    TOOL_FAILURE = "tool_failure"  # a call returns an error, the next one is right


MOST_WRONG_PATHS = 6
"""So that a demonstration stays within the agent's limits of turns and tokens."""

WRONG_PATHS: dict[Kind, range] = {
    Kind.REFLECTION_1: range(1, 2),
    Kind.REFLECTION_2: range(2, MOST_WRONG_PATHS + 1),
}
NO_WRONG_PATH = range(1)
"""How many wrong paths each kind may show; a kind that is not named shows none."""

# Few, short, lower-case texts: the tiny policy learns every one of them. They say only what the agent can
# know.
FIND = {"start": "find the start", "goal": "find the goal", "holes": "find the holes"}
DRAW = "draw the path"
TRY = "try a path to the goal"
SEARCH = "search for a safe path"
SAFE = "the path is safe"
MEETS_HOLE = "the path meets a hole"
FOUND = "this path is safe"
OTHER_WAY = "it meets a hole, try the other way"
GO_ROUND = "it meets a hole, go round {} by {}"
NO_SIDE = "no way beside it, go round {} by {}"
SEEN_BEFORE = "that hole again, go round {} by {}"
RECOVERY = {
    "invalid_value": "that value is not allowed, correct it",
    "missing_parameter": "a parameter is missing, add it",
    "unknown_parameter": "a parameter name is wrong, correct it",
    "unknown_tool": "there is no such tool, use another",
    "out_of_bounds": "that point is outside, use the right one",
    "path_out_of_bounds": "that point is outside, use the right one",
}


@dataclass(frozen=True)
class Step:
    """A turn and what its call returned (None for the response)."""

    turn: ScriptedTurn
    observation: Observation | None


@dataclass(frozen=True)
class Demonstration:
    """One expert trajectory. `reward` is 1.0 if the response was graded right."""

    prompt: Prompt
    kind: Kind
    steps: tuple[Step, ...]
    reward: float


class ExpertError(RuntimeError):
    """The tools did not behave as the expert needs; the demonstration would be wrong, so none is made."""


def demonstrate(
    prompt: Prompt,
    kind: Kind,
    executor: ToolExecutor,
    environment: VSP,
    rng: random.Random,
    point_holes: bool = False,
) -> Demonstration:
    """Let the expert answer `prompt`, each call really run by `executor` on the prompt's picture.

    `point_holes`: navigation without ASTAR looks for the holes before the first try. Raises ExpertError if a
    call that should work fails, one that should fail works, the map takes another number of attempts than
    `kind` says (see `hypotheses.failures`), or the response is graded wrong.
    """
    expert = make_expert(prompt, kind, rng, point_holes)
    steps: list[Step] = []
    turn = next(expert)
    while turn.call is not None:
        observation = executor.run(turn.call, prompt.pictures[0], prompt.tools)
        steps.append(Step(turn, observation))
        turn = expert.send(observation)
    steps.append(Step(turn, None))
    results = [step.observation.payload.get("result") for step in steps if step.observation]
    wrong = results.count("path_crosses_hole") if prompt.task == Task.NAVIGATION else 0
    if kind is not Kind.TOOL_FAILURE and wrong not in WRONG_PATHS.get(kind, NO_WRONG_PATH):
        raise ExpertError(f"{prompt.prompt_id}: {wrong} wrong paths on this map, which is not {kind}")
    if turn.response is None or not environment.grade(prompt, turn.response):
        raise ExpertError(f"{prompt.prompt_id}: the expert's response {turn.response!r} is graded wrong")
    return Demonstration(prompt, kind, tuple(steps), 1.0)


def make_expert(prompt: Prompt, kind: Kind, rng: random.Random, point_holes: bool) -> Expert:
    """The expert for a prompt. Reflection needs navigation without ASTAR (ValueError otherwise)."""
    use_astar = prompt.task == Task.NAVIGATION and "ASTAR" in prompt.tools
    if kind in WRONG_PATHS and (prompt.task != Task.NAVIGATION or use_astar):
        raise ValueError(f"{prompt.prompt_id}: {kind} needs a navigation prompt without ASTAR")
    calls = 2 if prompt.task == Task.VERIFICATION else 3 + (point_holes and not use_astar)
    script = _Script(rng, slip_at=rng.randrange(calls) if kind is Kind.TOOL_FAILURE else None)
    if prompt.task == Task.VERIFICATION:
        return _verify(script, prompt.hidden["path"])
    if use_astar:
        return _navigate_with_astar(script)
    return _navigate(script, point_holes)


def _verify(script: _Script, path: str) -> Expert:
    start = yield from script.point("start")
    call = ToolCall("DRAW2DPATH", {"start": start, "directions": path})
    drawn = yield from script.call(DRAW, call)
    if drawn.payload["result"] == "path_safe":
        yield ScriptedTurn(SAFE, response="Yes")
    else:
        yield ScriptedTurn(MEETS_HOLE, response="No")


def _navigate_with_astar(script: _Script) -> Expert:
    start = yield from script.point("start")
    goal = yield from script.point("goal")
    route = yield from script.call(SEARCH, ToolCall("ASTAR", {"start": start, "goal": goal}))
    yield ScriptedTurn(FOUND, response=route.payload["path"])


def _navigate(script: _Script, point_holes: bool) -> Expert:
    """Assume, check, step aside: a path that meets a hole is no slip, it is how the hole becomes known."""
    start = yield from script.point("start")
    goal = yield from script.point("goal")
    # x and y change places: a picture's first number is the column, and rows come first in the search
    search = Search(_swapped(start), _swapped(goal))
    if point_holes:
        holes = yield from script.call(FIND["holes"], ToolCall("POINT", {"target": "holes"}))
        search.known.update(map(_swapped, holes.payload["coordinates"]))
    think, round_it = TRY, GO_ROUND
    while (way := search.next_way()) is not None:
        points = [list(_swapped(point)) for point in way.points]
        if way.hole is not None and way.aside is not None:
            think = round_it.format(*(list(_swapped(point)) for point in (way.hole, way.aside)))
        drawn = yield from script.call(think, ToolCall("DRAW2DPATH", {"points": points}))
        seen = drawn.payload
        if seen["result"] == "path_safe":
            yield ScriptedTurn(FOUND, response=seen["moves"])
            return
        safe, beside = ([_swapped(point) for point in seen[key]] for key in ("safe", "beside"))
        hole = _swapped(seen["at"])
        round_it = SEEN_BEFORE if hole in search.holes else GO_ROUND if beside else NO_SIDE
        search.met(hole, safe, beside)
        think = OTHER_WAY
    raise ExpertError("the search for a path without ASTAR ended without one")


def _swapped(pair: Sequence[int]) -> tuple[int, int]:
    return pair[1], pair[0]


class _Script:
    """Makes calls, one of them (number `slip_at`, if any) wrong at first."""

    def __init__(self, rng: random.Random, slip_at: int | None) -> None:
        self._rng = rng
        self._slip_at = slip_at
        self._made = 0

    def call(self, think: str, call: ToolCall) -> Generator[ScriptedTurn, Observation, Observation]:
        if self._made == self._slip_at:
            failed = yield ScriptedTurn(think, call=_wrong_call(self._rng, call), mistake=True)
            failure = failed.payload.get("error") or failed.payload.get("result")
            if failure not in RECOVERY:
                raise ExpertError(f"a call that should fail returned {failed.to_json()}")
            think = RECOVERY[failure]
        self._made += 1
        observation = yield ScriptedTurn(think, call=call)
        if not observation.ok:
            raise ExpertError(f"{call.to_json()} returned {observation.to_json()}")
        return observation

    def point(self, target: str) -> Generator[ScriptedTurn, Observation, Point]:
        observation = yield from self.call(FIND[target], ToolCall("POINT", {"target": target}))
        return observation.payload["coordinates"]


def _wrong_call(rng: random.Random, call: ToolCall) -> ToolCall:
    """A call like `call` with one slip in it, which the tools answer with an error."""
    params = dict(call.params)
    slip = rng.choice(("tool", "missing", "misnamed", "value"))
    if slip == "tool":
        return ToolCall({"POINT": "FIND", "DRAW2DPATH": "DRAW", "ASTAR": "SEARCH"}[call.name], params)
    last = list(params)[-1]
    if slip == "missing":
        return ToolCall(call.name, {name: value for name, value in params.items() if name != last})
    if slip == "misnamed":
        wrong = {"target": "object", "directions": "path", "goal": "end", "points": "corners"}[last]
        return ToolCall(call.name, {wrong if name == last else name: value for name, value in params.items()})
    if call.name == "POINT":
        params["target"] = {"start": "begin", "goal": "finish", "holes": "water"}[params["target"]]
    elif "points" in params:  # x beyond the right edge: pictures are at most 512 pixels wide
        (x, y), *others = params["points"]
        params["points"] = [[x + 512, y], *others]
    else:
        params["start"] = [params["start"][0] + 512, params["start"][1]]
    return ToolCall(call.name, params)
