"""Public reports about training under DVC, MLflow and several ranks, on one small but real run.

The fixture copies the project, shrinks its parameters and runs `dvc repro sft` with two ranks: data, gate, training.
Every Python process in it notes which addresses it connects to, and cannot import Prefect.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tasks.env import offline_environment
from tasks.params import PROJECT_ROOT

COPIED = ("flows", "tasks", "models", "environments", "tools", "mlflow", "profiles")
FILES = ("params.yaml", "dvc.yaml", "pyproject.toml", ".dvcignore", ".gitignore", ".dvc/config")

SMALL = """\
data: {n_trajectories: 96, validation_trajectories: 8, validation_items: 8, test_items_per_size: 2, sizes: [4, 6, 8],
       shards: 2, workers: 1}
gate: {share_tolerance: 1.0}
policy: {hidden_size: 48, layers: 1, heads: 3, kv_heads: 3, intermediate_size: 64, vision_hidden_size: 32,
         vision_depth: 1, vocab_size: 1024}
sft: {epochs: 1.0, micro_batch_tokens: 2048, context_schedule: [512], processes: 2, checkpoint_every: 2, eval_every: 4}
"""

# Python imports this module at its start. It notes every address that is not this machine's own.
NOTE_CONNECTIONS = """\
import os, socket, sys
sys.modules["prefect"] = None
def _note(name):
    inner = getattr(socket.socket, name)
    def connect(self, address):
        own = ("127.", "::1", "localhost", "0.0.0.0")
        if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(own):
            with open(os.environ["CONNECTIONS"], "a") as file:
                file.write(f"{address}\\n")
            raise ConnectionRefusedError("no network in this test")
        return inner(self, address)
    setattr(socket.socket, name, connect)
_note("connect")
_note("connect_ex")
_resolve = socket.getaddrinfo
def _getaddrinfo(host, *rest, **named):
    own = (None, "", "localhost", "127.0.0.1", "0.0.0.0", "::1", "::", socket.gethostname())
    if host not in own and host not in tuple(name.encode() for name in own if name):
        with open(os.environ["CONNECTIONS"], "a") as file:
            file.write(f"{host}\\n")
        raise socket.gaierror("no network in this test")
    return _resolve(host, *rest, **named)
