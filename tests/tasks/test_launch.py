"""Ranks live and die together, however their launcher ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest


def _start(what: str, folder: Path) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "-m", "tests.tasks.ranks", what, str(folder)]
    return subprocess.Popen(command, env=env, start_new_session=True, stderr=subprocess.DEVNULL)


def _pids(folder: Path) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        files = [folder / f"rank{rank}" for rank in (0, 1)]
        if all(file.exists() and file.read_text() for file in files):
            return [int(file.read_text()) for file in files]
        time.sleep(0.1)
    raise AssertionError("the ranks did not start")


def _gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        time.sleep(0.2)
    return False


def test_all_ranks_end_well(tmp_path: Path) -> None:
    assert _start("end", tmp_path).wait(60) == 0
    assert _gone(_pids(tmp_path), 5)


def test_a_failed_rank_fails_the_stage_and_stops_the_others(tmp_path: Path) -> None:
    assert _start("fail", tmp_path).wait(90) != 0
    assert _gone(_pids(tmp_path), 5)


@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_its_killed_launcher(tmp_path: Path, number: signal.Signals, group: bool) -> None:
    """Prefect #20979, #21112: a cancelled run left its GPU processes behind."""
    launcher = _start("sleep", tmp_path)
    pids = _pids(tmp_path)
    (os.killpg if group else os.kill)(launcher.pid, number)
    launcher.wait(30)
    assert _gone(pids, 20)
