"""Risks: bad data that pass the gate, good data that do not, findings without a name, unequal reports.

The tests spoil real, freshly built data and expect the gate to name what is wrong, and where.
"""

import hashlib
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.vsp.config import ColdStartConfig
from models.config import AgentConfig
from models.demonstrations import demonstration_text, encode_demonstration
from models.encoding import Encoder
from models.tokenizer import train_tokenizer
from tasks.cold_start import build_cold_start
from tasks.gate.facts import PictureFacts, PictureReader, TurnReader, question_facts, trajectory_facts
from tasks.gate.files import read_manifest
from tasks.gate.frames import build_frames
from tasks.gate.report import GateReport
from tasks.gate.tokens import TokenCounter
from tasks.params import PROJECT_ROOT, ValidateConfig
from tasks.schema import ITEMS, TRAJECTORIES, demonstration_of, iter_trajectories
from tasks.validate import validate
from tools.base import Picture
from tools.vsp import vsp_registry

DATA = ColdStartConfig(
    n_trajectories=160,
    validation_trajectories=12,
    validation_items=12,
    test_items_per_size=2,
    shards=2,
    workers=1,
)
FIRST, SECOND = "train-00000-of-00002.parquet", "train-00001-of-00002.parquet"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gate") / "cold_start"
    build_cold_start(DATA, 0, folder)
    return folder


@pytest.fixture(scope="module")
def encoder(built: Path) -> Encoder:
    registry, agent = vsp_registry(), AgentConfig()
    texts = [demonstration_text(shown, registry, agent) for shown in iter_trajectories(built, "train")]
    return Encoder(train_tokenizer(texts, 1024), registry, agent, 0.4375)


@pytest.fixture
def data(built: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(built, tmp_path / "data"))


@pytest.fixture
def check(encoder: Encoder) -> Callable[..., GateReport]:
    def run(
        folder: Path, config: ColdStartConfig = DATA, docs: Path | None = None, **limits: Any
    ) -> GateReport:
        return validate(folder, ValidateConfig(**limits), config, encoder, docs)

    return run


