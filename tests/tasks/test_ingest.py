"""Risks: bad lines that get in, good ones that do not, a file half added, a gate or a stage that does not notice."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow.parquet as pq
import pytest

from environments.vsp.expert import Kind
from environments.vsp.maps import GridMap, Split, random_map, split_of
from environments.vsp.render import Renderer
from tasks.cold_start import ColdStartError, build_cold_start
from tasks.conversations import openai_messages, sharegpt
from tasks.conversations.pictures import data_url
from tasks.dvc_graph import out_of_date
from tasks.ingest import IngestError, add_rows, check_file, known_trajectories
from tasks.ingested import ingested_parts
from tasks.params import Params, ValidateConfig, load_params, override
from tasks.schema import iter_trajectories
from tasks.validate import validate
from tests.tasks.small_data import DATA, SmallData, build_small_data, without_id, write_lines
from tests.tasks.small_pipeline import ENV, calls, commit, dvc, git, make_small_pipeline
from tools.base import Picture

Record = dict[str, Any]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_small_data(tmp_path_factory.mktemp("ingest") / "cold_start")


@pytest.fixture(scope="module")
def records(small: SmallData) -> list[Record]:
    """Some trajectories as OpenAI messages, one of each kind first."""
    chosen = [next(each for each in small.shown if each.kind == kind) for kind in Kind]
    return [openai_messages.write(each, small.encoder.registry) for each in (*chosen, *small.shown[:6])]


def reasons(small: SmallData, folder: Path, lines: list[Any], **limits: Any) -> dict[int, str]:
    reading = small.read(write_lines(folder / "data.jsonl", lines), ValidateConfig(**limits))
    return {problem.line: problem.reason for problem in reading.problems}


def picture_of(split: Split, size: int) -> Picture:
    import random

    rng = random.Random(0)
    while split_of((grid := random_map(rng, size, 0.2)).sha256) is not split:
        pass
    return Renderer().render(GridMap(grid.rows))


def set_picture(record: Record, url: str) -> None:
    record["messages"][0]["content"][0]["image_url"]["url"] = url


def call_of(record: Record) -> Record:
    return record["messages"][1]["tool_calls"][0]


MESSAGE_CHANGES: list[tuple[str, Callable[[Record], object]]] = [
    ("does not end with an answer", lambda r: r["messages"].pop()),
    ("has no observation", lambda r: r["messages"].pop(2)),
    ("observation without a call", lambda r: r["messages"].pop(1)),
    ("goes on after the answer", lambda r: r["messages"].append(r["messages"][-1])),
    ("second question", lambda r: r["messages"].insert(3, r["messages"][0])),
    ("speaks before the question", lambda r: r["messages"].pop(0)),
    ("asks no question", lambda r: r.update(messages=[])),
    ("must be a list of objects", lambda r: r.update(messages="hello")),
    ("unknown role 'robot'", lambda r: r["messages"][0].update(role="robot")),
    ("one call per turn", lambda r: r["messages"][1]["tool_calls"].append(call_of(r))),
    ("not valid JSON", lambda r: call_of(r)["function"].update(arguments="{target: start}")),
    ("not valid JSON", lambda r: call_of(r)["function"].update(arguments='{"target": NaN}')),
    ("neither an object nor", lambda r: call_of(r)["function"].update(arguments=[1])),
    ("no name", lambda r: call_of(r)["function"].pop("name")),
    ("LOOK fails", lambda r: call_of(r)["function"].update(name="LOOK")),
    ("is not offered", lambda r: call_of(r)["function"].update(name="LOOK")),
    ("POINT fails (target:", lambda r: call_of(r)["function"].update(arguments={"target": "sky"})),
    ("POINT returns", lambda r: r["messages"][2].update(content='{"coordinates": [1, 1]}')),
    ("not valid JSON", lambda r: r["messages"][2].update(content="at the left")),
    ("a list, not a JSON object", lambda r: r["messages"][2].update(content="[1]")),
    ("tool_call_id", lambda r: r["messages"][2].update(tool_call_id="other")),
    ("is wrong on the map", lambda r: r["messages"][-1].update(content="LLLLLLLLLLLL")),
    ("one thought, then one call", lambda r: r["messages"][-1].update(content="<response>R</response> or U")),
    ("could forge a tag", lambda r: r["messages"][1].update(content="a < b")),
    ("no tool here", lambda r: r.update(tools=[{"type": "function", "function": {"name": "LOOK"}}])),
    ("VSP's questions are", lambda r: r["messages"][0]["content"][1].update(text="Where is the goal?")),
    ("0 pictures", lambda r: r["messages"][0]["content"].pop(0)),
    ("is not an image", lambda r: set_picture(r, "data:image/png;base64,aGVsbG8=")),
    ("base64 is broken", lambda r: set_picture(r, "data:image/png;base64,a")),
    ("no such file", lambda r: set_picture(r, "missing.png")),
    ("not downloaded", lambda r: set_picture(r, "https://example.org/a.png")),
    (
        "no map can be read",
        lambda r: set_picture(r, data_url(Picture.from_rgb(np.zeros((64, 64, 3), np.uint8)))),
    ),
    ("the test split", lambda r: set_picture(r, data_url(picture_of(Split.TEST, 4)))),
    ("the validation split", lambda r: set_picture(r, data_url(picture_of(Split.VALIDATION, 4)))),
    ("data.sizes has 4, 6, 8", lambda r: set_picture(r, data_url(picture_of(Split.TRAIN, 5)))),
    ("neither messages (OpenAI) nor", lambda r: r.pop("messages")),
    (
        "function_call is the old form",
        lambda r: r["messages"][1].update(tool_calls=[], function_call={"name": "A"}),
    ),
]


@pytest.mark.parametrize(("reason", "change"), MESSAGE_CHANGES, ids=[reason for reason, _ in MESSAGE_CHANGES])
def test_a_bad_record_is_named_with_line_and_reason(
    small: SmallData, records: list[Record], tmp_path: Path, reason: str, change: Callable[[Record], object]
) -> None:
    bad = copy.deepcopy(records[0])
    change(bad)
    found = reasons(small, tmp_path, [records[1], "", bad, records[2]])
    assert list(found) == [3], found
    assert reason in found[3]
    assert "\n" not in found[3]


def test_a_bad_line_is_named(small: SmallData, records: list[Record], tmp_path: Path) -> None:
    lines = [b"\xff\xfe", '{"messages": ', "[1, 2]", "7", "[" * 3000, records[0], records[1], records[0]]
    found = reasons(small, tmp_path, lines)
    assert sorted(found) == [1, 2, 3, 4, 5, 8]
    assert "UTF-8" in found[1]
    assert "jq -c" in found[3]
    assert found[8] == "the same trajectory is in line 6"


def test_sharegpt_lines_are_checked_too(small: SmallData, tmp_path: Path) -> None:
    shown = small.shown[0]
    good = sharegpt.write(shown, small.encoder.registry, data_url)

    def changed(**changes: Any) -> Record:
        return copy.deepcopy(good) | changes

    entries = good["conversations"]
    assert reasons(small, tmp_path, [good]) == {}
    lines = [
        changed(images=[]),
        changed(images=good["images"] * 2),
        changed(tools="[{"),
        changed(conversations=entries[:-1]),
        changed(conversations=[{"from": "alien", "value": ""}]),
        changed(conversations=[entries[0], {"from": "function_call", "value": "POINT"}]),
        changed(conversations=[{"from": "human", "value": None}]),
    ]
    found = reasons(small, tmp_path, lines)
    wanted = (
        "more <image>",
        "fewer <image>",
        "tools: not",
        "end with",
        "'alien'",
        "not valid JSON",
        "must be text",
    )
    assert len(found) == len(wanted)
    for reason, text in zip(found.values(), wanted, strict=True):
        assert text in reason


def test_other_ways_of_writing_the_same_are_understood(
    small: SmallData, records: list[Record], tmp_path: Path
) -> None:
    """Arguments as an object, reasoning_content, a system message, pictures as files, JSON text for tools."""
    plain = small.read(write_lines(tmp_path / "plain.jsonl", records)).rows
    picture = records[0]["messages"][0]["content"][0]["image_url"]["url"].partition(",")[2]
    (tmp_path / "a map.png").write_bytes(base64.b64decode(picture))
    other = copy.deepcopy(records[0])
    for message in other["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            message["reasoning_content"] = message["content"].removeprefix("<think>").removesuffix("</think>")
            message["content"] = None
    question = other["messages"][0]["content"]
    other["messages"][0]["content"] = [{"type": "image"}, question[1]]
    other["messages"].insert(0, {"role": "system", "content": "You are a planner."})
    answer = other["messages"][-1]["content"]
    other["messages"][-1]["content"] = answer.replace("<response>", "").replace("</response>", "")
    other |= {"images": ["a map.png"], "tools": json.dumps(other["tools"])}
    (row,) = small.read(write_lines(tmp_path / "other.jsonl", [other])).rows
    assert row == plain[0]


def test_a_lossy_picture_is_read_or_refused_but_never_misread(
    small: SmallData, records: list[Record], tmp_path: Path
) -> None:
    good = small.read(write_lines(tmp_path / "good.jsonl", records[:1])).rows[0]
    pixels = cv2.imdecode(np.frombuffer(good["image"], np.uint8), cv2.IMREAD_COLOR)
    record = copy.deepcopy(records[0])
    (tmp_path / "map.webp").write_bytes(
        cv2.imencode(".webp", pixels, [cv2.IMWRITE_WEBP_QUALITY, 101])[1].tobytes()
    )
    set_picture(record, "map.webp")
    (row,) = small.read(write_lines(tmp_path / "lossless.jsonl", [record])).rows
    assert row["image"].startswith(b"\x89PNG"), "stored as PNG, which tools need"
    assert row["trajectory_id"] == good["trajectory_id"], "another encoding is still the same trajectory"


def test_limits_of_turns_and_tokens_are_the_gates(
    small: SmallData, records: list[Record], tmp_path: Path
) -> None:
    found = reasons(small, tmp_path, records[:1], max_tokens=64, max_turns=2)
    assert "gate.max_tokens is 64" in found[1]
    assert "gate.max_turns" in reasons(small, tmp_path, records[:1], max_turns=2)[1]


@pytest.fixture(scope="module")
def rows(small: SmallData, records: list[Record], tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    reading = small.read(write_lines(tmp_path_factory.mktemp("rows") / "data.jsonl", records[:4]))
    assert not reading.problems
    return list(reading.rows)


def part_of(rows: list[Record], folder: Path) -> Path:
    import pyarrow as pa

    from tasks.schema import TRAJECTORIES

    path = folder / "part.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=TRAJECTORIES), path)
    return path


def test_the_experts_files_keep_their_bytes_and_the_gate_shows_the_share(
    small: SmallData, rows: list[Record], tmp_path: Path
) -> None:
    folder = tmp_path / "cold_start"
    manifest = build_cold_start(DATA, 0, folder, ingested=[part_of(rows, tmp_path)])
    for path in small.folder.glob("*.parquet"):
        assert (folder / path.name).read_bytes() == path.read_bytes()
    assert manifest["splits"]["ingested"]["rows"] == 4
    assert manifest["splits"]["train"]["rows"] == 160
    assert len(list(iter_trajectories(folder, "train"))) == 164, "training reads them"
    report = validate(folder, ValidateConfig(), DATA, small.encoder, None)
    assert report.success, report.lines()
    assert "4 ingested" in report.lines()[0]
    assert "2.3% of the trajectories are ingested" in report.lines()[0]
    plain = validate(small.folder, ValidateConfig(), DATA, small.encoder, None)
    assert "ingested" not in plain.to_json(), "without them the report has the bytes it always had"


def test_the_gate_names_a_bad_ingested_row(small: SmallData, rows: list[Record], tmp_path: Path) -> None:
    bad = copy.deepcopy(rows)
    bad[2]["turns"][-1]["response"] = "U"
    build_cold_start(DATA, 0, tmp_path / "cold_start", ingested=[part_of(bad, tmp_path)])
    report = validate(tmp_path / "cold_start", ValidateConfig(), DATA, small.encoder, None)
    (failure,) = report.failures
    assert (failure.frame, failure.column) == ("ingested", "reward_is_earned")
    assert failure.first[0].key == bad[2]["trajectory_id"]
    (tmp_path / "part.parquet").write_bytes(b"x")
    with pytest.raises(ColdStartError, match="dvc checkout"):
        build_cold_start(DATA, 0, tmp_path / "again", ingested=[tmp_path / "part.parquet"])
    assert not (tmp_path / "again").exists()


@pytest.fixture(scope="module")
def params() -> Params:
    return override(load_params(), {"data": DATA.model_dump(mode="json")})


def test_what_is_there_already_is_not_added_again(
    small: SmallData, records: list[Record], rows: list[Record], params: Params, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    small.encoder.tokenizer.save_pretrained(tokenizer)
    file = write_lines(tmp_path / "data.jsonl", records[:4])
    reading = check_file(file, params, small.folder, tokenizer, tmp_path / "ingested")
    assert len(reading.problems) == 4
    assert all("in the cold start (train-" in problem.reason for problem in reading.problems)
    part = tmp_path / "ingested" / "mine.parquet"
    part.parent.mkdir()
    shutil.copy(part_of(rows, tmp_path), part)
    assert known_trajectories(tmp_path / "none", part.parent) == {}, (
        "not tracked: left by an ingest that was killed"
    )
    part.with_name("mine.parquet.dvc").write_text("")
    reading = check_file(file, params, tmp_path / "none", tokenizer, part.parent)
    assert {problem.reason for problem in reading.problems} == {"the same trajectory is in mine.parquet"}
    with pytest.raises(IngestError, match="dvc pull"):
        check_file(file, params, small.folder, tmp_path / "none", part.parent)


def test_a_new_version_reruns_the_cold_start_and_all_after_it_and_travels_with_dvc(
    rows: list[Record], tmp_path: Path
) -> None:
    project = make_small_pipeline(tmp_path / "project")
    stages = calls(project)
    assert out_of_date(project, ENV) == {}
    part = add_rows(rows, "My Data (1)", project / "data" / "ingested")
    assert part.name.startswith("my-data-1-")
    assert set(out_of_date(project, ENV)) == {"cold_start"}
    untracked = git(project, "status", "--short", "--untracked-files=all").split()[1::2]
    assert sorted(untracked) == ["data/ingested/.gitignore", f"data/ingested/{part.name}.dvc"]
    dvc(project, "repro")
    assert calls(project) == stages
    commit(project, "own data")
    dvc(project, "remote", "add", "-d", "storage", str(tmp_path / "remote"))
    dvc(project, "push")
    git(tmp_path, "clone", "--quiet", str(project), "clone")
    shutil.copy(project / ".dvc" / "config", tmp_path / "clone" / ".dvc" / "config")
    dvc(tmp_path / "clone", "pull")
    assert out_of_date(tmp_path / "clone", ENV) == {}
    (there,) = ingested_parts(tmp_path / "clone" / "data" / "ingested")
    assert hashlib.sha256(there.read_bytes()).digest() == hashlib.sha256(part.read_bytes()).digest()
    assert [without_id(row) for row in pq.read_table(there).to_pylist()] == [without_id(row) for row in rows]


def test_a_refusal_of_dvc_leaves_nothing(rows: list[Record], tmp_path: Path) -> None:
    with pytest.raises(IngestError, match="dvc add: "):
        add_rows(rows, "mine", tmp_path / "no-repository" / "ingested")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
