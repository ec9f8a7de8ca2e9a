"""Risks: an export that others read differently, or that does not come back as it went out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pyarrow.parquet as pq
import pytest

from environments.base import ScriptedTurn
from environments.vsp.expert import Demonstration, Kind, Step
from models.agent_format import parse_turn
from models.config import AgentConfig
from tasks.export import ExportError, export
from tasks.schema import trajectory_row
from tests.tasks.small_data import DATA, SmallData, build_small_data, without_id
from tools.base import ToolCall
from tools.executor import ToolExecutor

AGENT = AgentConfig()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_small_data(tmp_path_factory.mktemp("export") / "cold_start")


@pytest.mark.parametrize("form", ["openai", "sharegpt"])
def test_what_goes_out_comes_back_the_same(small: SmallData, tmp_path: Path, form: str) -> None:
    file, count = export(small.shown, form, "train", tmp_path / "out", AGENT)
    assert count == len(small.rows)
    reading = small.read(file)
    assert reading.problems == ()
    assert list(map(without_id, reading.rows)) == list(map(without_id, small.rows))
    assert {Kind(row["kind"]) for row in reading.rows} == set(Kind)
    assert len({row["trajectory_id"] for row in reading.rows}) == count


@pytest.mark.parametrize("form", ["openai", "sharegpt"])
def test_the_picture_of_an_observation_comes_back(small: SmallData, tmp_path: Path, form: str) -> None:
    shown = next(each for each in small.shown if each.kind == Kind.CLEAN)
    call = ToolCall("CROP", {"box": [0, 0, 64, 64]})
    seen = ToolExecutor(small.encoder.registry, None, 5.0).run(
        call, shown.prompt.pictures[0], shown.prompt.tools
    )
    assert seen.picture is not None, seen.payload
    crop = Step(ScriptedTurn("look at a cell", call=call), seen)
    looked = Demonstration(shown.prompt, shown.kind, (crop, *shown.steps), 1.0)
    file, _ = export([looked], form, "train", tmp_path / "out", AGENT)
    (row,) = small.read(file).rows
    assert without_id(row) == without_id(trajectory_row(looked, "train", DATA.stored_pictures))
    assert row["turns"][0]["observation_image"] == seen.picture.png


def test_the_same_trajectory_has_the_same_id_in_both_formats(small: SmallData, tmp_path: Path) -> None:
    ids = [
        [
            row["trajectory_id"]
            for row in small.read(export(small.shown[:9], form, "a", tmp_path / form, AGENT)[0]).rows
        ]
        for form in ("openai", "sharegpt")
    ]
    assert ids[0] == ids[1]


def test_openai_records_are_what_the_api_takes(small: SmallData, tmp_path: Path) -> None:
    file, _ = export(small.shown[:20], "openai", "train", tmp_path / "out", AGENT)
    for record in map(json.loads, file.read_text().splitlines()):
        called: list[str] = []
        for message in record["messages"]:
            for call in message.get("tool_calls", ()):
                assert call["type"] == "function"
                assert isinstance(json.loads(call["function"]["arguments"]), dict), "text, as the API has it"
                called.append(call["id"])
            if message["role"] == "tool":
                assert message["tool_call_id"] == called[-1]
        assert len(set(called)) == len(called)
        assert all(tool["type"] == "function" and tool["function"]["parameters"] for tool in record["tools"])


def test_sharegpt_records_keep_llama_factorys_rules(small: SmallData, tmp_path: Path) -> None:
    """Human and observation at odd places, the model at even ones; as many <image> as images; JSON tools."""
    file, _ = export(small.shown[:20], "sharegpt", "train", tmp_path / "out", AGENT)
    info = json.loads((file.parent / "dataset_info.json").read_text())["toolplan_train"]
    assert info["file_name"] == file.name
    for record in map(json.loads, file.read_text().splitlines()):
        speakers = [entry["from"] for entry in record["conversations"]]
        assert set(speakers[::2]) <= {"human", "observation"}
        assert set(speakers[1::2]) <= {"gpt", "function_call"}
        marks = sum(entry["value"].count("<image>") for entry in record["conversations"])
        assert marks == len(record["images"])
        assert all((file.parent / name).is_file() for name in record["images"])
        assert {"name", "description", "parameters"} <= set(json.loads(record["tools"])[0])


def test_trl_rows_hold_the_calls_as_text_and_the_picture(small: SmallData, tmp_path: Path) -> None:
    file, count = export(small.shown, "trl", "train", tmp_path / "out", AGENT)
    table = pq.read_table(file)
    assert table.num_rows == count
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features["images"] == {"feature": {"_type": "Image"}, "_type": "List"}
    for row, shown in zip(table.to_pylist(), small.shown, strict=True):
        roles = [message["role"] for message in row["messages"]]
        assert roles[:2] == ["system", "user"]
        assert roles[2::2] == ["assistant"] * len(roles[2::2])
        assert set(roles[3::2]) <= {"tool"}
        said = [parse_turn(m["content"]) for m in row["messages"] if m["role"] == "assistant"]
        assert [each.call for each in said] == [step.turn.call for step in shown.steps]
        assert said[-1].response == shown.steps[-1].turn.response
        assert all(name in row["messages"][0]["content"] for name in shown.prompt.tools), "tools are told"
        assert [tool["function"]["name"] for tool in json.loads(row["tools"])] == list(shown.prompt.tools)
        (image,) = row["images"]
        pixels = cv2.imdecode(np.frombuffer(image["bytes"], np.uint8), cv2.IMREAD_COLOR)
        assert pixels.shape[0] == pixels.shape[1]


def test_nothing_of_the_users_is_overwritten_and_no_half_export_stays(
    small: SmallData, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(ExportError, match="not empty"):
        export(small.shown, "openai", "train", out, AGENT)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]

    def breaks():
        yield small.shown[0]
        yield replace(small.shown[1], prompt=replace(small.shown[1].prompt, tools=("NOTHING",)))

    with pytest.raises(Exception, match="no such tool"):
        export(breaks(), "sharegpt", "train", tmp_path / "half", AGENT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