socket.getaddrinfo = _getaddrinfo
"""


@dataclass(frozen=True)
class Trained:
    """The copy after `dvc repro sft`."""

    root: Path
    output: str
    connections: Path
    env: dict[str, str]

    def runs(self) -> list[Run]:
        client = MlflowClient(f"sqlite:///{self.root / 'mlflow.db'}")
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        return client.search_runs(experiments)

    def dvc(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dvc", *arguments]
        return subprocess.run(
            command, cwd=self.root, env=self.env, capture_output=True, text=True, check=False
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("trained") / "a project"
    root.mkdir()
    for name in COPIED:
        shutil.copytree(PROJECT_ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PROJECT_ROOT / "data" / "ingested", root / "data" / "ingested")
    (root / ".dvc").mkdir()
    for name in FILES:
        shutil.copy(PROJECT_ROOT / name, root / name)
    blocks = {line.split(":")[0] for line in SMALL.splitlines() if line[0] != " "}
    laptop = (root / "profiles" / "laptop.yaml").read_text()
    kept = "".join(line for line in laptop.splitlines(True) if line.split(":")[0] not in blocks)
    (root / "profiles" / "laptop.yaml").write_text(kept + SMALL)
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "x"], check=True)
    side = tmp_path_factory.mktemp("side")
    (side / "sitecustomize.py").write_text(NOTE_CONNECTIONS)
    foreign = {"MLFLOW_TRACKING_URI", "RANK", "DVC_STAGE", "DVC_ROOT", "TOOLPLAN_PARENT_RUN_ID"}
    env = {name: value for name, value in os.environ.items() if name not in foreign}
    env |= offline_environment() | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(side),
        "CONNECTIONS": str(side / "connections"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "0",  # so that an attempt to ask the hub would be made, and noted
    }
    command = [sys.executable, "-m", "dvc", "repro", "sft"]
    done = subprocess.run(
        command, cwd=root, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return Trained(root, done.stdout + done.stderr, side / "connections", env)


def test_two_ranks_make_one_run(trained: Trained) -> None:
    """transformers#15663, mlflow#11782: every rank opened a run of its own."""
    runs = trained.runs()
    assert sorted(run.info.run_name for run in runs) == ["cold_start", "sft", "validate"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    sft = next(run for run in runs if run.info.run_name == "sft")
    steps = MlflowClient(f"sqlite:///{trained.root / 'mlflow.db'}").get_metric_history(
        sft.info.run_id, "sft/loss"
    )
    assert len({point.step for point in steps}) == len(steps) > 2, "a second rank wrote the same steps"


def test_two_ranks_end_and_leave_no_state_behind(trained: Trained) -> None:
    """DeepSpeed#797: saving on rank 0 alone waits for ever. Checkpoints of a finished stage fill the disk."""
    assert (trained.root / "outputs" / "sft" / "config.json").is_file()
    states = trained.root / "outputs" / ".checkpoints" / "sft"
    assert not [path for path in states.rglob("*") if path.is_file()]


def test_training_uploads_no_weights(trained: Trained) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#3804: every checkpoint went to the tracking server, gigabytes at a time."""
    files = [path for path in (trained.root / "mlartifacts").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if path.suffix in {".safetensors", ".bin", ".pt", ".pkl"}]
    assert sum(path.stat().st_size for path in files) < 5e6


def test_nothing_is_asked_of_the_network(trained: Trained) -> None:
    """aim#2539: telemetry and look-ups hang on machines without a network."""
    noted = trained.connections.read_text().splitlines() if trained.connections.exists() else []
    assert not noted


def test_the_noting_of_connections_works(trained: Trained) -> None:
    probe = trained.connections.with_name("probe")
    code = "import urllib.request as r\ntry: r.urlopen('http://example.invalid')\nexcept OSError: pass"
    env = {**trained.env, "CONNECTIONS": str(probe)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    assert "example.invalid" in probe.read_text()


def test_no_step_needs_prefect(trained: Trained) -> None:
    """PrefectHQ/prefect#8652: `get_run_logger` outside a run is an error. The steps above could not import Prefect."""
    command = [sys.executable, "-c", "import prefect"]
    probe = subprocess.run(command, env=trained.env, capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in probe.stderr
    assert {run.info.status for run in trained.runs()} == {"FINISHED"}


def test_the_data_are_few_files(trained: Trained) -> None:
    """treeverse/dvc#7607: pushing and hashing 600,000 small files took hours."""
    files = [path for path in (trained.root / "data" / "cold_start").rglob("*") if path.is_file()]
    assert len(files) <= 2 + 5, "more than the two shards, the other splits and the manifest"


def test_caches_of_another_python_and_of_tools_rerun_nothing(trained: Trained) -> None:
    """A .pyc that appears in a dependency folder made DVC run the stage again."""
    for name in (
        "tools/__pycache__/base.cpython-313.opt-1.pyc",
        "tools/.DS_Store",
        "tools/.ipynb_checkpoints/x.py",
    ):
        (trained.root / name).parent.mkdir(exist_ok=True)
        (trained.root / name).write_bytes(b"x")
    (trained.root / "flows" / "pipeline.py").write_text("# another flow\n")
    text = (trained.root / "params.yaml").read_text()
    (trained.root / "params.yaml").write_text(f"# a comment\n{text}\n")
    status = trained.dvc("status", "sft", "validate", "cold_start")
    assert "up to date" in status.stdout, status.stdout + status.stderr


def test_a_stage_that_ended_leaves_its_cost_for_the_next_estimate(trained: Trained) -> None:
    code = (
        "from tasks.estimate import estimate; from tasks.params import load_params\n"
        "print(estimate('sft', load_params()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=trained.root,
        env=trained.env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "as recorded" in done.stdout


def test_the_doctor_finds_nothing_wrong_with_a_used_project(trained: Trained) -> None:
    shutil.copy(PROJECT_ROOT / "constraints.txt", trained.root / "constraints.txt")
    env = {name: value for name, value in trained.env.items() if name != "PREFECT_API_URL"}
    env["PREFECT_HOME"] = str(trained.root / "prefect")
    done = subprocess.run(
        [sys.executable, "-m", "tasks.doctor"],
        cwd=trained.root,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ready to run" in done.stdout
    for name in ("mlflow", "orphans", "dvc lock", "locks", "leftovers"):
        assert any(line.startswith("ok") and f" {name} " in line for line in done.stdout.splitlines()), (
            done.stdout
        )
