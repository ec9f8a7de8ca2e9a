"""The cold start: the same bytes whoever builds it, no map in two splits, every observation a real one."""

import errno
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from environments.vsp.config import ColdStartConfig
from environments.vsp.expert import WRONG_PATHS
from environments.vsp.maps import GridMap, Split, split_of
from environments.vsp.plan import PlanError
from environments.vsp.prompts import BASE_TOOLS, VSP, map_of
from environments.vsp.render import Renderer
from environments.vsp.world import is_safe
from tasks import cold_start
from tasks.cold_start import ColdStartError, build_cold_start
from tasks.params import load_params
from tasks.schema import ITEMS, TRAJECTORIES, iter_trajectories, load_items
from tools.executor import ToolExecutor
from tools.vsp import vsp_registry

CONFIG = ColdStartConfig(
    n_trajectories=360,
    validation_trajectories=24,
    validation_items=20,
    test_items_per_size=4,
    shards=3,
    workers=1,
)
SEED = 11
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "cold_start"
    return folder, build_cold_start(CONFIG, SEED, folder)


@pytest.fixture(scope="module")
def train(built):
    return list(iter_trajectories(built[0], "train"))


def _hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_two_builds_with_different_workers_have_the_same_bytes(built, tmp_path):
    build_cold_start(CONFIG.model_copy(update={"workers": 3}), SEED, tmp_path / "again")
    assert _hashes(tmp_path / "again") == _hashes(built[0])


def test_another_seed_gives_other_data(built, tmp_path):
    tiny = CONFIG.model_copy(update={"n_trajectories": 6})
    first, second = (build_cold_start(tiny, seed, tmp_path / str(seed)) for seed in (1, 2))
    assert first["files"] != second["files"]


def test_no_map_is_in_two_splits_and_each_is_in_the_one_of_its_hash(built, train):
    folder = built[0]
    maps = {
        "train": {d.prompt.hidden["map_hash"] for d in train},
        "validation": {d.prompt.hidden["map_hash"] for d in iter_trajectories(folder, "validation")},
        "validation_items": {p.hidden["map_hash"] for p in load_items(folder / "validation_items.parquet")},
        "test_items": {p.hidden["map_hash"] for p in load_items(folder / "test_items.parquet")},
    }
    for one, other in itertools.combinations(maps, 2):
        assert not maps[one] & maps[other]
    for name, hashes in maps.items():
        assert {split_of(map_hash) for map_hash in hashes} == {Split(name.removesuffix("_items"))}


def test_no_map_and_question_occur_twice(built, train):
    prompts = [d.prompt for d in train] + load_items(built[0] / "test_items.parquet")
    asked = Counter((p.hidden["map_hash"], p.question) for p in prompts)
    assert max(asked.values()) == 1
    assert len({p.prompt_id for p in prompts}) == len(prompts)


def test_every_stored_observation_is_what_the_tool_says_now(train):
    executor = ToolExecutor(vsp_registry(), None, 60.0)
    calls = 0
    for shown in train[::4]:
        for step in shown.steps:
            if step.turn.call is not None:
                again = executor.run(step.turn.call, shown.prompt.pictures[0], shown.prompt.tools)
                assert again.to_json() == step.observation.to_json()
                assert again.error == step.observation.error
                calls += 1
    assert calls > 200


def test_every_picture_is_the_map_of_its_row(built, train):
    renderer, sides = Renderer(), (None, *CONFIG.other_cells_px)
    for prompt in [d.prompt for d in train[::20]] + load_items(built[0] / "test_items.parquet")[::5]:
        assert prompt.pictures[0] in [renderer.render(map_of(prompt), cell_px) for cell_px in sides]
        assert GridMap(tuple(prompt.hidden["map_rows"])).sha256 == prompt.hidden["map_hash"]


def test_every_trajectory_ends_with_one_right_response(train):
    environment = VSP()
    for shown in train:
        *calls, last = shown.steps
        assert all(step.turn.call is not None and step.turn.response is None for step in calls)
        assert last.turn.call is None
        assert environment.grade(shown.prompt, last.turn.response)
        assert shown.reward == 1.0


def test_shares_are_close_to_the_parameters(tmp_path):
    config = ColdStartConfig(n_trajectories=4000)
    plans = [
        plan for file in cold_start.plan_files(config, 3) if file.split is Split.TRAIN for plan in file.maps
    ]
    questions = [question for plan in plans for question in plan.questions]
    assert len(questions) == 4000
    navigation = [q for q in questions if q.task == "navigation"]
    plain = [q for q in navigation if q.tools == BASE_TOOLS]
    kinds = Counter(q.kind for q in plain)
    assert len(navigation) == 2000
    assert len(plain) / len(navigation) == pytest.approx(1 - config.astar_share, abs=0.04)
    assert kinds["reflection_1"] / len(plain) == pytest.approx(config.reflection_1_share, abs=0.04)
    assert kinds["reflection_2"] / len(plain) == pytest.approx(config.reflection_2_share, abs=0.04)
    at_once = [q for q in plain if q.kind not in WRONG_PATHS]
    assert sum(q.point_holes for q in at_once) / len(at_once) == pytest.approx(config.holes_share, abs=0.04)
    assert sum(q.kind == "tool_failure" for q in questions) / 4000 == pytest.approx(
        config.tool_failure_share, abs=0.02
    )
    sizes = Counter(plan.grid.size for plan in plans)
    assert set(sizes) == {4, 6, 8}
    assert max(sizes.values()) - min(sizes.values()) <= 1
    sides = Counter(plan.cell_px for plan in plans)
    assert 1 - sides[None] / len(plans) == pytest.approx(config.other_cells_share, abs=0.04)
    assert set(sides) == {None, *config.other_cells_px}


