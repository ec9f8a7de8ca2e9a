"""Risks of a pipeline in daily use: two runs in one folder, a cancelled one that lives on, a worker that finds no code,
a form that edits the user's files, services that stay behind.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any
from uuid import UUID

import psutil
import pytest

from tests.flows.conftest import Team, eventually

Mode = Callable[[str], None]


def running_stage(team: Team) -> psutil.Process:
    """The stage that waits, as soon as it does."""
    file = team.root / "outputs" / "pid"
    log = team.state / "worker.log"
    pid = eventually(lambda: file.exists() and file.read_text().strip(), 300, lambda: log.read_text()[-3000:])
    return psutil.Process(int(pid))


def artifacts(team: Team) -> dict[str, Any]:
    """The latest of each key."""
    from prefect.client.schemas.sorting import ArtifactCollectionSort

    found = team.client.read_latest_artifacts(sort=ArtifactCollectionSort.CREATED_DESC, limit=100)
    return {artifact.key: artifact for artifact in found}


def dvc(team: Team, *arguments: str) -> str:
    done = team.run("dvc", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def submitted_runs(team: Team) -> int:
    """Runs of the pipeline that somebody asked for; at any time the scheduler adds some, and automations reapers."""
    nightly = team.client.read_deployment_by_name("pipeline/nightly").id
    runs = [run for run in team.client.read_flow_runs() if run.deployment_id == nightly]
    return sum(not run.auto_scheduled for run in runs)


@pytest.fixture(scope="module")
def first_runs(team: Team) -> dict[str, UUID]:
    """A run of every deployment, in a fresh project. The worker's folder is where the services keep their logs."""
    names = ("pipeline/nightly", "evaluate-champion/daily", "sweep/weekly", "reap/hourly")
    runs = {name: team.submit(name) for name in names}
    for run in runs.values():
        team.ended(run)
    return runs


def test_a_worker_started_outside_the_project_runs_the_pipeline(
    team: Team, first_runs: dict[str, UUID]
) -> None:
    run = first_runs["pipeline/nightly"]
    assert team.ended(run) == "Completed"
    assert (team.root / "outputs" / "second.txt").exists()
    (parent,) = team.mlflow_runs(run)
    assert parent.info.status == "FINISHED"
    shown = artifacts(team)
    assert "| first | ran |" in shown["pipeline-stages"].data
    assert team.ended(first_runs["reap/hourly"]) == "Completed"
    assert "No module named" not in (team.state / "worker.log").read_text()


def test_a_failed_task_makes_a_failed_flow_with_its_own_words(
    team: Team, first_runs: dict[str, UUID]
) -> None:
    """There is no champion yet, and no policy to sweep from."""
    daily = team.client.read_flow_run(first_runs["evaluate-champion/daily"]).state
    assert daily.name == "Failed"
    assert "no champion" in daily.message
    assert team.ended(first_runs["sweep/weekly"]) == "Failed"


@pytest.mark.parametrize(
    "overrides", [{"grpo": {"lr": -1e-4}}, {"grpo": {"lrr": 1e-4}}, {"grpo": {"lr": "1e-4"}}, {"reward": 1}]
)
def test_a_typo_or_an_impossible_value_is_refused_before_a_run_exists(team: Team, overrides: Any) -> None:
    from prefect.exceptions import PrefectHTTPStatusError

    before = submitted_runs(team)
    with pytest.raises(PrefectHTTPStatusError, match=r"422|409"):
        team.submit("pipeline/nightly", run={"overrides": overrides})
    assert submitted_runs(team) == before


