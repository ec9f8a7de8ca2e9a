"""Risks of an estimate: wrong by orders of magnitude, from another policy's record, slow, or in the way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from models.config import PolicyConfig
from models.memory import parameter_count
from models.policy import tiny_config
from tasks.estimate import (
    Cost,
    config_text,
    differences,
    duration,
    estimate,
    plan_text,
    read_cost,
    work,
)
from tasks.params import PROJECT_ROOT, Params, config_hash, load_params, override
from tasks.policy_size import parameters_of
from tasks.tracking import stage_run
from tests.models.policies import SMALL, small_policy
from tests.models.test_large_policies import QWEN_7B


def record(root: Path, stage: str, cost: Cost) -> None:
    file = root / "outputs" / ".runs" / f"{stage}.cost.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(vars(cost)))


def test_weights_are_counted_as_in_the_real_network(tmp_path: Path, params: Params) -> None:
    tokenizer = small_policy().encoder.tokenizer
    for sizes in (SMALL, params.policy):
        exact = parameter_count(tiny_config(sizes, tokenizer))
        counted = parameters_of(sizes.model_copy(update={"vocab_size": len(tokenizer)}))
        assert counted == pytest.approx(exact, rel=0.01)
    QWEN_7B.save_pretrained(tmp_path)
    assert parameters_of(PolicyConfig(checkpoint=str(tmp_path))) == pytest.approx(
        parameter_count(QWEN_7B), rel=0.01
    )
    named = parameters_of(PolicyConfig(checkpoint="Qwen/Qwen2.5-VL-7B-Instruct"))
    assert named == pytest.approx(parameter_count(QWEN_7B), rel=0.01)


def test_the_formula_tells_minutes_from_days(params: Params, tmp_path: Path) -> None:
    """docs/results.md: a whole run of the laptop takes 24 minutes."""
    stages = ("cold_start", "validate", "sft", "baseline", "grpo", "evaluate", "promote")
    total = sum(estimate(stage, params, tmp_path).seconds for stage in stages)
    assert 600 < total < 6000
    large = sum(estimate(stage, load_params(profile="a100x8"), tmp_path).seconds for stage in stages)
    assert 3600 < large < 30 * 86400
    assert estimate("a stage of yours", params, tmp_path).seconds < 60


def test_a_finished_stage_leaves_its_cost_and_a_failed_or_continued_one_does_not(
    records: Path, params: Params
) -> None:
    with pytest.raises(ValueError, match="stop"), stage_run("sft", params, records):
        raise ValueError("stop")
    assert read_cost(records, "sft") is None
    with stage_run("sft", params, records):  # goes on with the failed run
        pass
    assert read_cost(records, "sft") is None
    with stage_run("grpo", params, records):
        pass
    cost = read_cost(records, "grpo")
    assert cost is not None
    assert (cost.work, cost.profile) == (work("grpo", params), "laptop")
    assert cost.seconds > 0
    assert 50e6 < cost.memory_bytes < 50e9
    assert estimate("grpo", params, records).recorded


def test_a_record_is_scaled_by_the_work_and_never_used_for_another_policy(
    tmp_path: Path, params: Params
) -> None:
    cost = Cost(100.0, 1e9, work("sft", params), "laptop", config_hash(params, ["policy"]))
    record(tmp_path, "sft", cost)
    doubled = override(params, {"sft.epochs": 2 * params.sft.epochs})
    assert estimate("sft", doubled, tmp_path).seconds == pytest.approx(200.0)
    assert not estimate("sft", override(params, {"policy.layers": 7}), tmp_path).recorded
    assert not estimate("sft", load_params(profile="gpu"), tmp_path).recorded
    record(tmp_path, "validate", Cost(10.0, 1e9, work("validate", params), "laptop", "another"))
    assert estimate("validate", params, tmp_path).recorded, "the gate does not depend on the policy's sizes"


@pytest.mark.parametrize("content", ["", "[]", '{"seconds": 1}', "not json"])
def test_a_damaged_record_is_no_record(tmp_path: Path, params: Params, content: str) -> None:
    file = tmp_path / "outputs" / ".runs" / "sft.cost.json"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert not estimate("sft", params, tmp_path).recorded


def test_the_configuration_shows_what_the_profile_changes() -> None:
    assert differences(load_params(profile="laptop")) == {}
    changed = differences(load_params(profile="a100x8"))
    assert changed["grpo.lr"][1] == "1e-06"
    assert "seed" not in changed
    text = config_text(load_params(profile="a100x8"))
    assert f"{len(changed)} values differ from params.yaml (profile a100x8):" in text
    assert max(map(len, text.splitlines())) < 125


def test_the_plan_adds_up(tmp_path: Path, params: Params) -> None:
    text = plan_text(["sft", "promote"], params, tmp_path)
    assert text.splitlines()[-1].startswith("  together")
    assert plan_text([], params, tmp_path) == "nothing to run"
    assert [duration(s) for s in (3, 600, 7200, 259200)] == ["3 s", "10 min", "2.0 h", "3 days"]


def test_an_estimate_loads_neither_torch_nor_mlflow() -> None:
    code = (
        "import sys; from tasks.estimate import plan_text; from tasks.params import load_params\n"
        "plan_text(['sft', 'grpo'], load_params()); print({'torch', 'mlflow', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
