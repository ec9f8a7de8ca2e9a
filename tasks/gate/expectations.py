"""What the gate expects of each frame, as Great Expectations expectations.

Null passes most expectations of Great Expectations, and so does an empty table
(fivetran/great_expectations#7432, #2726). So each suite starts with its row count, and each required column
is expected not to be null.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import great_expectations.expectations as gxe
from great_expectations.expectations.expectation import Expectation

from environments.vsp.config import ColdStartConfig
from environments.vsp.expert import Kind
from environments.vsp.maps import Split
from environments.vsp.prompts import Task
from tasks.params import ValidateConfig

_QUESTION = ("task", "tools", "size", "map_hash", "map_rows", "question", "path", "answer", "image")


@dataclass(frozen=True)
class Check:
    """An expectation, what it says in words, and the columns that show what is wrong with a bad row."""

    about: str
    expectation: Expectation
    shows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """The checks of one frame; `key` is the column that identifies a row."""

    frame: str
    key: str
    checks: tuple[Check, ...]


def suites(config: ValidateConfig, data: ColdStartConfig, ingested: bool = False) -> list[Suite]:
    """All that must hold before anything is trained, files first.

    `ingested`: there are trajectories from elsewhere. Several may answer one question, unlike the experts'.
    """
    asked_once = _unique("map_hash", "question").about
    taken_in = tuple(check for check in _trajectory_checks(config, data) if check.about != asked_once)
    return [
        Suite("files", "file", tuple(_file_checks())),
        Suite("shares", "measure", tuple(_share_checks())),
        Suite("trajectories", "trajectory_id", tuple(_trajectory_checks(config, data))),
        *([Suite("ingested", "trajectory_id", taken_in)] if ingested else []),
        Suite("turns", "trajectory_id", tuple(_turn_checks())),
        Suite("items", "prompt_id", tuple(_item_checks(data))),
    ]


def _file_checks() -> Iterable[Check]:
    yield _row_count(2)
    yield _in_set("problem", [""], "the file is there, can be read and has its columns")
    yield _true("is_listed", "the manifest lists the file", "file")
    yield _true("has_the_listed_hash", "the bytes are those that the manifest lists", "file")
    yield _true("has_the_listed_rows", "the row count is the one that the manifest lists", "rows")


def _share_checks() -> Iterable[Check]:
    yield _row_count(1)
    yield _true("is_within", "counts and shares of the mix are those of params.yaml", "limits")


def _trajectory_checks(config: ValidateConfig, data: ColdStartConfig) -> Iterable[Check]:
    yield _row_count(config.min_rows, config.max_rows)
    for column in ("trajectory_id", "split", "kind", "reward", *_QUESTION):
        yield _not_null(column)
    for column, kind in {"size": "int64", "n_turns": "int64", "tokens": "int64", "reward": "float64"}.items():
        yield _of_type(column, kind)
    yield _unique("trajectory_id")
    yield _unique("map_hash", "question")
    yield _in_set("split", [str(Split.TRAIN), str(Split.VALIDATION)], "the split is known")
    yield _true("split_is_right", "the split is the one that the file is named after", "split")
    yield _in_set("kind", [str(kind) for kind in Kind], "the kind is known")
    yield _between("reward", 0, 1, "rewards lie between 0 and 1")
    yield _in_set("reward", [1.0], "an expert's reward is 1")
    yield _true("reward_is_earned", "the reward is what grading the response gives", "reward", "response")
    yield _true("ends_with_its_response", "the last turn, and no other, responds", "n_turns")
    yield _between("n_turns", 1, config.max_turns, "the number of turns is within agent limits")
    yield _between("tokens", 1, config.max_tokens, "the length in tokens is within agent limits")
    yield from _question_checks(list(data.sizes))


def _item_checks(data: ColdStartConfig) -> Iterable[Check]:
    yield _row_count(1)
    for column in ("prompt_id", *_QUESTION):
        yield _not_null(column)
    yield _of_type("size", "int64")
    yield _unique("prompt_id")
    yield _unique("map_hash", "question")
    yield from _question_checks(sorted({*data.sizes, *data.test_sizes}))


def _question_checks(sizes: list[int]) -> Iterable[Check]:
    yield _in_set("task", [str(task) for task in Task], "the task is known")
    yield _in_set("size", sizes, "the size is one of params.yaml")
    yield _true("tools_are_known", "all tools offered exist", "tools")
    asked = "the question is the task's, about the row's path"
    yield _true("question_is_asked_right", asked, "question", "path")
    yield _true("map_is_valid", "the map is square, of its size, with one start and one goal", "map_rows")
    yield _true("map_hash_is_right", "map_hash is the hash of the map", "map_hash")
    yield _true("map_is_in_its_split", "the map's hash belongs to the split", "map_rows")
    apart = "no map is in two of train, validation and test"
    yield _true("map_is_in_no_other_group", apart, "also_in", "map_rows")
    yield _true("answer_is_true", "the answer is what the map says", "answer", "path", "map_rows")
    yield _true("image_decodes", "the picture is an image", "image")
    yield _true("image_has_the_right_side", "the picture is square, with a side of its size", "image", "size")
    yield _true("image_shows_the_map", "the picture shows the row's map", "map_rows")


def _turn_checks() -> Iterable[Check]:
    yield _row_count(1)
    yield _not_null("trajectory_id")
    yield _not_null("think")
    yield _not_null("mistake")
    yield _true("calls_or_responds", "a turn either calls a tool or responds", "call_name", "response")
    yield _true("tool_is_known", "the tool called exists (unless a mistake)", "call_name")
    yield _true("tool_is_offered", "the tool called is offered in the prompt (unless a mistake)", "call_name")
    yield _true("params_parse", "the parameters are a JSON object", "call_params")
    fits = "the parameters fit the tool (unless a mistake)"
    yield _true("params_fit_the_tool", fits, "call_name", "call_params")
    yield _true("observation_parses", "a call's observation is a JSON object", "observation")
    error = "the observation is no error (unless a mistake)"
    yield _true("observation_is_no_error", error, "observation")
    yield _true("observation_image_decodes", "the observation's picture is an image", "call_name")


def _row_count(low: int, high: int | None = None) -> Check:
    about = f"there are at least {low} rows" if high is None else f"there are {low} to {high} rows"
    return Check(about, gxe.ExpectTableRowCountToBeBetween(min_value=low, max_value=high, notes=about))


def _not_null(column: str) -> Check:
    about = f"{column} is never null or NaN"
    return Check(about, gxe.ExpectColumnValuesToNotBeNull(column=column, notes=about), (column,))


def _of_type(column: str, kind: str) -> Check:
    about = f"{column} is {kind}"
    return Check(about, gxe.ExpectColumnValuesToBeOfType(column=column, type_=kind, notes=about))


def _unique(*columns: str) -> Check:
    about = f"no {' with '.join(columns)} twice"
    if len(columns) == 1:
        return Check(about, gxe.ExpectColumnValuesToBeUnique(column=columns[0], notes=about), columns)
    return Check(about, gxe.ExpectCompoundColumnsToBeUnique(column_list=list(columns), notes=about), columns)


def _in_set(column: str, values: list[Any], about: str) -> Check:
    return Check(
        about, gxe.ExpectColumnValuesToBeInSet(column=column, value_set=values, notes=about), (column,)
    )


def _between(column: str, low: float, high: float, about: str) -> Check:
    expectation = gxe.ExpectColumnValuesToBeBetween(column=column, min_value=low, max_value=high, notes=about)
    return Check(f"{about}: {low} to {high}", expectation, (column,))


def _true(column: str, about: str, *shows: str) -> Check:
    return Check(about, gxe.ExpectColumnValuesToBeInSet(column=column, value_set=[True], notes=about), shows)