@pytest.mark.usefixtures("first_runs")
def test_overrides_run_on_a_copy_and_show_as_a_difference(team: Team) -> None:
    before = (team.root / "params.yaml").read_bytes()
    run = team.submit("pipeline/nightly", run={"overrides": {"grpo": {"lr": 0.125}}})
    assert team.ended(run) == "Completed"
    assert (team.root / "params.yaml").read_bytes() == before
    assert dvc(team, "status").strip() == "Data and pipelines are up to date."
    (parent,) = team.mlflow_runs(run)
    assert parent.data.tags["overrides"].startswith("grpo.lr: ")
    assert parent.data.tags["overrides"].endswith(" -> 0.125")
    assert parent.data.params["grpo.lr"] == "0.125"
    assert (parent.data.tags["stage.first"], parent.data.tags["stage.second"]) == ("cached", "ran")
    assert "| `grpo.lr` |" in artifacts(team)["overrides"].data
    trees = subprocess.run(
        ["git", "worktree", "list"], cwd=team.root, capture_output=True, text=True, check=True
    )
    assert len(trees.stdout.splitlines()) == 1
    assert not list((team.root / "outputs" / ".copies").iterdir())


def test_of_two_schedules_that_fire_at_once_one_runs_and_cancelling_it_leaves_all_clean(
    team: Team, mode: Mode
) -> None:
    mode("first trains")
    both = [team.submit("pipeline/nightly"), team.submit("pipeline/nightly")]
    stage = running_stage(team)
    states = {team.state_of(run): run for run in both}
    assert set(states) == {"Cancelled", "Running"}
    run = states["Running"]
    assert team.run("prefect", "flow-run", "cancel", str(run)).returncode == 0
    assert team.ended(run) == "Cancelled"
    stage.wait(timeout=60)
    eventually(lambda: "RUNNING" not in [each.info.status for each in team.mlflow_runs(run)], 60)
    assert [each.info.status for each in team.mlflow_runs(run)] == ["KILLED", "KILLED"]
    assert "first" in dvc(team, "status", "--json")
    locks = json.loads((team.root / ".dvc" / "tmp" / "rwlock").read_text() or "{}")
    assert not any(locks.values())


def test_a_restart_of_the_server_does_not_end_a_run(team: Team, mode: Mode) -> None:
    from tasks.service_process import stop

    mode("first waits")
    run = team.submit("pipeline/nightly")
    running_stage(team)
    assert stop("prefect", team.state)
    done = team.services("up")
    assert done.returncode == 0, done.stderr
    (team.root / "go").touch()
    assert team.ended(run) == "Completed"
    assert artifacts(team)["progress-first"].type == "progress"


def test_automations_are_there_and_a_failure_starts_the_reaper(team: Team, mode: Mode) -> None:
    names = {automation.name for automation in team.client.read_automations()}
    assert names == {f"toolplan-{about}" for about in ("failed", "crashed", "late", "promoted")}

    def reaper_runs() -> int:
        (flow,) = [flow for flow in team.client.read_flows() if flow.name == "reap"]
        runs = [run for run in team.client.read_flow_runs() if run.flow_id == flow.id]
        return len(
            [run for run in runs if run.created_by is not None and run.created_by.type == "AUTOMATION"]
        )

    before = reaper_runs()
    mode("first fails")
    run = team.submit("pipeline/nightly")
    assert team.ended(run) == "Failed"
    assert "the oven is cold" in team.client.read_flow_run(run).state.message
    eventually(lambda: reaper_runs() > before, 30)


def test_starting_twice_starts_nothing_twice_and_stopping_stops_just_those(team: Team) -> None:
    def records() -> dict[str, str]:
        return {file.name: file.read_text() for file in team.state.glob("*.json")}

    before = records()
    assert set(before) >= {"prefect.json", "mlflow.json", "worker.json"}
    assert team.services("up").returncode == 0
    assert records() == before
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        services = [psutil.Process(json.loads(record)["pid"]) for record in before.values()]
        processes = [*services, *(child for each in services for child in each.children(recursive=True))]
        said = team.services("down").stdout
        assert said.startswith("stopped: worker, ")
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive
        assert bystander.poll() is None
        assert team.services("down").stdout == "nothing was running\n"
    finally:
        bystander.kill()
        bystander.wait()
