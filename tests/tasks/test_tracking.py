"""Risks of MLflow runs: destroyed stores, wrong statuses, orphans, runs that merge or multiply."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tasks.params import PROJECT_ROOT, Params, override
from tasks.tracked_run import TraceStep
from tasks.tracking import PARENT_RUN_VARIABLE, Terminated, pipeline_run, stage_run
from tasks.tracking_store import TrackingError, open_store, resolve_store

PRELUDE = """
import os, sys, time
from pathlib import Path
from tasks.params import load_params
from tasks.tracking import pipeline_run, stage_run
params = load_params(profile="laptop")
root = Path(sys.argv[1])
"""


def start(code: str, root: Path, **env: str) -> subprocess.Popen[str]:
    """A Python process in which `params` and `root` are defined."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, str(root)],
        cwd=PROJECT_ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def runs(params: Params, root: Path) -> dict[str, Run]:
    """Newest run of each name."""
    client, experiment = open_store(resolve_store(params.tracking, root))
    return {run.info.run_name: run for run in client.search_runs([experiment], order_by=["start_time ASC"])}


def client_of(params: Params, root: Path) -> MlflowClient:
    return open_store(resolve_store(params.tracking, root))[0]


def test_six_processes_on_a_fresh_store_all_succeed(tmp_path: Path, params: Params) -> None:
    """Without the lock they destroy the sqlite file for good (daizutabi/hydraflow#245)."""
    code = "with stage_run(f'stage-{sys.argv[2]}', params, root) as run: run.log_metrics({'x': 1.0}, 0)"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code, str(tmp_path), str(number)],
            cwd=PROJECT_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(6)
    ]
    for process in processes:
        finish(process)
    found = runs(params, tmp_path)
    assert len(found) == 6
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    assert not client_of(params, tmp_path).search_runs(["0"]), "the Default experiment got a run"


def ask_to_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


def fail(error: BaseException) -> Callable[[], None]:
    def raise_it() -> None:
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("ending", "raised", "status"),
    [
        (fail(SystemExit(0)), SystemExit, "FINISHED"),
        (fail(SystemExit(1)), SystemExit, "FAILED"),
        (fail(ValueError("broken")), ValueError, "FAILED"),
        (fail(KeyboardInterrupt()), KeyboardInterrupt, "KILLED"),
        (ask_to_end, SystemExit, "KILLED"),
    ],
    ids=["exit 0", "exit 1", "error", "ctrl-c", "sigterm"],
)
def test_each_way_to_end_gives_the_right_status(
    records: Path, params: Params, ending: Callable[[], None], raised: type[BaseException], status: str
) -> None:
    """MLflow's own context manager calls sys.exit(0) FAILED and leaves SIGTERM RUNNING."""

    def work() -> None:
        with stage_run("sft", params, records) as run:
            run.log_metrics({"x": 1.0}, 0)
            ending()

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(raised) as caught:
        work()
    assert signal.getsignal(signal.SIGTERM) is before
    if ending is ask_to_end:
        assert isinstance(caught.value, Terminated)
        assert caught.value.code == 143
    ended = runs(params, records)["sft"]
    assert ended.info.status == status
    assert ended.data.metrics["x"] == 1.0, "buffered metrics were lost"
    if raised is ValueError:
        assert ended.data.tags["error"] == "ValueError: broken"


def test_a_killed_stage_is_reaped_and_its_run_and_curve_are_continued(records: Path, params: Params) -> None:
    code = """
with stage_run('sft', params, root) as run:
    for step in range(5):
        run.log_metrics({'loss': 10.0 - step}, step)
    run._buffer.flush()
    print('ready', flush=True)
    time.sleep(600)
"""
    process = start(code, records)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed = runs(params, records)["sft"]
    assert killed.info.status == "RUNNING"
    with stage_run("grpo", params, records):
        assert runs(params, records)["sft"].info.status == "KILLED"
    with stage_run("sft", params, records) as run:
        for step in range(3, 8):
            run.log_metrics({"loss": 10.0 - step}, step)
    found = runs(params, records)["sft"]
    assert found.info.run_id == killed.info.run_id
    assert found.info.status == "FINISHED"
    assert found.data.tags["attempt"] == "2"
    curve = client_of(params, records).get_metric_history(found.info.run_id, "loss")
    assert [(point.step, point.value) for point in curve] == [(step, 10.0 - step) for step in range(8)]


