"""`make up` and `make down`: what one person needs on one machine to schedule flows and look at runs.

    Prefect server    schedules, states, logs           outputs/services/prefect.db, or PostgreSQL
    MLflow server     pages over the records of runs    mlflow.db, or PostgreSQL
    Optuna dashboard  pages over sweeps, if installed   the sweeps' journal
    worker            runs what is due, on this machine

A server that is configured already (PREFECT_API_URL, MLFLOW_TRACKING_URI) is used instead of starting one.
Each service is a process group of its own with a record and a log in outputs/services/; `down` ends those
groups and nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.cli import run_main
from tasks.databases import DatabaseError, Databases, resolve_databases
from tasks.env import offline_environment
from tasks.params import PROJECT_ROOT
from tasks.service_process import Service, ServiceError, is_running, start, stop, wait_until_ready

POOL = "toolplan"
HOST = "127.0.0.1"
# The worker ends first, while there are servers that its runs can report to.
STOP_ORDER = ("worker", "optuna", "mlflow", "prefect")


@dataclass(frozen=True)
class Ports:
    """TCP ports on this machine."""

    prefect: int = 4200
    mlflow: int = 5000
    optuna: int = 8080


def up(state: Path, ports: Ports, root: Path = PROJECT_ROOT) -> dict[str, str]:
    """Start what is not running yet and deploy all flows. Returns the address of each page.

    Args:
        state: folder for records, logs and Prefect's database.
        ports: where to serve.
        root: the project.

    Raises:
        ServiceError: something did not start; what this call had started is stopped again.
    """
    state.mkdir(parents=True, exist_ok=True)
    databases = resolve_databases(root, state)
    env = client_environment(ports)
    before = {name for name in STOP_ORDER if is_running(state, name)}
    try:
        servers = _servers(databases, ports, root, env)
        for service in servers:
            start(service, state)
        for service in servers:
            wait_until_ready(service, state)
        _prefect(env, root, "work-pool", "create", POOL, "--type", "process", "--overwrite")
        _prefect(env, root, "--no-prompt", "deploy", "--all")
        _run([sys.executable, "-m", "flows.automations"], env, root, "flows.automations")
        worker = _worker(env, state)
        start(worker, state)
        wait_until_ready(worker, state)
    except BaseException:
        for name in STOP_ORDER:
            if name not in before:
                stop(name, state)
        raise
    pages = {service.about: service.page for service in servers}
    return {**_configured(), **pages}


def down(state: Path) -> list[str]:
    """Stop what `up` has started in `state`. Returns the names of what was running."""
    return [name for name in STOP_ORDER if stop(name, state)]


def client_environment(ports: Ports) -> dict[str, str]:
    """The environment of the worker and of commands: this Python first, and where the servers are."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {
        "PREFECT_API_URL": f"http://{HOST}:{ports.prefect}/api",
        "MLFLOW_TRACKING_URI": f"http://{HOST}:{ports.mlflow}",
        # Signs of life, so that automations/crashed.yaml notices a dead run within minutes.
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        **os.environ,
        **offline_environment(),
        "PATH": path,
    }


def _configured() -> dict[str, str]:
    """Servers that the user has already."""
    names = {"PREFECT_API_URL": "Prefect (yours)", "MLFLOW_TRACKING_URI": "MLflow (yours)"}
    return {about: os.environ[name] for name, about in names.items() if _is_server(name)}


def _is_server(variable: str) -> bool:
    return os.environ.get(variable, "").startswith(("http://", "https://"))


def _servers(databases: Databases, ports: Ports, root: Path, env: Mapping[str, str]) -> list[Service]:
    services = []
    if not _is_server("PREFECT_API_URL"):
        services.append(_prefect_server(databases, ports, env))
    if not _is_server("MLFLOW_TRACKING_URI"):
        services.append(_mlflow_server(databases, ports, root, env))
    if importlib.util.find_spec("optuna_dashboard") is not None:
        services += _optuna_dashboard(ports, root, env)
    return services


