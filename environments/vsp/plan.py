"""Deciding what the cold start asks: which maps, which questions on them, which kind of demonstration for
each.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from environments.base import Prompt
from environments.vsp.config import ColdStartConfig
from environments.vsp.expert import NO_WRONG_PATH, WRONG_PATHS, Kind
from environments.vsp.hypotheses import failures
from environments.vsp.maps import GridMap, Split, random_map, split_of
from environments.vsp.paths import hole_distance, verification_path
from environments.vsp.prompts import BASE_TOOLS, Task, navigation_prompt, verification_prompt
from environments.vsp.render import draw_cell_px
from tools.base import Picture

TRIES = 3_000  # draws for one new map; one in twenty falls into the test split
DEEPEST_OF = (
    5  # maps that fit reflection_2, of which the longest search is shown: long ones are rare as maps fall
)


class PlanError(Exception):
    """The settings ask for more different maps or questions than exist; the message is one line."""


@dataclass(frozen=True)
class QuestionPlan:
    """One question on a map, and how the expert shall go about it."""

    prompt_id: str
    task: Task
    tools: tuple[str, ...]
    path: str  # of verification, else ""
    kind: Kind
    point_holes: bool

    @property
    def needs_attempts(self) -> bool:
        """Whether the expert must look for a path by drawing."""
        return self.task is Task.NAVIGATION and "ASTAR" not in self.tools

    def wrong_paths(self, grid: GridMap) -> int | None:
        """How many wrong paths the expert draws on this map; None if not as many as the kind of demonstration shows."""
        wrong = failures(grid, grid.holes if self.point_holes else ())
        return wrong if wrong in WRONG_PATHS.get(self.kind, NO_WRONG_PATH) else None

    def prompt(self, grid: GridMap, picture: Picture) -> Prompt:
        """The prompt, given the map's picture."""
        if self.task is Task.NAVIGATION:
            return navigation_prompt(grid, picture, self.tools, self.prompt_id)
        return verification_prompt(grid, self.path, picture, self.tools, self.prompt_id)


@dataclass(frozen=True)
class MapPlan:
    """A map and the questions that share its picture. `cell_px`: side of a drawn cell, None as gymnasium draws it."""

    grid: GridMap
    questions: tuple[QuestionPlan, ...]
    cell_px: int | None = None