def test_other_parameters_do_not_continue_the_old_run(records: Path, params: Params) -> None:
    with pytest.raises(ValueError, match="stop"), stage_run("sft", params, records) as first:
        raise ValueError("stop")
    with stage_run("sft", override(params, {"sft.lr": 0.5}), records) as second:
        assert second.run_id != first.run_id
    with stage_run("sft", params, records) as third:
        assert third.run_id == first.run_id
    with stage_run("sft", params, records) as fourth:
        assert fourth.run_id not in {first.run_id, second.run_id}, "a finished run was reopened"


def test_a_changed_parameter_on_resume_becomes_a_tag(records: Path, params: Params) -> None:
    """MLflow's parameters are written once; tracking settings are no part of the job."""
    with pytest.raises(ValueError, match="stop"), stage_run("sft", params, records):
        raise ValueError("stop")
    with stage_run("sft", override(params, {"tracking.max_points_per_metric": 50}), records) as run:
        pass
    tags = client_of(params, records).get_run(run.run_id).data.tags
    assert tags["resumed.tracking.max_points_per_metric"] == "50"


def test_a_stage_is_a_child_and_leaves_its_parent_running(records: Path, params: Params) -> None:
    with pipeline_run(params, records) as parent:
        code = "with stage_run('sft', params, root) as run: print(run.run_id)"
        finish(start(code, records, **{PARENT_RUN_VARIABLE: parent.run_id}))
        code = "with stage_run('grpo', params, root) as run: raise ValueError"
        start(code, records, **{PARENT_RUN_VARIABLE: parent.run_id}).communicate()
        found = runs(params, records)
        assert found["sft"].data.tags["mlflow.parentRunId"] == parent.run_id
        assert found["grpo"].info.status == "FAILED"
        assert found["pipeline-laptop"].info.status == "RUNNING"
    assert runs(params, records)["pipeline-laptop"].info.status == "FINISHED"


def test_a_failed_run_does_not_block_or_capture_the_next(records: Path, params: Params) -> None:
    """Fluent MLflow keeps the run active per thread (mlflow/mlflow#10813)."""
    import mlflow

    with pytest.raises(ValueError, match="x"), stage_run("sft", params, records):
        raise ValueError("x")
    assert mlflow.active_run() is None
    with stage_run("grpo", params, records) as run:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda step: run.log_metrics({"x": float(step)}, step), range(20)))
        assert mlflow.active_run() is None
    assert len(client_of(params, records).get_metric_history(run.run_id, "x")) == 20
    assert set(runs(params, records)) == {"sft", "grpo"}


def test_a_run_says_how_it_was_made(records: Path, params: Params) -> None:
    (records / "dvc.lock").write_text(
        "schema: '2.0'\nstages:\n  cold_start:\n    outs:\n    - {path: data/cold_start, md5: abc.dir}\n"
    )
    with stage_run("sft", params, records) as run:
        run.log_dataset("cold_start", "data/cold_start", "a" * 64, "training", 33000)
        run.set_tags({"note@1": 5})
    stored = client_of(params, records).get_run(run.run_id)
    tags = stored.data.tags
    assert {"cmd", "dvc.lock_md5", "host", "pid", "params.sha", "fingerprint"} <= set(tags)
    assert (tags["data.md5"], tags["seed"], tags["dvc.stage"]) == ("abc.dir", str(params.seed), "sft")
    assert stored.data.params["sft.lr"] == str(params.sft.lr)
    (dataset,) = stored.inputs.dataset_inputs
    assert json.loads(dataset.dataset.profile) == {"num_rows": 33000}
    assert "config.yaml" in {item.path for item in client_of(params, records).list_artifacts(run.run_id)}


