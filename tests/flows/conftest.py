"""A project whose stages take a moment, and the real services over it: server, worker, MLflow."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tasks.env import offline_environment
from tasks.params import PROJECT_ROOT

CODE = ("flows", "tasks", "models", "environments", "tools", "profiles", "automations", "mlflow")
FILES = ("params.yaml", "prefect.yaml", ".dvcignore", ".gitignore", ".dvc/config")
# `mode` says what a stage does: waits for the file `go` (first a shrunk training), or fails.
STAGE = """\
import os, pathlib, sys, time
name, out = sys.argv[1], pathlib.Path("outputs")
mode = pathlib.Path("mode").read_text().split() if pathlib.Path("mode").exists() else []
out.mkdir(exist_ok=True)
def wait(step):
    (out / "pid").write_text(str(os.getpid()))
    done = 0
    while not pathlib.Path("go").exists():
        step(done)
        done += 1
        time.sleep(0.2)
if mode == [name, "fails"]:
    sys.exit("error: the oven is cold")
if mode == [name, "waits"]:
    wait(lambda done: print(f"{name}: {done} of 1000", flush=True))
if mode == [name, "trains"]:
    from tasks.params import load_params
    from tasks.tracking import stage_run
    with stage_run(name, load_params()) as run:
        wait(lambda done: run.log_metrics({"grpo/loss": 1.0 / (1 + done)}, done))
(out / f"{name}.txt").write_text(name)
"""
DVC_YAML = """\
stages:
  first:
    cmd: python stage.py first
    deps: [stage.py]
    params: [data]
    outs: [outputs/first.txt]
  second:
    cmd: python stage.py second
    deps: [stage.py, outputs/first.txt]
    params: [grpo.lr]
    outs: [outputs/second.txt]
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_project(root: Path) -> Path:
    """A git and DVC repository with this project's code and deployments, and two quick stages."""
    for name in CODE:
        shutil.copytree(PROJECT_ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / ".dvc").mkdir()
    for name in FILES:
        shutil.copy(PROJECT_ROOT / name, root / name)
    (root / "stage.py").write_text(STAGE)
    (root / "dvc.yaml").write_text(DVC_YAML)
    (root / ".gitignore").write_text((root / ".gitignore").read_text() + "/mode\n/go\n")
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "--quiet"], ["add", "--all"], [*identity, "commit", "--quiet", "-m", "start"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


@dataclass
class Team:
    """Services over a project, as `make up` starts them."""

    root: Path
    state: Path
    ports: dict[str, int]
    database: str = ""

    @property
    def env(self) -> dict[str, str]:
        """Of a user's terminal beside the services."""
        return {
            **os.environ,
            **offline_environment(),
            "PREFECT_API_URL": f"http://127.0.0.1:{self.ports['prefect']}/api",
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self.ports['mlflow']}",
            "PREFECT_HOME": str(self.state / "home"),
            "TOOLPLAN_DATABASE": self.database,
        }

    def services(self, action: str) -> subprocess.CompletedProcess[str]:
        """`python -m tasks.services ACTION`."""
        ports = [word for name, port in self.ports.items() for word in (f"--{name}-port", str(port))]
        env = {
            name: value
            for name, value in self.env.items()
            if name not in {"PREFECT_API_URL", "MLFLOW_TRACKING_URI"}
        }
        return subprocess.run(
            [sys.executable, "-m", "tasks.services", action, "--state", str(self.state), *ports],
            cwd=self.root,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """`python -m COMMAND` in the project, as a user does."""
        return subprocess.run(
            [sys.executable, "-m", *command],
            cwd=self.root,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )

    def submit(self, deployment: str, **parameters: Any) -> UUID:
        """A run of a deployment that is due now."""
        found = self.client.read_deployment_by_name(deployment)
        return self.client.create_flow_run_from_deployment(found.id, parameters=parameters).id

    def state_of(self, run: UUID) -> str:
        state = self.client.read_flow_run(run).state
        return "" if state is None else state.name

    def ended(self, run: UUID, patience_s: float = 300) -> str:
        """Name of the run's final state."""

        def final() -> str | None:
            state = self.client.read_flow_run(run).state
            return state.name if state is not None and state.is_final() else None

        return eventually(final, patience_s, lambda: (self.state / "worker.log").read_text()[-3000:])

    @property
    def client(self) -> Any:
        from prefect.client.orchestration import SyncPrefectClient

        return SyncPrefectClient(self.env["PREFECT_API_URL"])

    @property
    def mlflow(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.env["MLFLOW_TRACKING_URI"])

    def mlflow_runs(self, flow_run: UUID) -> list[Any]:
        """All MLflow runs of a flow run, the parent first."""
        experiment = self.mlflow.get_experiment_by_name("toolplan-vsp").experiment_id
        filters = f"tags.`prefect.flow_run_id` = '{flow_run}'"
        return list(self.mlflow.search_runs([experiment], filters, order_by=["start_time ASC"]))


def eventually(look: Callable[[], Any], patience_s: float, explain: Callable[[], str] = str) -> Any:
    """What `look` returns as soon as that is true."""
    deadline = time.monotonic() + patience_s
    while not (found := look()):
        assert time.monotonic() < deadline, explain()
        time.sleep(0.2)
    return found


@pytest.fixture(scope="session")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """Everything that `make up` starts, once for all tests: it takes half a minute."""
    base = tmp_path_factory.mktemp("team")
    root = base / "a project"
    root.mkdir()
    ports = {name: free_port() for name in ("prefect", "mlflow", "optuna")}
    services = Team(make_project(root), base / "state", ports)
    try:
        done = services.services("up")
        assert done.returncode == 0, done.stderr
        yield services
    finally:
        services.services("down")


@pytest.fixture
def mode(team: Team) -> Iterator[Callable[[str], None]]:
    """Sets what stages do, with nothing brought up to date before. Stages do their work again after."""

    def set_mode(text: str) -> None:
        (team.root / "mode").write_text(text)

    (team.root / "go").unlink(missing_ok=True)
    (team.root / "outputs" / "pid").unlink(missing_ok=True)
    stage = team.root / "stage.py"
    stage.write_text(stage.read_text() + "#")  # new code: out of date, and not in the run cache
    yield set_mode
    (team.root / "mode").unlink(missing_ok=True)
    (team.root / "go").touch()