def _prefect_server(databases: Databases, ports: Ports, env: Mapping[str, str]) -> Service:
    page = f"http://{HOST}:{ports.prefect}"
    command = ("prefect", "server", "start", "--host", HOST, "--port", str(ports.prefect))
    # Addresses of databases hold passwords: they go through the environment, which `ps` does not show.
    own = {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": databases.prefect,
        # The defaults, 10 and 5 s, are too short for a machine that trains (PrefectHQ/prefect#19771).
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
        "PREFECT_UI_API_URL": f"{page}/api",
    }
    return Service("prefect", "Prefect", command, {**env, **own}, ports.prefect, page, f"{page}/api/health")


def _mlflow_server(databases: Databases, ports: Ports, root: Path, env: Mapping[str, str]) -> Service:
    page = f"http://{HOST}:{ports.mlflow}"
    command = ("mlflow", "server", "--host", HOST, "--port", str(ports.mlflow), "--workers", "1")
    own = {
        "MLFLOW_BACKEND_STORE_URI": databases.mlflow,
        # Files lie in mlartifacts/, as after `make run`: both ways read what the other has written.
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": (root / "mlartifacts").as_uri(),
        "MLFLOW_SERVE_ARTIFACTS": "false",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    env = {name: value for name, value in env.items() if name != "MLFLOW_TRACKING_URI"}
    return Service("mlflow", "MLflow", command, {**env, **own}, ports.mlflow, page, f"{page}/health")


def _optuna_dashboard(ports: Ports, root: Path, env: Mapping[str, str]) -> list[Service]:
    journals = sorted(
        (root / "outputs" / "sweeps").glob("*/journal.log"), key=lambda file: file.stat().st_mtime
    )
    if not journals:
        return []  # before the first sweep it has nothing to show, and refuses to start
    page = f"http://{HOST}:{ports.optuna}"
    command = ("optuna_dashboard._cli", str(journals[-1]), "--host", HOST, "--port", str(ports.optuna))
    return [Service("optuna", "Optuna", command, dict(env), ports.optuna, page, page)]


def _worker(env: Mapping[str, str], state: Path) -> Service:
    command = ("prefect", "worker", "start", "--pool", POOL, "--type", "process")
    return Service("worker", "worker", command, dict(env), None, "", None, ready_line="started!", cwd=state)


def _prefect(env: Mapping[str, str], root: Path, *arguments: str) -> None:
    _run([sys.executable, "-m", "prefect", *arguments], env, root, f"prefect {' '.join(arguments[:2])}")


def _run(command: list[str], env: Mapping[str, str], root: Path, what: str) -> None:
    done = subprocess.run(command, cwd=root, env=dict(env), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise ServiceError(f"{what}: {' '.join(said[-3:]) or 'no output'}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.services",
        description="Start or stop Prefect, MLflow, the Optuna dashboard and a worker on this machine.",
        epilog="Example: python -m tasks.services up --prefect-port 4300",
    )
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument("--prefect-port", type=int, default=Ports.prefect, help="default %(default)s")
    parser.add_argument("--mlflow-port", type=int, default=Ports.mlflow, help="default %(default)s")
    parser.add_argument("--optuna-port", type=int, default=Ports.optuna, help="default %(default)s")
    parser.add_argument(
        "--state",
        type=Path,
        default=PROJECT_ROOT / "outputs" / "services",
        help="folder for records and logs (outputs/services)",
    )
    arguments = parser.parse_args()
    state = arguments.state.resolve()
    if arguments.action == "down":
        stopped = down(state)
        print(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")
        return
    ports = Ports(arguments.prefect_port, arguments.mlflow_port, arguments.optuna_port)
    for about, page in up(state, ports).items():
        print(f"{about:16} {page}")
    print(f"logs             {state}")
    env = client_environment(ports)
    print("to use them from this terminal:")
    print(
        f"  export PREFECT_API_URL={env['PREFECT_API_URL']} MLFLOW_TRACKING_URI={env['MLFLOW_TRACKING_URI']}"
    )


if __name__ == "__main__":
    run_main(main, ServiceError, DatabaseError)
