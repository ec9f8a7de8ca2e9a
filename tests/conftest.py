"""Fixtures that several areas share. Nothing here touches the project's own data, records or settings."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.env import offline_environment
from tasks.params import PROJECT_ROOT, Params, load_params

# Set by a surrounding pipeline or by the user: tests must not write there.
_FOREIGN = (
    "MLFLOW_TRACKING_URI",
    "TOOLPLAN_PARENT_RUN_ID",
    "TOOLPLAN_FLOW_RUN_ID",
    "DVC_STAGE",
    "DVC_ROOT",
    "RANK",
)


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, and so would every child that a test interrupts."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _local_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _FOREIGN:
        monkeypatch.delenv(name, raising=False)
    for name, value in offline_environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def params() -> Params:
    """The shipped parameters."""
    return load_params(profile="laptop")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables and nothing in them: making them takes two seconds each time."""
    from mlflow import MlflowClient

    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def records(tmp_path: Path, empty_store: Path) -> Path:
    """A folder to record runs in."""
    root = tmp_path / "records"
    root.mkdir()
    shutil.copy(empty_store, root / "mlflow.db")
    return root


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One temporary Prefect server for the session: it takes ten seconds to start."""
    os.environ.update(offline_environment())
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


STAGE_SCRIPT = '''\
"""One stage: appends its name to a log, then does what the file `mode` says."""
import os, pathlib, sys, time
name, root = sys.argv[1], pathlib.Path.cwd()
mode = root / "mode"
mode = mode.read_text().split() if mode.exists() else []
with (root / "calls").open("a") as calls:
    calls.write(name + "\\n")
if mode == [name, "fails"]:
    print("error: the oven is cold", file=sys.stderr)
    sys.exit(1)
if mode == [name, "hangs"]:
    (root / "pid").write_text(str(os.getpid()))
    time.sleep(600)
(root / "outputs").mkdir(exist_ok=True)
(root / "outputs" / f"{name}.txt").write_text(name)
'''
DVC_YAML = """\
stages:
  second:
    cmd: python stage.py second
    deps: [stage.py, outputs/first.txt]
    params:
      - grpo.lr
      - profiles/${profile}.yaml: [grpo]
    outs: [outputs/second.txt]
  first:
    cmd: python stage.py first
    deps: [stage.py]
    params:
      - data
      - profiles/${profile}.yaml: [data]
    outs: [outputs/first.txt]
"""


@pytest.fixture
def small_project(tmp_path: Path, empty_store: Path) -> Path:
    """A git and DVC repository with two stages (written in the wrong order) and the shipped parameters."""
    root = tmp_path / "a project"
    root.mkdir()
    for name in ("params.yaml", ".dvcignore", ".gitignore"):
        shutil.copy(PROJECT_ROOT / name, root / name)
    shutil.copytree(PROJECT_ROOT / "profiles", root / "profiles")
    shutil.copy(empty_store, root / "mlflow.db")
    (root / ".dvc").mkdir()
    shutil.copy(PROJECT_ROOT / ".dvc" / "config", root / ".dvc" / "config")
    (root / "stage.py").write_text(STAGE_SCRIPT)
    (root / "dvc.yaml").write_text(DVC_YAML)
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    return root
