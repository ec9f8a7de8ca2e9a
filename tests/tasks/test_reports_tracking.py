"""Public reports about MLflow that the tests of tasks/tracking.py leave open."""

from __future__ import annotations

import json
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlflow import MlflowClient
from packaging.requirements import Requirement

import tasks.workspace
from tasks.dvc_graph import read_stages, stage_fingerprint
from tasks.metric_log import Point
from tasks.params import PROJECT_ROOT, Params, override
from tasks.tracked_run import TraceStep
from tasks.tracking import stage_run
from tasks.tracking_store import open_store, resolve_store
from tasks.workspace import stage_checkpoints


def client_of(params: Params, root: Path) -> tuple[MlflowClient, str]:
    return open_store(resolve_store(params.tracking, root))


def test_two_failed_attempts_and_a_good_one_are_one_run(records: Path, params: Params) -> None:
    """kubeflow/pipelines#13262: a retry re-enters the task, and every attempt left a run of its own."""
    for attempt in range(3):
        try:
            with stage_run("sft", params, records) as run:
                run.log_metrics({"sft/loss": 3.0 - attempt}, attempt)
                if attempt < 2:
                    raise ConnectionError("the node is gone")
        except ConnectionError:
            continue
    client, experiment = client_of(params, records)
    (only,) = client.search_runs([experiment])
    assert (only.info.status, only.data.tags["attempt"]) == ("FINISHED", "3")
    assert [point.step for point in client.get_metric_history(only.info.run_id, "sft/loss")] == [0, 1, 2]


def test_a_parameter_name_that_mlflow_refuses_does_not_stop_a_run(records: Path, params: Params) -> None:
    """verl-project/verl#119: one illegal name ended the training. The space of a sweep has a `*` in its keys."""
    with stage_run("sft", params, records) as run:
        pass
    stored = client_of(params, records)[0].get_run(run.run_id)
    assert stored.info.status == "FINISHED"
    assert len(stored.data.params) > 50
    assert stored.data.params["seed"] == str(params.seed)


def test_four_rollouts_at_once_keep_their_own_traces_and_spans(records: Path, params: Params) -> None:
    """mlflow/mlflow#15511: traces of threads were attached to another run, or dropped."""
    start = threading.Barrier(4)

    def log(number: int) -> str:
        now = time.time()
        steps = [TraceStep(f"POINT-{number}-{k}", "TOOL", {"k": k}, {"ok": True}, now, now) for k in range(3)]
        start.wait()
        return run.log_trace(f"episode {number}", {"question": str(number)}, {"response": "Yes"}, steps)

    with stage_run("evaluate", params, records) as run, ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(log, range(4)))
    client, experiment = client_of(params, records)
    traces = {trace.info.trace_id: trace for trace in client.search_traces(locations=[experiment])}
    assert set(traces) == set(ids)
    for number, trace_id in enumerate(ids):
        assert traces[trace_id].info.request_metadata["mlflow.sourceRun"] == run.run_id
        spans = {span.name for span in traces[trace_id].data.spans} - {f"episode {number}"}
        assert spans == {f"POINT-{number}-{k}" for k in range(3)}


def test_an_outage_of_the_store_costs_no_point(
    records: Path, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracking server that restarts in the middle of a training must not end it or tear a hole in its curve."""
    with stage_run("sft", params, records) as run:
        send, failures = run._buffer._send, iter([True, True])

        def flaky(points: list[Point]) -> None:
            if next(failures, False):
                raise ConnectionError("the server is away")
            send(points)

        monkeypatch.setattr(run._buffer, "_send", flaky)
        for step in range(20):
            run.log_metrics({"sft/loss": float(step)}, step)
        for _ in range(2):
            with pytest.raises(ConnectionError):
                run._buffer.flush()
    curve = client_of(params, records)[0].get_metric_history(run.run_id, "sft/loss")
    assert [point.step for point in curve] == list(range(20))


def test_a_checkpoint_lies_outside_what_dvc_deletes_and_serves_one_job_only(
    tmp_path: Path, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    """treeverse/dvc#9221: DVC removes outs before a stage runs. DeepSpeed#2898: a state of two ranks does not load
    into three, so another number of processes is another job."""
    monkeypatch.setattr(tasks.workspace, "OUTPUTS", tmp_path / "outputs")
    first = stage_checkpoints("sft", params).folder
    first.mkdir(parents=True)
    outs = {Path(out) for stage in read_stages().values() for out in stage.outs}
    assert not outs & {first.relative_to(tmp_path), *first.relative_to(tmp_path).parents}
    assert stage_checkpoints("sft", params).folder == first
    assert first.is_dir()
    for change in ({"sft.lr": 1e-9}, {"sft.processes": 3}, {"sft.zero_stage": 1}, {"seed": 5}):
        assert stage_checkpoints("sft", override(params, change)).folder != first
        assert not first.exists(), "a state of other settings was kept, and filled the disk"
        first.mkdir(parents=True)
    other = override(params, {"promote.model_name": "x", "tracking.experiment": "y"})
    assert stage_fingerprint("sft", other) == stage_fingerprint("sft", params)


def test_great_expectations_is_used_without_its_integrations_and_within_one_major_version() -> None:
    """great_expectations#3609: integrations broke on every major version, and Prefect's is archived."""
    project = tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = {item.name: item.specifier for item in map(Requirement, project["dependencies"])}
    gx = requirements["great-expectations"]
    assert gx.contains("1.24.1")
    assert not gx.contains("2.0.0")
    assert not gx.contains("0.18.22")
    assert not [name for name in requirements if name.startswith(("prefect-", "dvclive", "airflow"))]
    users = {
        file.relative_to(PROJECT_ROOT).parts[:2]
        for package in ("tasks", "flows", "models", "environments", "tools")
        for file in (PROJECT_ROOT / package).rglob("*.py")
        if "great_expectations" in file.read_text(encoding="utf-8")
    }
    assert users == {("tasks", "gate")}


def test_a_run_that_was_deleted_is_not_continued_but_made_anew(records: Path, params: Params) -> None:
    """A record of a run that somebody deleted in the UI must not stop the next attempt."""
    with pytest.raises(ValueError, match="stop"), stage_run("sft", params, records) as run:
        raise ValueError("stop")
    client, _ = client_of(params, records)
    client.delete_run(run.run_id)
    with stage_run("sft", params, records) as again:
        assert again.run_id != run.run_id
    file = records / "outputs" / ".runs" / "sft.json"
    assert again.run_id in json.loads(file.read_text()).values()
