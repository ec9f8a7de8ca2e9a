"""Risks of the doctor: a broken set-up that it calls healthy, a healthy one that it fails, a repair that harms."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tasks.doctor import diagnose, report
from tasks.health import locks, machine, stack, stores
from tasks.health.check import Check, Status
from tasks.health.machine import Gpu, check_gpu, parse_gpus
from tasks.params import PROJECT_ROOT, Params, load_params, override
from tasks.tracking_store import open_store, resolve_store

H200 = Gpu("NVIDIA H200", 140e9, 0.0)
A100 = Gpu("NVIDIA A100-SXM4-80GB", 80e9, 0.0)


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))


@pytest.fixture
def project(small_project: Path) -> Path:
    """The small project with one commit."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(PROJECT_ROOT / name, small_project / name)
    git = ["git", "-C", str(small_project), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "x"], check=True)
    return small_project


def ended_process() -> int:
    """The number of a process that has just ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def by_name(root: Path, profile: str | None = None, fix: bool = False) -> dict[str, Check]:
    return {check.name: check for check in diagnose(root, profile, fix)}


def test_a_healthy_clone_has_no_failure_and_the_doctor_changes_nothing(project: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in project.rglob("*") if ".git" not in path.parts}
    checks = by_name(project)
    assert not [check.line() for check in checks.values() if check.status is Status.FAIL]
    assert len(checks) == 17
    assert checks["git"].status is Status.OK
    for path, time in before.items():
        if path.is_file() and path.name != "mlflow.db":
            assert path.stat().st_mtime_ns == time, path


def test_every_finding_that_is_not_ok_says_how_to_mend_it(project: Path) -> None:
    (project / ".dvc" / "tmp").mkdir()
    (project / ".dvc" / "tmp" / "rwlock").write_text("{")
    (project / "outputs").write_text("a file where a folder belongs")
    checks = by_name(project, "a100x8")
    poor = [check for check in checks.values() if check.status is not Status.OK]
    assert {"files", "dvc lock", "engine", "gpu", "git"} <= {check.name for check in poor}
    assert all(check.remedy and "\n" not in check.line() for check in poor)


def test_a_typo_in_the_parameters_is_a_finding_and_the_rest_is_still_checked(project: Path) -> None:
    text = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(text.replace("grpo:", "grpo:\n  lrr: 1.0", 1))
    checks = by_name(project)
    assert checks["params"].status is Status.FAIL
    assert "did you mean lr?" in checks["params"].finding
    assert {"versions", "dvc lock", "dvc remote"} <= set(checks)


def test_the_command_exits_with_1_on_a_failure_and_its_json_can_be_read() -> None:
    env = {**os.environ, "PREFECT_API_URL": "http://127.0.0.1:9/api"}
    command = [sys.executable, "-m", "tasks.doctor", "--json"]
    done = subprocess.run(command, cwd=PROJECT_ROOT, env=env, capture_output=True, text=True, check=False)
    checks = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    prefect = next(check for check in checks if check["name"] == "prefect")
    assert prefect["status"] == "fail"
    assert "prefect server start" in prefect["remedy"]


def test_the_last_line_tells_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [Check("disk", Status.FAIL, "full", "free some"), Check("git", Status.WARN, "dirty", "commit")]
    assert report(iter(checks), False, print) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "2 checks, 1 warnings, 1 failed: disk"
    assert report(iter(checks[1:]), False, print) == 0


# ------------------------------------------------------------------------------------------ packages


def test_a_missing_and_a_refused_package_fail_and_another_build_does_not() -> None:
    def without(name: str, version: str | None) -> Check:
        def lookup(package: str) -> str | None:
            return version if package == name else stack.installed_version(package)

        return stack.check_versions(PROJECT_ROOT, lookup)

    assert without("torch", None).status is Status.FAIL
    assert "mlflow 3.18.0 is not" in without("mlflow", "3.18.0").finding
    assert without("pandas", "2.9.0").status is Status.WARN
    assert without("none", None).status is Status.OK, without("none", None).line()
    assert stack.check_python(PROJECT_ROOT, "3.10.2").status is Status.FAIL


def test_a_checkpoint_is_looked_for_in_folder_and_cache(params: Params, tmp_path: Path) -> None:
    def check(name: str, **variables: str) -> Check:
        changed = override(params, {"policy.checkpoint": name})
        return stack.check_checkpoint(changed, {"HF_HUB_CACHE": str(tmp_path / "hub"), **variables})

    hub = "Qwen/Qwen2.5-VL-3B-Instruct"
    assert check(hub).status is Status.WARN
    assert check(hub, HF_HUB_OFFLINE="1").status is Status.FAIL
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen2.5-VL-3B-Instruct" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    assert check(hub, HF_HUB_OFFLINE="1").status is Status.OK
    assert check(str(tmp_path)).status is Status.FAIL
    (tmp_path / "config.json").write_text("{}")
    assert check(str(tmp_path)).status is Status.OK
    assert check(str(tmp_path / "nowhere")).status is Status.FAIL


# --------------------------------------------------------------------------------------------- locks


def test_an_entry_of_a_dead_process_is_found_and_released_and_a_live_one_stays(small_project: Path) -> None:
    dvc = subprocess.Popen(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)", "dvc"],
        stdout=subprocess.PIPE,
    )
    try:
        assert dvc.stdout is not None
        dvc.stdout.readline()
        file = small_project / ".dvc" / "tmp" / "rwlock"
        file.parent.mkdir()
        dead, live = ({"pid": pid, "cmd": "dvc repro"} for pid in (ended_process(), dvc.pid))
        # os.getpid() is a living process that is no dvc: its number was given away again.
        content = {
            "write": {"/a": dead, "/b": live},
            "read": {"/c": [dead, {"pid": os.getpid(), "cmd": "dvc"}]},
        }
        file.write_text(json.dumps(content))
        found = locks.check_dvc_lock(small_project, fix=False)
        assert found.status is Status.FAIL
        assert "/a" in found.finding
        assert json.loads(file.read_text()) == content, "looking changed it"
        assert locks.check_dvc_lock(small_project, fix=True).status is Status.OK
        assert json.loads(file.read_text()) == {"write": {"/b": live}, "read": {}}
        assert locks.check_dvc_lock(small_project, fix=False).status is Status.WARN
    finally:
        dvc.kill()
        dvc.wait()


def test_dvc_works_again_after_a_damaged_lock_file_was_mended(small_project: Path) -> None:
    file = small_project / ".dvc" / "tmp" / "rwlock"
    file.parent.mkdir()
    file.write_text("")  # as a kill in the middle of writing leaves it

    def repro() -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        command = [sys.executable, "-m", "dvc", "repro", "first"]
        return subprocess.run(
            command, cwd=small_project, env=env, capture_output=True, text=True, check=False
        )

    assert "corrupted" in repro().stderr
    assert locks.check_dvc_lock(small_project, fix=False).status is Status.FAIL
    assert locks.check_dvc_lock(small_project, fix=True).status is Status.OK
    assert repro().returncode == 0
    assert locks.check_dvc_lock(small_project, fix=False).status is Status.OK


def test_a_stage_at_work_is_named_and_an_old_lock_file_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / ".runs"
    folder.mkdir(parents=True)
    for name in ("sft", "grpo"):
        (folder / f"{name}.lock").touch()
    code = (
        "import sys; from filelock import FileLock\n"
        "with FileLock(sys.argv[1]): print(1, flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / "sft.lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    assert locks.check_pipeline_locks(tmp_path).finding == "at work: sft"
    holder.kill()
    holder.wait()
    assert locks.check_pipeline_locks(tmp_path).status is Status.OK


def test_only_leftovers_of_ended_processes_are_removed(tmp_path: Path) -> None:
    old = tmp_path / "data" / f".cold_start.{ended_process()}.tmp"
    working = tmp_path / "outputs" / f".sft.{os.getpid()}.tmp"
    for folder in (old, working):
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"x" * 1000)
    found = locks.check_drafts(tmp_path, fix=False)
    assert (found.status, old.exists()) == (Status.WARN, True)
    locks.check_drafts(tmp_path, fix=True)
    assert (old.exists(), working.exists()) == (False, True)


# -------------------------------------------------------------------------------------------- stores


def test_an_orphan_run_is_found_and_only_killed_when_asked(records: Path, params: Params) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tasks.params import load_params\n"
        "from tasks.tracking import stage_run\n"
        "with stage_run('sft', load_params(profile='laptop'), Path(sys.argv[1])):\n"
        "    print('ready', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(records)], cwd=PROJECT_ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    assert stores.check_orphans(params, records, fix=False).finding == "none", (
        "a living run was called an orphan"
    )
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert stores.check_orphans(params, records, fix=False).status is Status.WARN
    assert stores.check_orphans(params, records, fix=True).finding == "1 runs were set to KILLED"
    assert stores.check_orphans(params, records, fix=False).status is Status.OK
    client, experiment = open_store(resolve_store(params.tracking, records))
    assert [run.info.status for run in client.search_runs([experiment])] == ["KILLED"]


def test_a_folder_a_damaged_file_and_a_server_that_is_away_are_named(
    tmp_path: Path, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stores.check_tracking(params, tmp_path).status is Status.OK, "a new clone has no records"
    assert not list(tmp_path.glob("mlflow.db*")), "looking made a store"
    (tmp_path / "mlflow.db").write_bytes(b"no database" * 200)
    damaged = stores.check_tracking(params, tmp_path)
    assert damaged.status is Status.FAIL, damaged
    for address in ("./mlruns", "http://127.0.0.1:9"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        found = stores.check_tracking(params, tmp_path)
        assert found.status is Status.FAIL
        assert "unset MLFLOW_TRACKING_URI" in found.remedy


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_prefect_server_is_asked_wherever_its_address_was_set(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/api"
        assert stores.check_prefect({"PREFECT_API_URL": address}).status is Status.OK
        profile = f'active = "team"\n[profiles.team]\nPREFECT_API_URL = "{address}"\n'
        (tmp_path / "profiles.toml").write_text(profile)
        assert stores.prefect_address({"PREFECT_HOME": str(tmp_path)}) == address
        wrong = stores.check_prefect({"PREFECT_API_URL": address.removesuffix("/api")})
        assert (wrong.status, "HTTP 404" in wrong.finding) == (Status.FAIL, True)
    finally:
        server.shutdown()
        server.server_close()
    assert stores.check_prefect({"PREFECT_API_URL": address}).status is Status.FAIL
    assert stores.check_prefect({"PREFECT_HOME": str(tmp_path / "none")}).status is Status.OK


def test_a_remote_that_is_there_and_one_that_is_not(small_project: Path, tmp_path: Path) -> None:
    assert "none configured" in stores.check_remote(small_project).finding
    config = small_project / ".dvc" / "config"
    config.write_text(f"[core]\n remote = store\n['remote \"store\"']\n url = {tmp_path / 'remote'}\n")
    assert stores.check_remote(small_project).status is Status.WARN
    (tmp_path / "remote" / "files" / "md5").mkdir(parents=True)  # as `dvc push` lays it out
    assert stores.check_remote(small_project).status is Status.OK
    config.write_text("[core]\n remote = nowhere\n")
    assert stores.check_remote(small_project).status is Status.FAIL


# ------------------------------------------------------------------------------------------- machine


def test_a_disk_and_a_memory_too_small_for_the_profile_fail(params: Params, tmp_path: Path) -> None:
    assert machine.check_disk(params, tmp_path, free=0.1e9).status is Status.FAIL
    assert machine.check_disk(params, tmp_path, free=50e9).status is Status.OK
    assert machine.check_memory(params, PROJECT_ROOT, available=0.5e9).status is Status.FAIL
    assert machine.check_memory(params, PROJECT_ROOT, available=16e9).status is Status.OK
    assert machine.check_disk(load_params(profile="a100x8"), tmp_path, free=50e9).status is Status.FAIL


def test_a_policy_that_cannot_fit_beside_vllm_is_refused_before_it_starts(params: Params) -> None:
    """trl#2927: training and vLLM on one GPU run out of memory after minutes of loading."""
    gpu = override(load_params(profile="gpu"), {"sft.processes": 1})
    assert check_gpu(gpu, [H200]).status is Status.OK
    assert check_gpu(override(gpu, {"rollout.gpu_memory_utilization": 0.95}), [H200]).status is Status.FAIL
    assert check_gpu(override(gpu, {"policy.lora_rank": 0}), [A100]).status is Status.FAIL
    assert "lower" in check_gpu(override(gpu, {"sft.micro_batch_tokens": 60_000}), [A100]).remedy
    assert check_gpu(gpu, [Gpu("NVIDIA H200", 140e9, 100e9)]).status is Status.WARN
    assert check_gpu(gpu, []).status is Status.FAIL
    assert check_gpu(load_params(profile="a100x8"), [A100] * 4).status is Status.FAIL
    assert check_gpu(params, []).status is Status.OK