def test_git_commit_and_uncommitted_changes_are_recorded(small_project: Path, params: Params) -> None:
    git = ["git", "-C", str(small_project), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "x"], check=True)
    dirty = {}
    for name in ("clean", "dirty"):
        with stage_run(name, params, small_project) as run:
            dirty[name] = client_of(params, small_project).get_run(run.run_id).data.tags["git.dirty"]
        (small_project / "stage.py").write_text("changed")
    assert dirty == {"clean": "false", "dirty": "true"}


def test_the_store_does_not_depend_on_the_current_folder(
    tmp_path: Path, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "with space"
    (root / "deep").mkdir(parents=True)
    for folder in (root, root / "deep"):
        monkeypatch.chdir(folder)
        with stage_run(folder.name, params, root) as run:
            run.log_text("x", "note.txt")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    assert len(runs(params, root)) == 2
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.db")] == [
        "with space/mlflow.db"
    ]
    assert len(list((root / "mlartifacts").rglob("note.txt"))) == 2


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "mlruns"])
def test_a_folder_as_store_is_refused_with_the_remedy(
    records: Path, params: Params, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with (
        pytest.raises(TrackingError, match=r"set it to sqlite:///mlflow\.db") as caught,
        stage_run("x", params, records),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_an_unreachable_server_is_one_line(
    records: Path, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with (
        pytest.raises(TrackingError, match="is its server running") as caught,
        stage_run("x", params, records),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_a_deleted_experiment_is_restored(records: Path, params: Params) -> None:
    client, experiment = open_store(resolve_store(params.tracking, records))
    client.delete_experiment(experiment)
    with stage_run("sft", params, records) as run:
        assert run.experiment_id == experiment
    assert runs(params, records)["sft"].info.status == "FINISHED"


def test_non_finite_values_and_odd_names_reach_mlflow_as_numbers(records: Path, params: Params) -> None:
    with stage_run("sft", params, records) as run:
        run.log_metrics({"loss": float("nan"), "mean@1": 1.0, "mean(1)": 2.0}, 0)
        run.log_summary({"best": float("inf")})
    data = client_of(params, records).get_run(run.run_id).data
    assert {"nonfinite/loss", "nonfinite/best"} <= set(data.metrics)
    assert "loss" not in data.metrics
    assert sorted(value for name, value in data.metrics.items() if name.startswith("mean")) == [1.0, 2.0]
    assert json.loads(data.tags["nonfinite"]) == {"loss": 1, "best": 1}


def test_traces_belong_to_the_run_and_keep_a_span_per_call(records: Path, params: Params) -> None:
    now = time.time()
    with stage_run("evaluate", params, records) as run:
        for number in range(4):
            steps = [
                TraceStep("POINT", "TOOL", {"target": "start"}, {"coordinates": [1, 2]}, now, now + 0.01)
            ] * 2
            run.log_trace(
                f"episode {number}", {"question": "?"}, {"response": "Yes"}, steps, {"correct": "true"}
            )
    traces = client_of(params, records).search_traces(locations=[run.experiment_id])
    assert len(traces) == 4
    for trace in traces:
        assert trace.info.request_metadata["mlflow.sourceRun"] == run.run_id
        assert [span.name for span in trace.data.spans].count("POINT") == 2


def test_an_edit_during_a_dvc_stage_is_not_recorded_as_what_was_run(
    small_project: Path, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DVC hashes dependencies after the command (treeverse/dvc#11058)."""
    monkeypatch.setenv("DVC_STAGE", "first")
    with (
        pytest.raises(TrackingError, match=r"stage\.py changed while it ran"),
        stage_run("first", params, small_project),
    ):
        (small_project / "stage.py").write_text("# edited")
    assert runs(params, small_project)["first"].info.status == "FAILED"


def test_two_processes_of_one_stage_never_write_at_the_same_time(records: Path, params: Params) -> None:
    code = "with stage_run('sft', params, root): print(time.time(), flush=True); time.sleep(3); print(time.time())"
    outputs = [finish(process) for process in [start(code, records), start(code, records)]]
    (_, first_out), (second_in, second_out) = sorted([float(x) for x in out.split()] for out in outputs)
    assert first_out <= second_in
    assert second_out > second_in
