"""Run a command so that nothing of it outlives its caller.

`dvc repro` leaves the stage's process running when it gets SIGTERM, and nobody can react to SIGKILL. So a
small guard process stands between caller and command: the caller holds a pipe to it, and when the pipe
closes, for whatever reason, the guard ends every process below it: SIGTERM first, SIGKILL after a grace time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

GRACE_S = 20.0


class CommandTimeout(Exception):
    """The command did not end in time; it has been stopped."""


class Guarded:
    """A command in its own session, behind a guard. Leaving the `with` block ends all its processes.

    Args:
        command: program and arguments.
        env: its whole environment.
        cwd: its folder; the present one when absent.
        quiet: drop its output instead of passing it through `process.stdout`.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None, quiet: bool = False
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, *command],  # -P: this folder's modules shadow nothing
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if quiet else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *exc: object) -> None:
        self.let_go()
        for _ in self.process.stdout or ():
            pass  # a full pipe would block the clean-up
        self.process.wait()

    def let_go(self) -> None:
        """Close the pipe: the guard ends the command. Returns at once."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def run_guarded(
    command: Sequence[str],
    on_line: Callable[[str], None],
    cwd: Path,
    env: Mapping[str, str],
    timeout_s: float | None = None,
) -> int:
    """Run `command` in its own session and pass its output on, line by line. Returns its exit code.

    On any exception, KeyboardInterrupt included, all its processes are ended before the exception goes on.

    Raises:
        CommandTimeout: it took longer than `timeout_s` seconds.
    """
    timed_out = threading.Event()
    with Guarded(command, env, cwd) as guarded:

        def give_up() -> None:
            timed_out.set()
            guarded.let_go()

        timer = threading.Timer(timeout_s or 0, give_up)
        timer.daemon = True
        if timeout_s is not None:
            timer.start()
        try:
            for line in guarded.process.stdout or ():
                on_line(line.rstrip())
            code = guarded.process.wait()
        finally:
            timer.cancel()
    if timed_out.is_set():
        raise CommandTimeout(f"stopped after {timeout_s:g} s")
    return code


def _guard(command: Sequence[str]) -> int:
    """The guard: run the command, watch the pipe on standard input."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    # The child may be gone before its children have their signal, and this process must not end until they have:
    # without their parent nobody would find them again.
    ending = threading.Lock()

    def watch() -> None:
        while os.read(0, 1024):
            pass
        with ending:
            end_session()

    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    with ending:
        end_session()  # what a killed child has left behind
    return code if code >= 0 else 128 - code


def end_session(grace_s: float = GRACE_S) -> None:
    """End all other processes of this session and below this process: SIGTERM, after the grace SIGKILL.

    By session, because a child whose parent has ended no longer counts as a descendant; by descent, because
    launchers such as DeepSpeed's put their workers into sessions of their own.
    """
    deadline = time.monotonic() + grace_s
    seen: dict[int, psutil.Process] = {}
    while True:
        for process in [*_session_members(), *psutil.Process().children(recursive=True)]:
            if process.pid not in seen:
                seen[process.pid] = process
                _signal(process, signal.SIGTERM)
        alive = [process for process in seen.values() if _is_alive(process)]
        if not alive:
            return
        if time.monotonic() > deadline:
            for process in alive:
                _signal(process, signal.SIGKILL)
        time.sleep(0.05)


def _session_members() -> list[psutil.Process]:
    own, session = os.getpid(), os.getsid(0)
    members = []
    for process in psutil.process_iter():
        try:
            if process.pid != own and os.getsid(process.pid) == session:
                members.append(process)
        except (ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or is not ours
    return members


def _signal(process: psutil.Process, signum: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    sys.exit(_guard(sys.argv[1:]))