def test_the_table_of_nvidia_smi_is_read_and_parts_of_a_gpu_are_not_counted() -> None:
    text = "NVIDIA H200, 143771, 1024\nNVIDIA A100-SXM4-80GB, [N/A], [N/A]\nOdd, name, 81920, 0\n"
    assert parse_gpus(text) == [
        Gpu("NVIDIA H200", 143771 * 2.0**20, 2.0**30),
        Gpu("Odd, name", 80 * 2.0**30, 0.0),
    ]


def test_a_merge_conflict_and_an_ignored_lock_are_found(project: Path) -> None:
    git = ["git", "-C", str(project), "-c", "user.name=t", "-c", "user.email=t@t"]
    for branch, parent, text in (("one", "HEAD", "a"), ("two", "one~1", "b")):
        subprocess.run([*git, "checkout", "-q", "-b", branch, parent], check=True)
        (project / "dvc.lock").write_text(text)
        subprocess.run([*git, "add", "-f", "dvc.lock"], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", branch], check=True)
    subprocess.run([*git, "merge", "-q", "one"], check=False, capture_output=True)
    assert "merge conflict" in machine.check_git(project).finding
    subprocess.run([*git, "merge", "--abort"], check=True)
    subprocess.run([*git, "rm", "-q", "--cached", "dvc.lock"], check=True)
    (project / ".gitignore").write_text("*.lock\n")
    assert "ignored" in machine.check_git(project).finding
