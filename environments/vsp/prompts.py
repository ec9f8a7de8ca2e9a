"""VSP as an environment: its two questions, sampled prompts, and the grader."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from environments.base import Prompt
from environments.vsp.grade import grade_navigation, grade_verification
from environments.vsp.hypotheses import failures
from environments.vsp.maps import GridMap, Split, random_map, shortest_path, split_of
from environments.vsp.paths import hole_distance, verification_path
from environments.vsp.potential import potential, random_call
from environments.vsp.render import Renderer
from environments.vsp.task import Task
from environments.vsp.world import is_safe
from tools.base import Observation, Picture, ToolCall

ENVIRONMENT = "vsp"
BASE_TOOLS: tuple[str, ...] = ("POINT", "DRAW2DPATH", "CROP")
"""Offered in every prompt; ASTAR is the tool that appears later."""

# No capital L, R, U or D outside paths: the tiny policy's tokenizer cuts them out as moves.
NAVIGATION_QUESTION = "Find a safe path from the start to the goal."
VERIFICATION_QUESTION = 'Is this path safe: "{path}"?'


def navigation_prompt(
    grid: GridMap, picture: Picture, tools: Sequence[str], prompt_id: str, answer: str | None = None
) -> Prompt:
    """Ask for a path. `hidden["answer"]` is one right path (the shortest, unless given); any safe one is
    right.
    """
    hidden = _hidden(grid, path="", answer=shortest_path(grid) if answer is None else answer)
    return Prompt(
        prompt_id, ENVIRONMENT, Task.NAVIGATION, NAVIGATION_QUESTION, (picture,), tuple(tools), hidden
    )


def verification_prompt(
    grid: GridMap,
    path: str,
    picture: Picture,
    tools: Sequence[str],
    prompt_id: str,
    answer: str | None = None,
) -> Prompt:
    """Ask whether `path` ever enters a hole. `hidden["answer"]` is Yes or No (by the rules, unless given)."""
    answer = ("Yes" if is_safe(grid, path) else "No") if answer is None else answer
    question = VERIFICATION_QUESTION.format(path=path)
    hidden = _hidden(grid, path=path, answer=answer)
    return Prompt(prompt_id, ENVIRONMENT, Task.VERIFICATION, question, (picture,), tuple(tools), hidden)


def _hidden(grid: GridMap, path: str, answer: str) -> dict[str, object]:
    return {
        "map_rows": list(grid.rows),
        "map_hash": grid.sha256,
        "size": grid.size,
        "path": path,
        "answer": answer,
        "path_length": len(path) if path else len(answer),
    }


def map_of(prompt: Prompt) -> GridMap:
    """The map behind a prompt: for graders, experts and reports only."""
    return GridMap(tuple(prompt.hidden["map_rows"]))


class VSP:
    """The environment: draws prompts on fresh maps and grades responses. One per process (see `Renderer`)."""

    def __init__(self, renderer: Renderer | None = None) -> None:
        self.renderer = renderer or Renderer()

    def sample(
        self,
        rng: random.Random,
        task: Task,
        size: int,
        prompt_id: str,
        *,
        split: Split = Split.TRAIN,
        hole_density: float = 0.2,
        path_lengths: Sequence[int] = tuple(range(1, 10)),
        tools: Sequence[str] = BASE_TOOLS,
        cell_px: int | None = None,
        hardest_of: int = 1,
    ) -> Prompt:
        """A prompt on a random map of `split`; verification is safe or not with equal chance where both
        exist. `cell_px`: see `Renderer.render`. `hardest_of`: maps drawn, of which the one is taken where the
        search of `environments.vsp.hypotheses` meets most holes.
        """
        grids: list[GridMap] = []
        while len(grids) < hardest_of:
            grid = random_map(rng, size, hole_density)
            if split_of(grid.sha256) is split:
                grids.append(grid)
        grid = grids[0] if hardest_of == 1 else max(grids, key=lambda grid: failures(grid) or 0)
        picture = self.renderer.render(grid, cell_px)
        if task is Task.NAVIGATION:
            return navigation_prompt(grid, picture, tools, prompt_id)
        length = rng.choice(list(path_lengths))
        nearest = hole_distance(grid)
        safe = rng.random() < 0.5 or nearest is None or nearest > length
        return verification_prompt(
            grid, verification_path(rng, grid, length, safe), picture, tools, prompt_id
        )

    def grade(self, prompt: Prompt, response: str) -> bool:
        """Whether `response` is right. Never raises, whatever the response."""
        if prompt.task == Task.NAVIGATION:
            return grade_navigation(map_of(prompt), response)
        return grade_verification(prompt.hidden["answer"], response)

    def potential(
        self, prompt: Prompt, history: Sequence[tuple[ToolCall | None, Observation | None]]
    ) -> float:
        """See `environments.vsp.potential.potential`."""
        return potential(prompt, history)

    def random_call(self, prompt: Prompt, rng: np.random.Generator) -> ToolCall:
        """See `environments.vsp.potential.random_call`."""
        return random_call(prompt, rng)
