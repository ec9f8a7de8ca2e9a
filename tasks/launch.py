"""Starting a training stage once per GPU (or CPU share): the stage's own command starts its ranks.

A launcher such as torchrun gives every rank a session of its own, so killing the stage's process group would leave
the ranks behind. Here they stay in the group, and a rank whose launcher is gone ends itself.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from tasks.params import Params

LAUNCHER_VARIABLE = "TOOLPLAN_LAUNCHER_PID"


class RankFailed(Exception):
    """A rank ended with an error; its own output says why."""


def start_ranks(module: str, arguments: Sequence[str], params: Params) -> bool:
    """Run `python -m module` once per rank and wait, if this process should; returns whether it did.

    With `sft.processes` 1, or inside a rank already (a launcher of several hosts sets RANK too), the caller goes on
    itself.

    Raises:
        RankFailed: a rank failed; the others were stopped.
    """
    if "RANK" in os.environ:
        _end_with_launcher()
        return False
    if params.sft.processes == 1:
        return False
    run_ranks([sys.executable, "-m", module, *arguments], params.sft.processes)
    return True


def run_ranks(command: Sequence[str], count: int) -> None:
    """Start `command` as ranks 0 to count - 1 on this host and wait for all. Raises RankFailed."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    port = str(_free_port())
    children: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, LAUNCHER_VARIABLE: str(os.getpid())}
            children.append(subprocess.Popen(command, env={**os.environ, **place, **meeting}))
        while any(child.poll() is None for child in children):
            _raise_for_failure(children)
            time.sleep(0.2)
        _raise_for_failure(children)
    finally:
        _stop(children)
        signal.signal(signal.SIGTERM, previous)


def _raise_for_failure(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank, child in enumerate(children):
        if child.poll() not in (None, 0):
            raise RankFailed(f"rank {rank} ended with exit code {child.returncode}; its output is above")


def _stop(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()
    for child in children:
        try:
            child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _end_with_launcher() -> None:
    """Watch the launcher, if it is ours: ranks of a killed one would train on beside those of the next attempt."""
    if os.environ.get(LAUNCHER_VARIABLE) != str(os.getppid()):
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(15.0)  # for the MLflow run to close
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
