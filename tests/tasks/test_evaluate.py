"""Measuring a model by hand: the JSON that users and checks read, and one line for what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from environments.vsp.benchmark import BenchmarkError
from tasks.evaluate import _sample, evaluate_model, item_rows
from tasks.evaluation_report import ITEM_COLUMNS
from tasks.params import PROJECT_ROOT, Params, load_params, override
from tests.models.policies import small_policy, some_prompts

SAMPLE = PROJECT_ROOT.parent / "shared" / "vsp_sample"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    small_policy().save(folder)
    return folder


@pytest.fixture(scope="module")
def params() -> Params:
    return override(load_params(), {"agent.max_tokens": 160, "rollout.slots": 32})


@pytest.mark.skipif(not SAMPLE.is_dir(), reason="the benchmark's sample is not beside the project")
def test_a_model_on_the_benchmark_gives_the_promised_json(
    model: Path, params: Params, tmp_path: Path
) -> None:
    target = tmp_path / "result.json"
    evaluate_model(params, str(model), str(SAMPLE), target)
    result = json.loads(target.read_text())
    assert list(result) == ["navigation", "verification", "overall"]
    assert [result[name]["n"] for name in result] == [12, 15, 27]
    for entry in result.values():
        assert set(entry) == {"accuracy", "n", "ci95"}
        assert entry["ci95"][0] <= entry["accuracy"] <= entry["ci95"][1]


def test_a_missing_benchmark_is_one_line(model: Path, params: Params, tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="does not exist"):
        evaluate_model(params, str(model), str(tmp_path / "nowhere"), None)


def test_items_have_the_columns_that_reports_read(params: Params, model: Path) -> None:
    from models.policy import load_policy
    from tasks.evaluate import run_episodes
    from tools.vsp import vsp_registry

    policy = load_policy(model, params.policy, params.agent, vsp_registry())
    told: list[int] = []
    trajectories = run_episodes(policy, some_prompts(4), params, told.append)
    assert told == [1, 2, 3, 4], "progress is not shown per episode"
    assert tuple(item_rows("held_out", "grpo", trajectories).columns) == ITEM_COLUMNS
    assert len(_sample(trajectories, 2)) == 2
    assert len(_sample(trajectories, 100)) == 4