def test_the_coordinates_that_training_shows_are_too_many_to_learn_by_heart():
    """With 52 and with 85 different ones a policy learned them, and read 476 at 9×9 as one that it knew."""
    data = load_params().data
    sides = {64, *data.other_cells_px}
    assert len({side * (2 * index + 1) // 2 for side in sides for index in range(max(data.sizes))}) > 150


def test_questions_to_be_answered_are_drawn_as_the_published_ones(built):
    renderer = Renderer()
    for name in ("validation_items", "test_items"):
        for prompt in load_items(built[0] / f"{name}.parquet"):
            assert renderer.render(map_of(prompt)) == prompt.pictures[0]


def test_verification_is_balanced_at_every_size_and_length():
    plans = [
        f for f in cold_start.plan_files(ColdStartConfig(n_trajectories=4000), 3) if f.split is Split.TRAIN
    ]
    counts: Counter = Counter()
    for plan in (plan for file in plans for plan in file.maps):
        for question in plan.questions:
            if question.task == "verification":
                counts[plan.grid.size, len(question.path), is_safe(plan.grid, question.path)] += 1
    assert len(counts) == 3 * 9 * 2
    assert max(counts.values()) - min(counts.values()) <= 2


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("per_map", [1, 4])
def test_any_share_and_questions_per_map_give_the_asked_numbers(share, per_map):
    config = CONFIG.model_copy(
        update={"navigation_share": share, "trajectories_per_map": per_map, "shards": 4}
    )
    files = [file for file in cold_start.plan_files(config, 5) if file.split is Split.TRAIN]
    questions = [q for file in files for plan in file.maps for q in plan.questions]
    assert len(files) == 4
    assert len(questions) == 360
    assert sum(q.task == "navigation" for q in questions) == round(360 * share)
    assert max(Counter(p.grid.sha256 for f in files for p in f.maps).values()) == 1


def test_test_items_hold_both_tasks_at_every_size(built):
    counts = Counter((p.hidden["size"], p.task) for p in load_items(built[0] / "test_items.parquet"))
    assert counts == {(size, task): 4 for size in range(3, 10) for task in ("navigation", "verification")}


def test_the_manifest_tells_what_is_there(built):
    folder, manifest = built
    assert json.loads((folder / "manifest.json").read_text()) == manifest
    assert {n: f["sha256"] for n, f in manifest["files"].items()} | {"manifest.json": None} == _hashes(
        folder
    ) | {"manifest.json": None}
    assert manifest["splits"]["train"]["rows"] == 360
    assert sum(manifest["splits"]["train"]["by_kind"].values()) == 360
    for name, file in manifest["files"].items():
        table = pq.read_table(folder / name)
        assert table.num_rows == file["rows"]
        assert table.schema.equals(ITEMS if "items" in name else TRAJECTORIES)


def test_trajectories_of_one_map_share_its_picture(built):
    file = pq.ParquetFile(built[0] / "train-00000-of-00003.parquet")
    column = next(
        c
        for i in range(file.metadata.num_columns)
        if (c := file.metadata.row_group(0).column(i)).path_in_schema == "image"
    )
    images = pq.read_table(built[0] / "train-00000-of-00003.parquet", columns=["image"])["image"].to_pylist()
    assert len(set(images)) <= len(images) / 2 + 1
    assert column.total_uncompressed_size < 1.05 * sum(map(len, set(images))) + 4096


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cold_start.pq, "write_table", full)
    with pytest.raises(OSError, match=r"No space left.*cold_start"):
        build_cold_start(CONFIG, SEED, tmp_path / "data" / "cold_start")
    assert list((tmp_path / "data").iterdir()) == []


def test_a_failed_build_keeps_the_older_data(built, tmp_path, monkeypatch):
    folder = tmp_path / "cold_start"
    tiny = CONFIG.model_copy(update={"n_trajectories": 6, "test_items_per_size": 1})
    build_cold_start(tiny, 1, folder)
    before = _hashes(folder)
    with pytest.raises(PlanError, match="no new test map of size 3"):
        build_cold_start(tiny.model_copy(update={"test_items_per_size": 5000, "test_sizes": (3,)}), 1, folder)
    assert _hashes(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["cold_start"]


def test_a_folder_with_other_things_is_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ColdStartError, match="something other"):
        build_cold_start(CONFIG, SEED, tmp_path)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_killed_build_shows_no_half_result_and_leaves_no_process(tmp_path, number):
    code = (
        "import signal, sys; from pathlib import Path\n"
        "from environments.vsp.config import ColdStartConfig; from tasks.cold_start import build_cold_start\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"    build_cold_start(ColdStartConfig(test_items_per_size=1), 1, Path({str(tmp_path / 'out')!r}))\n"
    )
    script = tmp_path / "build.py"
    script.write_text(code)
    process = subprocess.Popen(
        [sys.executable, script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.partial/*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.wait(30)
    while _group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _group_lives(process.pid)
    assert not (tmp_path / "out").exists()
    assert number == signal.SIGKILL or not list(tmp_path.glob(".out*"))


def _group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reflection_1_share": 0.9, "reflection_2_share": 0.3}, "lower them to 1"),
        ({"sizes": (4, 10)}, "from 3 to 9"),
        ({"test_sizes": (3, 3)}, "different numbers"),
        ({"path_lengths": (0,)}, "path_lengths"),
        ({"n_trajectories": 10, "shards": 16}, "lower shards"),
        ({"n_trajectorys": 10}, "n_trajectorys"),
    ],
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        ColdStartConfig(**change)
