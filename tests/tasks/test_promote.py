"""Risks of promotion: a worse, equal, broken or incomparable model becomes champion, or a good one is lost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tasks.params import Params
from tasks.promote import PromotionError, decide, promote
from tasks.registry import RegistryError, champion_folder
from tasks.tracking import stage_run
from tasks.tracking_store import open_store, resolve_store

N = 200


def accuracy(correct: np.ndarray) -> dict[str, Any]:
    return {"accuracy": float(correct.mean()), "n": len(correct), "ci95": [0.0, 1.0]}


def evaluated(root: Path, correct: np.ndarray, weights: str, asked: bytes = b"maps") -> None:
    """Outputs of the stages before: a policy's folder, per-item results, metrics and the questions."""
    policy, evaluation, data = (
        root / "outputs" / "grpo",
        root / "outputs" / "evaluation",
        root / "data" / "cold_start",
    )
    for folder in (policy, evaluation, data):
        folder.mkdir(parents=True, exist_ok=True)
    (policy / "model.safetensors").write_text(weights)
    (data / "test_items.parquet").write_bytes(asked)
    frame = {"suite": "held_out", "policy": "grpo", "task": "navigation", "tools": "POINT", "size": 4}
    items = pd.DataFrame(
        {"prompt_id": [f"test-{n}" for n in range(len(correct))], "correct": correct}
    ).assign(**frame)
    items.to_parquet(evaluation / "items.parquet")
    summary = {name: accuracy(correct) for name in ("navigation", "verification", "overall")}
    summary["by_size"] = {"navigation": {"4": accuracy(correct)}, "verification": {}}
    summary["calls_per_episode"] = {"mean": 2.0, "ci95": [1.9, 2.1]}
    (evaluation / "metrics.json").write_text(json.dumps({"held_out": {"grpo": summary}}))


def results(good: int) -> np.ndarray:
    return np.arange(N) < good


def promoted(root: Path, params: Params) -> dict[str, Any]:
    with stage_run("promote", params, root) as run:
        promote(params, run, root)
    return json.loads((root / "outputs" / "promotion.json").read_text())


def champion_weights(root: Path, params: Params) -> str:
    return (champion_folder(params, root) / "model.safetensors").read_text()


def test_the_first_model_becomes_champion_and_can_be_fetched(records: Path, params: Params) -> None:
    evaluated(records, results(150), "first")
    assert promoted(records, params)["verdict"] == "champion"
    assert champion_weights(records, params) == "first"
    client, _ = open_store(resolve_store(params.tracking, records))
    version = client.get_model_version_by_alias(params.promote.model_name, "champion")
    assert "## Accuracy" in version.description
    assert "${" not in version.description


def test_only_a_model_that_is_better_beyond_chance_takes_the_title(records: Path, params: Params) -> None:
    evaluated(records, results(150), "first")
    promoted(records, params)
    for good, weights, reason in (
        (149, "worse", "worse"),
        (152, "ahead", "not beyond chance"),
        (150, "equal", "tie"),
    ):
        evaluated(records, results(good), weights)
        outcome = promoted(records, params)
        assert outcome["verdict"] == "challenger"
        assert reason in outcome["reason"]
        assert champion_weights(records, params) == "first"
    evaluated(records, results(190), "better")
    outcome = promoted(records, params)
    assert outcome["verdict"] == "champion"
    assert outcome["comparison"]["wins"] == 40
    assert champion_weights(records, params) == "better"


def test_a_version_says_what_the_gates_decided_and_how_to_repeat_it(records: Path, params: Params) -> None:
    (records / "outputs" / "validation").mkdir(parents=True)
    report = {"success": True, "expectations": 86, "failed": 0}
    (records / "outputs" / "validation" / "report.json").write_text(json.dumps(report))
    evaluated(records, results(150), "first")
    promoted(records, params)
    evaluated(records, results(152), "ahead")
    promoted(records, params)
    client, _ = open_store(resolve_store(params.tracking, records))
    first, second = (client.get_model_version(params.promote.model_name, number) for number in ("1", "2"))
    assert (first.tags["verdict"], first.tags["verdict.reason"]) == ("champion", "it is the first model")
    assert first.tags["gate.data"] == "passed, 86 of 86 expectations hold"
    assert "verdict.against" not in first.tags
    assert (second.tags["verdict"], second.tags["verdict.against"]) == ("challenger", "version 1")
    assert second.tags["verdict.difference"].startswith("+0.0100 [")
    for words in ("2 won, 0 lost", "dvc repro promote", "lambda_acc:", "4×4 | 76.0 %", f"seed {params.seed}"):
        assert words in second.description


def test_the_same_weights_are_registered_once_and_stay_champion(records: Path, params: Params) -> None:
    evaluated(records, results(150), "first")
    promoted(records, params)
    assert promoted(records, params)["verdict"] == "champion"
    client, _ = open_store(resolve_store(params.tracking, records))
    assert len(client.search_model_versions(f"name = '{params.promote.model_name}'")) == 1


def test_a_model_measured_on_other_maps_is_not_compared(records: Path, params: Params) -> None:
    """Item ids are numbers: after a change of the data the same id is another question."""
    evaluated(records, results(150), "first")
    promoted(records, params)
    evaluated(records, results(190), "second", asked=b"other maps")
    outcome = promoted(records, params)
    assert outcome["verdict"] == "challenger"
    assert "other items" in outcome["reason"]


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
@pytest.mark.parametrize("first", [True, False])
def test_an_accuracy_that_is_no_number_never_wins(value: float | None, first: bool) -> None:
    items = pd.DataFrame({"prompt_id": ["a"], "correct": [True]})
    verdict = decide(value, items, None if first else items.assign(correct=False), True, 0.95, 0)
    assert verdict.verdict == "challenger"


def test_missing_results_never_win() -> None:
    items = pd.DataFrame({"prompt_id": ["a", "b"], "correct": [True, None]})
    assert decide(1.0, items, None, True, 0.95, 0).verdict == "challenger"
    assert decide(1.0, items.iloc[:0], None, True, 0.95, 0).verdict == "challenger"


def test_the_output_holds_nothing_that_differs_between_machines(records: Path, params: Params) -> None:
    evaluated(records, results(150), "first")
    text = json.dumps(promoted(records, params))
    client, experiment = open_store(resolve_store(params.tracking, records))
    (run,) = client.search_runs([experiment])
    assert run.info.run_id not in text
    assert str(records) not in text
    assert run.data.tags["host"] not in text


def test_an_empty_registry_says_how_to_fill_it(records: Path, params: Params) -> None:
    with pytest.raises(RegistryError, match=r"no champion of .*--model"):
        champion_folder(params, records)


def test_a_policy_that_was_not_evaluated_is_one_line(records: Path, params: Params) -> None:
    evaluated(records, results(150), "first")
    (records / "outputs" / "evaluation" / "metrics.json").write_text("{}")
    with pytest.raises(PromotionError, match="no grpo on held_out items"):
        promoted(records, params)
