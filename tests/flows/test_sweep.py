"""Risks of the whole sweep: nothing learnt from shared rollouts, runs without parent, a green flow over an error."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from pydantic import ValidationError

from flows.sweep import SweepFailed, SweepRun, sweep
from tasks.apply_sweep import best_settings
from tasks.params import load_params
from tasks.sweep_plan import make_plan
from tasks.tracking_store import open_store, resolve_store
from tests.tasks.sweeps import small_params, write_project

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    return write_project(tmp_path_factory.mktemp("swept") / "a project", small_params(), empty_store)


@pytest.fixture(scope="module")
def summary(project: Path, prefect_server: None) -> dict[str, Any]:
    """Three short trials by two workers, real ones from end to end."""
    found: dict[str, Any] = sweep(SweepRun(workers=2), root=project)
    return found


@pytest.mark.parametrize("mistake", [{"trials": 0}, {"trails": 3}, {"timeout_hours": -1}])
def test_a_mistake_in_the_form_is_refused(mistake: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SweepRun.model_validate(mistake)


def test_a_failed_sweep_makes_a_failed_flow_with_its_own_words(project: Path) -> None:
    plan = make_plan(load_params(project / "params.yaml"), project)
    plan.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(plan.folder / "sweep.lock"):
        state: Any = sweep(root=project, return_state=True)
    assert state.is_failed()
    with pytest.raises(SweepFailed, match=f"sweep {plan.name} is already at work in another process"):
        state.result()


def test_all_trials_have_the_sweep_as_parent(project: Path, summary: dict[str, Any]) -> None:
    """optuna#4097: trials of parallel workers become runs of their own."""
    client, experiment = open_store(resolve_store(load_params(project / "params.yaml").tracking, project))
    runs = client.search_runs([experiment])
    parent = next(run for run in runs if run.info.run_id == summary["run_id"])
    trials = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == summary["run_id"]]
    assert len(runs) == 4
    assert sorted(run.data.tags["trial"] for run in trials) == ["0", "1", "2"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    finished = [run for run in trials if run.data.tags["trial.state"] == "complete"]
    assert all("grpo/validation_success" in run.data.metrics for run in finished)
    assert len({run.data.params["grpo.lr"] for run in trials}) == 3
    assert "sweep/best_success" in parent.data.metrics
    files = {file.path for file in client.list_artifacts(parent.info.run_id, "sweep")}
    wanted = (
        "best.yaml",
        "summary.json",
        "trials.json",
        "history.png",
        "slice.png",
        "parallel_coordinate.png",
    )
    assert {f"sweep/{name}" for name in wanted} <= files
    assert best_settings(summary["run_id"], project) == summary["best"]["settings"]


def test_the_sweep_is_resumed_where_it_ended(project: Path, summary: dict[str, Any]) -> None:
    again = sweep(SweepRun(study=summary["sweep"]), root=project)
    assert again["trials"] == summary["trials"]
    assert again["run_id"] == summary["run_id"], "a resumed sweep has one run"


def test_prefect_shows_the_best_trials(project: Path, summary: dict[str, Any]) -> None:
    from prefect.client.orchestration import get_client

    async def read() -> dict[str, Any]:
        async with get_client() as client:
            artifacts = await client.read_latest_artifacts()
        return {artifact.key: artifact.data for artifact in artifacts if artifact.key}

    shown = asyncio.run(read())
    table = json.loads(shown["sweep-trials"])
    assert {row["trial"] for row in table} == {0, 1, 2}
    assert summary["sweep"] in shown["sweep-best"]
    assert (
        "trials: 3 of 3 remain, 2 at a time" in shown["sweep-plan"] or "0 of 3 remain" in shown["sweep-plan"]
    )
