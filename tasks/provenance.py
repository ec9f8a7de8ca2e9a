"""Tags that say where a run comes from: commit, data, machine, process, and the command that repeats it."""

from __future__ import annotations

import getpass
import hashlib
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from tasks.dvc_graph import lock_digest
from tasks.params import Params, config_hash


def run_tags(params: Params, root: Path) -> dict[str, str]:
    """Tags of a new run. Values that do not exist here (no git, no dvc.lock yet) are left out.

    MLflow's own git tag is not enough: it says nothing about uncommitted changes.
    """
    commit = git(root, "rev-parse", "HEAD")
    changes = git(root, "status", "--porcelain")
    lock = root / "dvc.lock"
    tags = {
        **owner_tags(),
        "cmd": command_line(),
        "mlflow.source.name": command_line(),
        "mlflow.source.type": "LOCAL",
        "mlflow.user": getpass.getuser(),
        "profile": params.profile,
        "seed": str(params.seed),
        "params.sha": config_hash(params, set(type(params).model_fields) - {"tracking"}),
        "git.commit": commit,
        "mlflow.source.git.commit": commit,
        "git.dirty": None if changes is None else str(bool(changes)).lower(),
        "dvc.lock_md5": hashlib.md5(lock.read_bytes()).hexdigest() if lock.is_file() else None,
        "data.md5": lock_digest(root, "cold_start", "data/cold_start"),
        "prefect.flow_run_id": os.environ.get("TOOLPLAN_FLOW_RUN_ID"),
    }
    return {name: value for name, value in tags.items() if value is not None}


def owner_tags() -> dict[str, str]:
    """Which process writes a run: enough to tell later whether it still lives."""
    process = psutil.Process()
    return {
        "host": socket.gethostname(),
        "pid": str(process.pid),
        "pid_started": f"{process.create_time():.2f}",
    }


def owner_is_dead(tags: dict[str, str]) -> bool:
    """Whether the process in `owner_tags` is known to be gone. False for another host: nobody can tell."""
    if tags.get("host") != socket.gethostname() or "pid" not in tags:
        return False
    try:
        started = psutil.Process(int(tags["pid"])).create_time()
    except psutil.NoSuchProcess:
        return True
    # The number may have been given to a new process; clocks are adjusted by less than two seconds.
    return abs(started - float(tags.get("pid_started", started))) > 2


def dvc_process() -> psutil.Process | None:
    """The `dvc` that started this process, None if none did."""
    if "DVC_STAGE" not in os.environ:
        return None
    for parent in psutil.Process().parents():
        if any(Path(word).name == "dvc" or "/dvc/__main__.py" in word for word in parent.cmdline()[:3]):
            return parent
    return None


def command_line() -> str:
    """The command that repeats this process, without machine paths, e.g. `python -m tasks.sft --no-tools`."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def git(root: Path, *arguments: str) -> str | None:
    """Output of a git command, None without git or without a repository or commit."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
