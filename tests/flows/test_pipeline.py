"""Risks of the flow: green although a stage failed, stages run twice, processes left behind, two ways that differ."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from flows.pipeline import PipelineRun, choose_profile, dry_run, pipeline
from flows.stage import StageFailed
from tasks.params import PROJECT_ROOT, ParamsError, load_params
from tasks.tracking_store import open_store, resolve_store

pytestmark = pytest.mark.usefixtures("prefect_server")


def calls(root: Path) -> list[str]:
    """Which stages really ran, in order."""
    file = root / "calls"
    return file.read_text().split() if file.exists() else []


def pipeline_runs(root: Path) -> list[Run]:
    client, experiment = open_store(resolve_store(load_params(root / "params.yaml").tracking, root))
    return client.search_runs([experiment], order_by=["start_time ASC"])


def dvc(root: Path, *arguments: str) -> str:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "dvc", *arguments]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=True).stdout


def start_flow(root: Path) -> subprocess.Popen[str]:
    """The flow in a process of its own, as the command line runs it, with the test's server."""
    from prefect.settings import PREFECT_API_URL

    code = (
        "import sys; from pathlib import Path; from tasks.cli import run_main\n"
        "from flows.pipeline import pipeline; from flows.stage import StageFailed\n"
        "run_main(lambda: pipeline(root=Path(sys.argv[1])) and 0, StageFailed)"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(root)],
        cwd=PROJECT_ROOT,
        env={**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value() or ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_stages_run_once_in_order_and_are_cached_after(small_project: Path) -> None:
    assert pipeline(root=small_project) == {"first": "ran", "second": "ran"}
    assert calls(small_project) == ["first", "second"]
    lock = (small_project / "dvc.lock").read_bytes()
    assert pipeline(root=small_project) == {"first": "cached", "second": "cached"}
    assert calls(small_project) == ["first", "second"]
    assert (small_project / "dvc.lock").read_bytes() == lock
    ran, cached = pipeline_runs(small_project)
    assert (ran.info.status, cached.info.status) == ("FINISHED", "FINISHED")
    assert cached.data.tags["stage.first"] == "cached"
    assert "| first | cached |" in cached.data.tags["mlflow.note.content"]


def test_the_flow_and_dvc_repro_do_the_same_work(small_project: Path) -> None:
    pipeline(root=small_project)
    assert "up to date" in dvc(small_project, "repro")
    lock = (small_project / "dvc.lock").read_bytes()
    (small_project / "dvc.lock").unlink()
    dvc(small_project, "repro", "--no-run-cache")
    assert (small_project / "dvc.lock").read_bytes() == lock
    assert pipeline(root=small_project) == {"first": "cached", "second": "cached"}


def test_a_failed_stage_makes_a_failed_flow_with_the_stages_own_words(small_project: Path) -> None:
    """A flow that swallows a child's exit code is green over a red task."""
    (small_project / "mode").write_text("first fails")
    state: Any = pipeline(root=small_project, return_state=True)
    assert state.is_failed()
    with pytest.raises(StageFailed, match="stage first: the oven is cold"):
        state.result()
    assert calls(small_project) == ["first"], "an error was retried, or the next stage was started"
    (run,) = pipeline_runs(small_project)
    assert run.info.status == "FAILED"
    assert (run.data.tags["stage.first"], run.data.tags["stage.second"]) == ("failed", "skipped")
    (small_project / "mode").unlink()
    assert pipeline(root=small_project) == {"first": "ran", "second": "ran"}


def test_a_stage_behind_one_that_ran_is_looked_at_again(small_project: Path) -> None:
    pipeline(root=small_project)
    text = (small_project / "stage.py").read_text()
    (small_project / "stage.py").write_text(text.replace("write_text(name)", "write_text(name + '!')"))
    assert pipeline(root=small_project) == {"first": "ran", "second": "ran"}
    (small_project / "stage.py").write_text(text)
    outcome = pipeline(root=small_project)
    assert outcome == {"first": "cached", "second": "cached"}, "DVC's run cache was not used"
    assert (small_project / "outputs" / "first.txt").read_text() == "first"


def test_a_stage_killed_from_outside_is_tried_again(small_project: Path) -> None:
    """Out of memory: a trainer goes on from its checkpoint."""
    script = (small_project / "stage.py").read_text()
    once = "import os\nif not os.path.exists('died'):\n    open('died', 'w').close()\n    os.kill(os.getpid(), 9)\n"
    (small_project / "stage.py").write_text(once + script)
    assert pipeline(PipelineRun(stages=["first"]), root=small_project) == {
        "first": "ran",
        "second": "skipped",
    }
    assert calls(small_project) == ["first"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ending_the_flow_ends_its_stage(small_project: Path, signum: signal.Signals) -> None:
    (small_project / "mode").write_text("first hangs")
    flow = start_flow(small_project)
    pid = small_project / "pid"
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()):
        assert flow.poll() is None, flow.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    stage = psutil.Process(int(pid.read_text()))
    flow.send_signal(signum)
    flow.communicate(timeout=60)
    assert flow.returncode == {signal.SIGTERM: -15, signal.SIGINT: 130, signal.SIGKILL: -9}[signum]
    stage.wait(timeout=10)
    (small_project / "mode").unlink()
    assert pipeline(root=small_project) == {"first": "ran", "second": "ran"}
    killed, finished = pipeline_runs(small_project)
    assert (killed.info.status, finished.info.status) == ("KILLED", "FINISHED")


def test_a_second_pipeline_in_the_same_folder_is_one_line_and_not_a_lock_error(small_project: Path) -> None:
    from filelock import FileLock

    (small_project / ".dvc" / "tmp").mkdir(parents=True, exist_ok=True)
    lock = FileLock(small_project / ".dvc" / "tmp" / "pipeline.lock")
    with lock, pytest.raises(ParamsError, match="another pipeline is at work"):
        pipeline(root=small_project)
    assert calls(small_project) == []


def test_a_stage_that_does_not_exist_is_named(small_project: Path) -> None:
    with pytest.raises(ParamsError, match=r"no stage third in dvc\.yaml; there are first, second"):
        pipeline(PipelineRun(stages=["third"]), root=small_project)


def test_a_flow_inside_a_stage_is_refused(small_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_STAGE", "first")
    with pytest.raises(ParamsError, match="inside a DVC stage"):
        pipeline(root=small_project)


def test_choosing_a_profile_changes_one_line_and_a_wrong_one_none(small_project: Path) -> None:
    file = small_project / "params.yaml"
    before = file.read_text()
    with pytest.raises(ParamsError, match="did you mean gpu"):
        choose_profile(small_project, "gpus")
    assert file.read_text() == before
    assert choose_profile(small_project, "gpu").profile == "gpu"
    changed = [
        (a, b) for a, b in zip(before.splitlines(), file.read_text().splitlines(), strict=True) if a != b
    ]
    assert len(changed) == 1
    assert re.match(r"profile: gpu\s+#", changed[0][1])


def test_overrides_without_services_leave_the_project_alone_and_record_in_its_store(
    small_project: Path,
) -> None:
    commit = ["-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "-m", "start"]
    for command in (["add", "--all"], commit):
        subprocess.run(["git", *command], cwd=small_project, check=True)
    before = (small_project / "params.yaml").read_bytes()
    asked = PipelineRun.model_validate({"overrides": {"grpo": {"lr": 0.125}}, "profile": "gpu"})
    assert pipeline(asked, root=small_project) == {"first": "ran", "second": "ran"}
    assert (small_project / "params.yaml").read_bytes() == before
    assert calls(small_project) == []
    (run,) = pipeline_runs(small_project)
    assert run.data.tags["profile"] == "gpu"
    assert "-> 0.125" in run.data.tags["overrides"]


def test_a_dry_run_says_what_would_happen_and_writes_nothing(
    small_project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline(root=small_project)
    (small_project / "outputs" / "second.txt").unlink()
    capsys.readouterr()
    before = sorted(str(path) for path in small_project.rglob("*") if ".dvc" not in path.parts)
    dry_run(small_project, None, None)
    said = capsys.readouterr().out
    assert re.search(r"cached +first\n", said)
    assert re.search(r"run +second +outputs/second.txt deleted", said)
    dry_run(small_project, "gpu", ["first"])
    assert re.search(r"run +first +profile gpu\n +skip +second", capsys.readouterr().out)
    assert sorted(str(path) for path in small_project.rglob("*") if ".dvc" not in path.parts) == before


def test_the_parent_of_a_pipeline_is_never_a_child(small_project: Path) -> None:
    pipeline(root=small_project)
    client = MlflowClient(f"sqlite:///{small_project / 'mlflow.db'}")
    for run in pipeline_runs(small_project):
        assert "mlflow.parentRunId" not in client.get_run(run.info.run_id).data.tags
        assert run.data.tags["prefect.flow_run_id"]