def relist(folder: Path, name: str, rows: int | None = None) -> None:
    """Make the manifest agree with a changed file, so that only the change itself is found."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name]["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    if rows is not None:
        manifest["files"][name]["rows"] = rows
    path.write_text(json.dumps(manifest))


def nullable(kind: Any) -> Any:
    """A schema or type in which everything may be null, as other writers have it."""
    if isinstance(kind, pa.Schema):
        return pa.schema([pa.field(field.name, nullable(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(nullable(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, nullable(field.type)) for field in kind])
    return kind


def spoil(folder: Path, change: Callable[[list[dict[str, Any]]], object], name: str = FIRST) -> None:
    """Rewrite a file with its rows changed in place."""
    schema = nullable(ITEMS if "items" in name else TRAJECTORIES)
    rows = pq.read_table(folder / name).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / name)
    relist(folder, name, len(rows))


def failed(report: GateReport) -> set[tuple[str, str]]:
    return {(failure.frame, failure.column) for failure in report.failures}


def named(report: GateReport, key: str) -> set[str]:
    """The columns that a trajectory or one of its turns is named for."""
    return {f.column for f in report.failures for row in f.first if row.key.split(" ")[0] == key}


def text(report: GateReport) -> str:
    return "\n".join(report.lines())


def first_where(rows: list[dict[str, Any]], **wanted: str) -> dict[str, Any]:
    return next(row for row in rows if all(row[key] == value for key, value in wanted.items()))


def test_good_data_pass_and_every_frame_is_checked(built, check):
    report = check(built)
    assert report.success, text(report)
    assert {result.frame for result in report.results} == set(report.rows)
    assert report.rows["trajectories"] == 172
    assert all(count > 0 for count in report.rows.values())


def test_two_runs_write_the_same_bytes_without_times_or_paths_and_docs_of_every_suite(data, check, tmp_path):
    spoil(data, lambda rows: rows[3].update(answer=None))
    docs = tmp_path / "docs"
    first, second = (check(data, docs=docs) for _ in range(2))
    assert first.to_json() == second.to_json()
    assert str(tmp_path) not in first.to_json()
    assert json.loads(first.to_json())["failed"] > 0
    pages = [path.relative_to(docs).parts[1] for path in docs.glob("validations/**/*.html")]
    assert sorted(pages) == sorted(first.rows)
    assert (docs / "index.html").is_file()


def test_a_truncated_shard_is_named_and_the_rest_is_still_checked(data, check):
    content = (data / SECOND).read_bytes()
    (data / SECOND).write_bytes(content[: len(content) // 2])
    spoil(data, lambda rows: rows[0].update(reward=math.nan))
    report = check(data)
    assert {("files", "problem"), ("files", "has_the_listed_hash"), ("trajectories", "reward")} <= failed(
        report
    )
    assert f"{SECOND}: problem='cannot be read" in text(report)
    assert 0 < report.rows["trajectories"] < 172


def test_a_missing_an_empty_and_an_unlisted_file_are_named(data, check):
    (data / SECOND).unlink()
    (data / "validation_items.parquet").write_bytes(b"")
    shutil.copy(data / FIRST, data / "train-00009-of-00002.parquet")
    report = check(data)
    assert f"{SECOND}: problem='missing'" in text(report)
    assert "validation_items.parquet: problem='cannot be read" in text(report)
    assert "train-00009-of-00002.parquet: file=" in text(report)
    assert {("trajectories", "trajectory_id"), ("trajectories", "map_hash,question")} <= failed(report)


def test_a_broken_manifest_is_named(data, check):
    (data / "manifest.json").write_text("{", encoding="latin-1")
    report = check(data)
    assert "manifest.json: problem='not JSON'" in text(report)
    assert ("files", "is_listed") in failed(report)


@pytest.mark.parametrize("content", ["", "[]", '{"files": 1}', '{"files": {"a": 1}}', "\xff"])
def test_no_broken_manifest_stops_the_gate(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content, encoding="latin-1")
    listed, problem = read_manifest(tmp_path)
    assert not listed
    assert problem


def test_flipped_bits_are_found_by_the_hash(data, check):
    content = bytearray((data / FIRST).read_bytes())
    content[len(content) // 2] ^= 255
    (data / FIRST).write_bytes(bytes(content))
    assert ("files", "has_the_listed_hash") in failed(check(data))


def test_an_empty_table_fails(data, check):
    for name in (FIRST, SECOND, "validation-00000-of-00001.parquet"):
        spoil(data, lambda rows: rows.clear(), name)
    report = check(data)
    assert {("trajectories", ""), ("turns", ""), ("shares", "is_within")} <= failed(report)
    assert "trajectories: there are 1 to 1000000 rows: found 0" in text(report)


def test_all_null_columns_fail_each_by_name(data, check):
    columns = [name for name in TRAJECTORIES.names if name != "turns"]
    for name in (FIRST, SECOND, "validation-00000-of-00001.parquet"):
        spoil(data, lambda rows: [row.update(dict.fromkeys(columns)) for row in rows], name)
    report = check(data)
    for column in columns:
        about = f"{column} is never null or NaN"
        result = next(r for r in report.results if (r.frame, r.about) == ("trajectories", about))
        assert not result.success
        assert result.bad == 172


def test_a_reward_that_is_no_experts_reward_fails(data, check):
    wrong = [math.nan, math.inf, None, -0.1, 0.5]

    def change(rows):
        for row, reward in zip(rows, wrong, strict=False):
            row["reward"] = reward

    spoil(data, change)
    report = check(data)
    bad = {failure.about: failure.bad for failure in report.failures}
    assert bad["reward is never null or NaN"] == 2
    assert bad["rewards lie between 0 and 1: 0 to 1"] == 2
    assert bad["an expert's reward is 1"] == 3
    assert bad["the reward is what grading the response gives"] == 5


def test_a_flipped_label_is_found_from_the_map(data, check):
    ids = []

    def flip(rows):
        row = first_where(rows, task="verification")
        row["answer"] = {"Yes": "No", "No": "Yes"}[row["answer"]]
        ids.append(row["trajectory_id"])

    spoil(data, flip)
    report = check(data)
    assert failed(report) == {("trajectories", "answer_is_true"), ("trajectories", "reward_is_earned")}
    assert f"  {ids[0]}: answer=" in text(report)
    assert f"in {FIRST}" in text(report)


def test_a_null_label_is_named(data, check):
    spoil(data, lambda rows: rows[2].update(answer=None))
    report = check(data)
    assert ("trajectories", "answer") in failed(report)
    assert "answer is never null or NaN: 1 of 172 rows are bad" in text(report)


def test_held_out_maps_in_training_are_named_even_with_another_hash(data, check):
    sources = ["test_items.parquet", "validation_items.parquet", "validation-00000-of-00001.parquet"]
    leaked = [pq.read_table(data / source).to_pylist()[0] for source in sources]

    def leak(rows):
        navigation = (row for row in rows if row["task"] == "navigation")
        for row, held_out in zip(navigation, leaked, strict=False):
            row.update({key: held_out[key] for key in ("size", "map_rows", "image")})

    spoil(data, leak)
    report = check(data)
    overlap = next(f for f in report.failures if f.column == "map_is_in_no_other_group")
    assert overlap.bad == 3
    for group in ("test_items", "validation_items", "validation"):
        assert any(f"also_in='{group}'" in row.value for row in overlap.first)
    assert ("trajectories", "map_hash_is_right") in failed(report)


def test_a_question_asked_twice_is_named(data, check):
    def repeat(rows):
        rows[1] = rows[0] | {"trajectory_id": "copy"}

    spoil(data, repeat)
    report = check(data)
    assert ("trajectories", "map_hash,question") in failed(report)
    assert "  copy: map_hash=" in text(report)


def png(rgb: np.ndarray) -> bytes:
    return Picture.from_rgb(rgb).png


def crop_right(image: bytes) -> bytes:
    return png(Picture(image).rgb[:, :-64])


def test_wrong_pictures_are_named(data, check):
    changes: list[tuple[Callable[[bytes], bytes], set[str]]] = [
        (lambda image: image[: len(image) // 2], {"image_shows_the_map"}),
        (lambda image: b"GIF89a", {"image_decodes", "image_has_the_right_side", "image_shows_the_map"}),
        (crop_right, {"image_has_the_right_side", "image_shows_the_map"}),
        (lambda image: png(cv2.flip(Picture(image).rgb, 0)), {"image_shows_the_map"}),
    ]

    def change(rows):
        for row, (spoiled, _) in zip(rows[::2], changes, strict=False):
            row["image"] = spoiled(row["image"])

    ids = [row["trajectory_id"] for row in pq.read_table(data / FIRST).to_pylist()[::2]]
    spoil(data, change)
    report = check(data, report_rows=50)
    for key, (_, columns) in zip(ids, changes, strict=False):
        assert columns <= named(report, key)
    assert {frame for frame, _ in failed(report)} == {"trajectories"}


WRONG_TURNS: list[tuple[dict[str, Any], set[str]]] = [
    ({"call_name": "FIND"}, {"tool_is_known", "tool_is_offered", "params_fit_the_tool"}),
    ({"call_name": "ASTAR"}, {"params_fit_the_tool"}),
    ({"call_params": "{"}, {"params_parse", "params_fit_the_tool"}),
    ({"call_params": "[1]"}, {"params_parse", "params_fit_the_tool"}),
    ({"call_params": None}, {"params_parse", "params_fit_the_tool"}),
    ({"call_params": '{"target": "water"}'}, {"params_fit_the_tool"}),
    ({"call_params": "[" * 100_000}, {"params_parse", "params_fit_the_tool", "tokens"}),
    ({"observation": "ok"}, {"observation_parses"}),
    ({"observation": None}, {"observation_parses"}),
    ({"observation": '{"error": "deadline"}'}, {"observation_is_no_error"}),
    ({"observation_image": b"?"}, {"observation_image_decodes"}),
    ({"response": "Yes"}, {"calls_or_responds", "ends_with_its_response"}),
    ({"call_name": None}, {"calls_or_responds", "params_parse", "observation_parses"}),
    ({"think": None}, {"think"}),
    ({"mistake": None}, {"mistake"}),
]


def test_wrong_turns_are_named(data, check):
    ids = []

    def change(rows):
        clean = (row for row in rows if row["kind"] == "clean")
        for row, (changes, _) in zip(clean, WRONG_TURNS, strict=False):
            row["turns"][0].update(changes)
            ids.append(row["trajectory_id"])

    spoil(data, change)
    report = check(data, report_rows=50)
    for key, (changes, columns) in zip(ids, WRONG_TURNS, strict=True):
        assert columns <= named(report, key), changes
    assert f"  {ids[0]} turn 1: call_name='FIND'" in text(report)


WRONG_ENDS: list[Callable[[list[Any]], object]] = [
    lambda turns: turns.pop(),
    lambda turns: turns.append(dict(turns[-1])),
    lambda turns: turns.clear(),
    lambda turns: turns.append(None),
]

WRONG_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"split": "test"}, "split"),
    ({"split": "validation"}, "split_is_right"),
    ({"kind": "lucky"}, "kind"),
    ({"task": "jigsaw"}, "task"),
    ({"size": 5}, "size"),
    ({"tools": ["POINT", "HAMMER"]}, "tools_are_known"),
    ({"tools": []}, "tools_are_known"),
    ({"tools": ["CROP"]}, "tool_is_offered"),
    ({"question": "Is it safe?"}, "question_is_asked_right"),
    ({"map_rows": ["SF", "F"]}, "map_is_valid"),
    ({"map_rows": [None]}, "map_is_valid"),
    ({"map_hash": "0" * 64}, "map_hash_is_right"),
    ({"path": "RRXD"}, "question_is_asked_right"),
]


def test_wrong_values_and_ends_are_named(data, check):
    ids = []

    def change(rows):
        for row, (changes, _) in zip(rows, WRONG_VALUES, strict=False):
            row.update(changes)
        for row, end in zip(rows[len(WRONG_VALUES) :], WRONG_ENDS, strict=False):
            end(row["turns"])
        ids.extend(row["trajectory_id"] for row in rows)

    spoil(data, change)
    report = check(data, report_rows=50)
    for key, (changes, column) in zip(ids, WRONG_VALUES, strict=False):
        assert column in named(report, key), changes
    for key in ids[len(WRONG_VALUES) :][: len(WRONG_ENDS)]:
        assert "ends_with_its_response" in named(report, key)


def test_a_missing_and_a_retyped_column_are_named(data, check):
    table = pq.read_table(data / FIRST)
    sizes = table["size"].cast(pa.string())
    table = table.set_column(table.column_names.index("size"), "size", sizes).drop_columns(["reward"])
    pq.write_table(table, data / FIRST)
    report = check(data)
    assert "column size is string, not int32; has no column reward" in text(report)
    assert {("trajectories", "size"), ("trajectories", "reward")} <= failed(report)


def test_another_encoding_of_the_same_columns_passes(data, check):
    for name in (FIRST, SECOND):
        table = pq.read_table(data / name)
        pq.write_table(table.set_column(0, "trajectory_id", table[0].cast(pa.large_string())), data / name)
        relist(data, name)
    assert check(data).success


def test_another_mix_than_asked_for_is_named(built, check):
    report = check(built, config=DATA.model_copy(update={"navigation_share": 0.8, "n_trajectories": 161}))
    assert failed(report) == {("shares", "is_within")}
    assert "  training trajectories: limits='160, wanted 161'" in text(report)
    assert "  navigation, of all: limits='0.5, wanted " in text(report)


@pytest.mark.parametrize(
    ("changes", "measure"),
    [
        ({}, ""),
        ({"tool_failure_share": 0.6}, "tool failures, of all"),
        ({"validation_items": 13}, "validation items"),
        ({"holes_share": 0.9}, "holes pointed at, of navigation without ASTAR and wrong paths"),
        ({"astar_share": 0.9}, "ASTAR offered, of all"),
        ({"other_cells_share": 0.9}, "maps with cells of another size, of all"),
        ({"reflection_1_share": 0.85}, "one wrong path, of navigation without ASTAR"),
        ({"reflection_2_share": 0.85}, "two wrong paths or more, of navigation without ASTAR"),
    ],
)
def test_each_share_of_the_mix_is_compared_with_its_own_setting(built, changes, measure):
    asked = DATA.model_copy(update=changes)
    shares = build_frames(built, asked, 0.02, vsp_registry(), PictureReader(), lambda rows: [1] * len(rows))[
        "shares"
    ]
    outside = list(shares.loc[~shares["is_within"], "measure"])
    assert outside == ([measure] if measure else [])


def test_a_trajectory_too_long_for_the_agent_is_named(built, check, encoder):
    lengths = [len(encode_demonstration(encoder, shown).ids) for shown in iter_trajectories(built, "train")]
    report = check(built, max_tokens=max(max(lengths) - 1, 64), max_turns=4)
    assert failed(report) == {("trajectories", "tokens"), ("trajectories", "n_turns")}
    assert f"tokens={max(lengths)}" in text(report)


def test_token_lengths_equal_the_training_sequences(built, encoder):
    shown = list(iter_trajectories(built, "train"))
    rows = [row for name in (FIRST, SECOND) for row in pq.read_table(built / name).to_pylist()]
    picture = png(np.zeros((128, 192, 3), dtype=np.uint8))
    crop = {
        "call_name": "CROP",
        "call_params": '{"box": [0, 0, 192, 128]}',
        "observation": '{"size": [192, 128]}',
    }
    turn = rows[0]["turns"][0] | crop | {"observation_image": picture}
    rows.append(rows[0] | {"turns": [turn, *rows[0]["turns"]]})
    counted = TokenCounter(encoder, PictureReader()).token_lengths(rows)
    assert counted[:-1] == [len(encode_demonstration(encoder, one).ids) for one in shown]
    assert counted[-1] == len(encode_demonstration(encoder, demonstration_of(rows[-1])).ids)


def test_only_the_first_bad_rows_are_shown_and_all_are_counted(data, check):
    spoil(data, lambda rows: [row.update(kind="lucky") for row in rows])
    failure = next(f for f in check(data, report_rows=2).failures if f.column == "kind")
    assert failure.bad == 80
    assert len(failure.first) == 2


TURN_FIELDS = TRAJECTORIES.field("turns").type.value_type
JUNK = st.one_of(
    st.none(), st.text(max_size=8), st.sampled_from(["{}", '{"target": "start"}', "POINT", "Yes", "LR"])
)


@given(st.data())
def test_facts_about_any_row_are_found_without_raising(drawn):
    turn = st.one_of(
        st.none(),
        st.fixed_dictionaries(
            {field.name: JUNK for field in TURN_FIELDS}
            | {
                "observation_image": st.one_of(st.none(), st.binary(max_size=9)),
                "mistake": st.sampled_from([None, True]),
            }
        ),
    )
    row = drawn.draw(
        st.fixed_dictionaries(
            {field.name: JUNK for field in TRAJECTORIES}
            | {
                "task": st.sampled_from([None, "navigation", "verification", "x"]),
                "tools": st.one_of(st.none(), st.lists(JUNK, max_size=3)),
                "map_rows": st.one_of(st.none(), st.lists(JUNK, max_size=3), st.just(["SF", "HG"])),
                "size": st.one_of(st.none(), st.integers(-1, 9)),
                "reward": st.one_of(st.none(), st.floats()),
                "turns": st.one_of(st.none(), st.lists(turn, max_size=3)),
            }
        )
    )
    read = TurnReader(vsp_registry(), PictureReader())
    facts = question_facts(row, PictureFacts(), vsp_registry(), "train") | trajectory_facts(row, 0)
    for one in row["turns"] or ():
        facts |= read(one, row["tools"])
    assert all(value is None or isinstance(value, bool | int | float | str) for value in facts.values())


def test_a_missing_folder_is_one_line(encoder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*python -m tasks.cold_start") as caught:
        validate(tmp_path / "nowhere", ValidateConfig(), DATA, encoder, tmp_path / "docs")
    assert "\n" not in str(caught.value)


def test_the_command_fails_with_a_line_per_finding_and_two_processes_agree(data, encoder, tmp_path):
    project = tmp_path / "project"
    for name in ("tools", "environments", "models", "tasks", "profiles", "mlflow"):
        shutil.copytree(PROJECT_ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(PROJECT_ROOT / name, project)
    encoder.tokenizer.save_pretrained(project / "data/tokenizer")
    spoil(data, lambda rows: rows[0].update(reward=math.nan))
    shutil.copytree(data, project / "data/cold_start")
    reports = []
    for arguments, code in ([], 1), (["--warn-only"], 0):
        command = [sys.executable, "-m", "tasks.validate", *arguments]
        run = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=300)
        assert run.returncode == code, run.stderr
        assert "reward is never null or NaN: 1 of 172 rows are bad" in run.stderr
        assert "training trajectories: limits='160, wanted 33000'" in run.stderr
        assert "Traceback" not in run.stderr
        # All that DVC versions; Data Docs, which hold times, lie elsewhere.
        assert [path.name for path in (project / "outputs/validation").iterdir()] == ["report.json"]
        reports.append((project / "outputs/validation/report.json").read_bytes())
    assert reports[0] == reports[1]
    (project / "data/tokenizer").rename(project / "data/elsewhere")
    run = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1
    assert run.stderr == "error: no folder data/tokenizer: make it first with `python -m tasks.cold_start`\n"
