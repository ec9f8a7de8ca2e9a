"""An episode is ended early only for what its agent has seen, and never where it could still have learned."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from environments.base import Prompt
from environments.vsp.expert import NO_WRONG_PATH, WRONG_PATHS, Kind, demonstrate
from environments.vsp.hypotheses import failures
from environments.vsp.prompts import VSP, Task, map_of
from environments.vsp.pruning import Strictness, hopeless
from tools.base import Observation, ToolCall
from tools.errors import ToolErrorCode
from tools.executor import ToolExecutor
from tools.vsp import vsp_registry


@dataclass(frozen=True)
class Turn:
    call: ToolCall | None
    observation: Observation | None


def crossing(at: list[int], directions: str = "R", safe: Sequence[list[int]] = ([32, 32],)) -> Turn:
    call = ToolCall("DRAW2DPATH", {"start": [32, 32], "directions": directions})
    return Turn(call, Observation({"result": "path_crosses_hole", "at": at, "safe": list(safe)}))


def failing(target: str) -> Turn:
    call = ToolCall("POINT", {"target": target})
    return Turn(call, Observation.failure(ToolErrorCode.INVALID_VALUE, "no"))


OFF_MAP = Turn(
    ToolCall("DRAW2DPATH", {"points": [[900, 1]]}),
    Observation({"result": "path_out_of_bounds", "at": [900, 1]}),
)
GOOD = Turn(ToolCall("POINT", {"target": "start"}), Observation({"coordinates": [32, 32]}))
UNREADABLE = Turn(None, Observation.failure(ToolErrorCode.MALFORMED_CALL, "no"))

ENVIRONMENT = VSP()
NAVIGATION, VERIFICATION = (
    ENVIRONMENT.sample(random.Random(0), task, 4, task) for task in (Task.NAVIGATION, Task.VERIFICATION)
)

CASES: dict[str, tuple[Prompt, list[Turn], set[Strictness]]] = {
    "nothing yet": (NAVIGATION, [], set()),
    "good calls again and again": (NAVIGATION, [GOOD, GOOD, GOOD], set()),
    "one crossed hole": (NAVIGATION, [GOOD, crossing([96, 32])], {"strict"}),
    "two different holes": (NAVIGATION, [crossing([96, 32]), crossing([32, 96], "D")], {"strict"}),
    "the same hole by another path": (
        NAVIGATION,
        [crossing([96, 32]), GOOD, crossing([96, 32], "RR")],
        {"fatal", "strict"},
    ),
    "the same hole after another safe part": (
        NAVIGATION,
        [crossing([96, 32], safe=[[32, 32]]), crossing([96, 32], safe=[[96, 96]])],
        {"strict"},
    ),
    "the crossed hole is the answer": (VERIFICATION, [crossing([96, 32]), crossing([96, 32])], set()),
    "two different failures": (VERIFICATION, [failing("moon"), failing("sun")], set()),
    "the same failure": (VERIFICATION, [failing("moon"), GOOD, failing("moon")], {"fatal", "strict"}),
    "the same path off the map": (NAVIGATION, [OFF_MAP, OFF_MAP], {"fatal", "strict"}),
    "unreadable turns have their own limit": (NAVIGATION, [UNREADABLE, UNREADABLE], set()),
}


@pytest.mark.parametrize("strictness", ["never", "fatal", "strict"])
@pytest.mark.parametrize("name", CASES)
def test_each_strictness_ends_what_it_says_and_nothing_else(name: str, strictness: Strictness) -> None:
    prompt, turns, ended_by = CASES[name]
    assert hopeless(prompt, turns, strictness) is (strictness in ended_by)


def test_the_hidden_map_is_never_looked_at() -> None:
    blind: Any = replace(NAVIGATION, hidden={})
    assert hopeless(blind, [crossing([96, 32]), crossing([96, 32])], "fatal")


@pytest.mark.parametrize("kind", [Kind.CLEAN, Kind.REFLECTION_1, Kind.REFLECTION_2, Kind.TOOL_FAILURE])
def test_fatal_ends_no_expert_and_strict_ends_those_who_correct_themselves(kind: Kind) -> None:
    wanted = WRONG_PATHS.get(kind, NO_WRONG_PATH)
    executor, rng, found = ToolExecutor(vsp_registry(), None, 5.0), random.Random(3), 0
    while found < 3:
        prompt = ENVIRONMENT.sample(rng, Task.NAVIGATION, 5, "p")
        if failures(map_of(prompt)) not in wanted:
            continue
        found += 1
        steps = demonstrate(prompt, kind, executor, ENVIRONMENT, rng).steps
        turns = [Turn(step.turn.call, step.observation) for step in steps]
        assert not any(hopeless(prompt, turns[:n], "fatal") for n in range(len(turns) + 1))
        assert hopeless(prompt, turns, "strict") is (wanted is not NO_WRONG_PATH)