class Planner:
    """Draws plans. No map is ever drawn twice by one planner, so no (map, question) is either.

    The same seed, settings and order of calls give the same plans.
    """

    def __init__(self, config: ColdStartConfig, seed: int) -> None:
        self._config = config
        self._rng = random.Random(f"{seed}/cold_start")
        self._seen: set[str] = set()

    def trajectories(self, split: Split, count: int) -> Iterator[MapPlan]:
        """Plans of `count` trajectories on maps of the training sizes."""
        navigation = round(count * self._config.navigation_share)
        return self._plans(split, self._config.sizes, navigation, count - navigation, str(split), shown=True)

    def validation_items(self) -> Iterator[MapPlan]:
        """Plans of the validation questions: half navigation, half verification."""
        count = self._config.validation_items
        return self._plans(
            Split.VALIDATION, self._config.sizes, count // 2, count - count // 2, "validation-item"
        )

    def test_items(self) -> Iterator[MapPlan]:
        """Plans of the test questions, as many of each task at each test size."""
        for size in self._config.test_sizes:
            count = self._config.test_items_per_size
            yield from self._plans(Split.TEST, (size,), count, count, f"test-{size}x{size}")

    def _plans(
        self,
        split: Split,
        sizes: Sequence[int],
        navigation: int,
        verification: int,
        prefix: str,
        shown: bool = False,
    ) -> Iterator[MapPlan]:
        """Spread the questions evenly over as few maps as `trajectories_per_map` and one navigation each
        allow. Where the expert shall show the answers (`shown`), maps are chosen to fit; questions to be
        answered by a policy come on maps as they fall.
        """
        maps = max(navigation, -(-(navigation + verification) // self._config.trajectories_per_map))
        asked: Counter[tuple[int, int, bool]] = Counter()
        numbers = itertools.count()
        for index, size in zip(range(maps), self._shuffled(sizes), strict=False):
            asks = range(_even_share(index, maps, navigation))
            questions = [self._navigation(f"{prefix}-{next(numbers):06d}") for _ in asks]
            grid = self._new_map(split, size, questions if shown else ())
            paths: set[str] = set()
            for _ in range(_even_share(index, maps, verification)):
                paths.add(path := self._path(grid, asked, paths))
                questions.append(self._verification(f"{prefix}-{next(numbers):06d}", path))
            yield MapPlan(grid, tuple(questions), self._cell_px() if shown else None)

    def _cell_px(self) -> int | None:
        return draw_cell_px(self._rng, self._config.other_cells_share, self._config.other_cells_px)

    def _shuffled(self, sizes: Sequence[int]) -> Iterator[int]:
        """Each size equally often, in no order that could go in step with the spread of the tasks."""
        while True:
            yield from self._rng.sample(sizes, len(sizes))

    def _new_map(self, split: Split, size: int, questions: Sequence[QuestionPlan]) -> GridMap:
        """A map on which the expert's attempts go as the questions want."""
        searching = [question for question in questions if question.needs_attempts]
        enough = DEEPEST_OF if any(question.kind is Kind.REFLECTION_2 for question in searching) else 1
        found: list[tuple[int, GridMap]] = []
        for _ in range(TRIES):
            grid = random_map(self._rng, size, self._config.hole_density)
            if split_of(grid.sha256) is not split or grid.sha256 in self._seen:
                continue
            wrong = [question.wrong_paths(grid) for question in searching]
            if None not in wrong:
                found.append((sum(count or 0 for count in wrong), grid))
            if len(found) == enough:
                break
        if not found:
            raise PlanError(
                f"data: no new {split} map of size {size} in {TRIES} draws; ask for fewer questions"
            )
        _, grid = max(found, key=lambda each: each[0])
        self._seen.add(grid.sha256)
        return grid

    def _navigation(self, prompt_id: str) -> QuestionPlan:
        config, chance = self._config, self._rng.random()
        failure = config.tool_failure_share
        if self._rng.random() < config.astar_share:
            kind = Kind.TOOL_FAILURE if chance < failure else Kind.CLEAN
            return QuestionPlan(prompt_id, Task.NAVIGATION, (*BASE_TOOLS, "ASTAR"), "", kind, False)
        kind = Kind.CLEAN
        if chance < failure:
            kind = Kind.TOOL_FAILURE
        elif chance < failure + config.reflection_1_share:
            kind = Kind.REFLECTION_1
        elif chance < failure + config.reflection_1_share + config.reflection_2_share:
            kind = Kind.REFLECTION_2
        # who has seen all the holes draws no wrong path
        point_holes = self._rng.random() < config.holes_share and kind not in WRONG_PATHS
        return QuestionPlan(prompt_id, Task.NAVIGATION, BASE_TOOLS, "", kind, point_holes)

    def _verification(self, prompt_id: str, path: str) -> QuestionPlan:
        kind = Kind.TOOL_FAILURE if self._rng.random() < self._config.tool_failure_share else Kind.CLEAN
        tools = (*BASE_TOOLS, "ASTAR") if self._rng.random() < self._config.astar_share else BASE_TOOLS
        return QuestionPlan(prompt_id, Task.VERIFICATION, tools, path, kind, False)

    def _path(self, grid: GridMap, asked: Counter[tuple[int, int, bool]], taken: set[str]) -> str:
        """A path to verify, of the length and answer asked least so far among those that the map allows.

        That balances Yes and No at each size and length, although few maps have a hole next to the start.
        """
        nearest = hole_distance(grid)
        choices = [
            (grid.size, length, safe)
            for length in self._config.path_lengths
            for safe in (True, False)
            if safe or (nearest is not None and nearest <= length)
        ]
        for choice in sorted(choices, key=lambda c: (asked[c], self._rng.random())):
            for _ in range(10):
                path = verification_path(self._rng, grid, choice[1], choice[2])
                if path not in taken:
                    asked[choice] += 1
                    return path
        raise PlanError(f"data: {len(taken)} paths on one map leave no new one; lower trajectories_per_map")


def _even_share(index: int, parts: int, total: int) -> int:
    """How many of `total` things part `index` of `parts` gets when they are spread evenly."""
    return (index + 1) * total // parts - index * total // parts
