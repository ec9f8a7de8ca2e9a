"""The columns of the cold-start data set, and reading its rows back as the environment's own objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from environments.base import Prompt, ScriptedTurn
from environments.vsp.expert import Demonstration, Kind, Step
from environments.vsp.prompts import ENVIRONMENT
from tools.base import Observation, Picture, ToolCall
from tools.errors import ToolErrorCode

TURN = pa.struct(
    [
        pa.field("think", pa.string(), nullable=False),
        pa.field("call_name", pa.string()),
        pa.field("call_params", pa.string()),  # JSON object
        pa.field("observation", pa.string()),  # JSON object, the text between the obs tags
        pa.field("observation_image", pa.binary()),  # only of tools in ColdStartConfig.stored_pictures
        pa.field("response", pa.string()),
        pa.field("mistake", pa.bool_(), nullable=False),
    ]
)

_QUESTION_FIELDS = [
    pa.field("task", pa.string(), nullable=False),  # navigation | verification
    pa.field("tools", pa.list_(pa.string()), nullable=False),
    pa.field("size", pa.int32(), nullable=False),
    pa.field("map_hash", pa.string(), nullable=False),  # sha256 hex of the rows joined by line feeds
    pa.field("map_rows", pa.list_(pa.string()), nullable=False),
    pa.field("question", pa.string(), nullable=False),
    pa.field("path", pa.string(), nullable=False),  # of verification, else ""
    pa.field("answer", pa.string(), nullable=False),  # Yes | No, or one right path
    pa.field("image", pa.binary(), nullable=False),  # PNG
]

TRAJECTORIES = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),  # clean | reflection_1 | reflection_2 | tool_failure
        *_QUESTION_FIELDS,
        pa.field("reward", pa.float64(), nullable=False),  # 1.0: the expert's response is graded right
        pa.field("turns", pa.list_(TURN), nullable=False),
    ]
)

ITEMS = pa.schema([pa.field("prompt_id", pa.string(), nullable=False), *_QUESTION_FIELDS])


def question_columns(prompt: Prompt) -> dict[str, Any]:
    """The columns that trajectories and items share."""
    hidden = prompt.hidden
    return {
        "task": str(prompt.task),
        "tools": list(prompt.tools),
        "size": hidden["size"],
        "map_hash": hidden["map_hash"],
        "map_rows": hidden["map_rows"],
        "question": prompt.question,
        "path": hidden["path"],
        "answer": hidden["answer"],
        "image": prompt.pictures[0].png,
    }


def item_row(prompt: Prompt) -> dict[str, Any]:
    """A row of ITEMS."""
    return {"prompt_id": prompt.prompt_id, **question_columns(prompt)}


def trajectory_row(
    demonstration: Demonstration, split: str, stored_pictures: tuple[str, ...]
) -> dict[str, Any]:
    """A row of TRAJECTORIES; observation pictures only of the tools named."""
    return {
        "trajectory_id": demonstration.prompt.prompt_id,
        "split": split,
        "kind": str(demonstration.kind),
        **question_columns(demonstration.prompt),
        "reward": demonstration.reward,
        "turns": [_turn_columns(step, stored_pictures) for step in demonstration.steps],
    }


def _turn_columns(step: Step, stored_pictures: tuple[str, ...]) -> dict[str, Any]:
    call, observation = step.turn.call, step.observation
    picture = observation.picture if observation and call and call.name in stored_pictures else None
    return {
        "think": step.turn.think,
        "call_name": call.name if call else None,
        "call_params": json.dumps(call.params, ensure_ascii=False) if call else None,
        "observation": observation.to_json() if observation else None,
        "observation_image": picture.png if picture else None,
        "response": step.turn.response,
        "mistake": step.turn.mistake,
    }


def prompt_of(row: dict[str, Any]) -> Prompt:
    """The prompt in a row of either schema."""
    hidden = {name: row[name] for name in ("map_rows", "map_hash", "size", "path", "answer")}
    hidden["path_length"] = len(row["path"] or row["answer"])
    return Prompt(
        prompt_id=row["trajectory_id"] if "trajectory_id" in row else row["prompt_id"],
        environment=ENVIRONMENT,
        task=row["task"],
        question=row["question"],
        pictures=(Picture(row["image"]),),
        tools=tuple(row["tools"]),
        hidden=hidden,
    )


def demonstration_of(row: dict[str, Any]) -> Demonstration:
    """The demonstration in a row of TRAJECTORIES."""
    steps = tuple(_step_of(turn) for turn in row["turns"])
    return Demonstration(prompt_of(row), Kind(row["kind"]), steps, row["reward"])


def _step_of(turn: dict[str, Any]) -> Step:
    if turn["call_name"] is None:
        return Step(ScriptedTurn(turn["think"], response=turn["response"], mistake=turn["mistake"]), None)
    call = ToolCall(turn["call_name"], json.loads(turn["call_params"]))
    payload = json.loads(turn["observation"])
    error = ToolErrorCode(payload["error"]) if "error" in payload else None
    picture = Picture(turn["observation_image"]) if turn["observation_image"] is not None else None
    observation = Observation(payload, picture, error)
    return Step(ScriptedTurn(turn["think"], call=call, mistake=turn["mistake"]), observation)


def trajectory_files(folder: Path | str, split: str) -> list[Path]:
    """The files of a split (train or validation) in order. Raises FileNotFoundError."""
    files = sorted(Path(folder).glob(f"{split}-*-of-*.parquet"))
    if not files:
        raise FileNotFoundError(
            f"no {split}-*.parquet in {folder}; make the data first: python -m tasks.cold_start"
        )
    return files


def iter_trajectories(folder: Path | str, split: str) -> Iterator[Demonstration]:
    """All trajectories of a split (train or validation), in file order, a batch of rows in memory at a
    time.
    """
    for path in trajectory_files(folder, split):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=512):
                yield from map(demonstration_of, batch.to_pylist())


def load_items(path: Path | str) -> list[Prompt]:
    """The questions of an item file (validation_items.parquet, test_items.parquet)."""
    return [prompt_of(row) for row in pq.read_table(path).to_pylist()]
