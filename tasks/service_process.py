"""A background process with a record: started in a group of its own, found again later, ended as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

STARTUP_S = 120.0
GRACE_S = 30.0


class ServiceError(Exception):
    """A service did not start; one line with what to do."""


@dataclass(frozen=True)
class Service:
    """A process to run as `python -m <command>`.

    `port` and `health` are None where it does not serve; then `ready_line` in its log says that it is up.
    """

    name: str
    about: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    port: int | None
    page: str
    health: str | None
    ready_line: str = ""
    cwd: Path | None = None


def start(service: Service, state: Path) -> None:
    """Start it in the background, unless it is running.

    Raises:
        ServiceError: its port is taken by something else.
    """
    if is_running(state, service.name):
        return
    if service.port is not None and _is_taken(service.port):
        raise ServiceError(
            f"{service.about}: port {service.port} is in use by another program; stop that, or choose another "
            f"port with --{service.name}-port"
        )
    with _log(state, service.name).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *service.command],
            cwd=service.cwd or state,
            env=dict(service.env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    record = {"pid": process.pid, "started": psutil.Process(process.pid).create_time()}
    _record(state, service.name).write_text(json.dumps(record))


def wait_until_ready(service: Service, state: Path) -> None:
    """Return as soon as it answers.

    Raises:
        ServiceError: it ended, or does not answer after two minutes; with the end of its log.
    """
    deadline = time.monotonic() + STARTUP_S
    while not _is_ready(service, state):
        if not is_running(state, service.name):
            raise ServiceError(f"{service.about} ended: {_last_words(state, service.name)}")
        if time.monotonic() > deadline:
            raise ServiceError(f"{service.about} does not answer: {_last_words(state, service.name)}")
        time.sleep(0.2)


def is_running(state: Path, name: str) -> bool:
    """Whether the process in the record lives. A number that was given to another process is not it."""
    return _process(state, name) is not None


def stop(name: str, state: Path) -> bool:
    """End its process group and everything below it: SIGTERM, after the grace SIGKILL. False if not running."""
    process = _process(state, name)
    if process is None:
        _record(state, name).unlink(missing_ok=True)
        return False
    members = [process, *process.children(recursive=True)]
    for each in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(members, timeout=GRACE_S)
    for each in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what has come up meanwhile
    _record(state, name).unlink(missing_ok=True)
    return True


def _process(state: Path, name: str) -> psutil.Process | None:
    file = _record(state, name)
    if not file.is_file():
        return None
    record = json.loads(file.read_text())
    try:
        process = psutil.Process(record["pid"])
        same = abs(process.create_time() - record["started"]) < 2
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def _is_ready(service: Service, state: Path) -> bool:
    if service.health is None:
        return service.ready_line in _log(state, service.name).read_text(errors="replace")
    try:
        with urllib.request.urlopen(service.health, timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _last_words(state: Path, name: str) -> str:
    file = _log(state, name)
    lines = [line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return f"{' '.join(lines[-2:])[-400:] or 'no output'} (all of it: {file})"


def _record(state: Path, name: str) -> Path:
    return state / f"{name}.json"


def _log(state: Path, name: str) -> Path:
    return state / f"{name}.log"
