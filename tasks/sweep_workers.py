"""Worker processes of a sweep: started together, started again when one is killed, ended with their starter."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from tasks.process_group import Guarded
from tasks.sweep_plan import SweepError

_KILLED = 128  # exit codes above this name a signal


class _Worker:
    """One process of `python -m tasks.trial`, its output handed on line by line."""

    def __init__(
        self, command: list[str], env: Mapping[str, str], root: Path, say: Callable[[str], None]
    ) -> None:
        self.lines: list[str] = []
        self.guarded = Guarded(command, env, root)
        self._say = say
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.guarded.process.stdout or ():
            self.lines.append(line.rstrip())
            del self.lines[:-50]
            if line.strip():
                self._say(line.rstrip())

    def code(self) -> int | None:
        """Exit code, None while it runs."""
        return self.guarded.process.poll()

    def failure(self) -> str:
        """The worker's own words on why it ended."""
        self._reader.join(timeout=10)
        own = [line.removeprefix("error: ") for line in self.lines if line.startswith("error: ")]
        return "; ".join(own) or next((line for line in reversed(self.lines) if line.strip()), "no output")

    def stop(self) -> None:
        """End the process and what it has started."""
        self.guarded.let_go()
        self._reader.join()
        self.guarded.process.wait()


def run_workers(
    folder: Path,
    root: Path,
    count: int,
    env: Mapping[str, str],
    once: bool,
    say: Callable[[str], None],
    remaining: Callable[[], int],
    most_restarts: int,
) -> None:
    """Keep `count` workers at the sweep in `folder` until none of its trials remains.

    Args:
        once: each worker ends after one trial, for engines that do not give their memory back.
        say: takes the workers' output.
        remaining: number of trials that have not ended; called every second.
        most_restarts: of workers that were killed from outside.

    Raises:
        SweepError: a worker ended with an error, or was killed too often. The others are ended first.
    """
    command = [sys.executable, "-m", "tasks.trial", str(folder), *(["--once"] if once else [])]
    restarts = 0
    with ExitStack() as stack:

        def start(index: int) -> _Worker:
            worker = _Worker(command, {**env, **_devices(env, index)}, root, say)
            stack.callback(worker.stop)
            return worker

        workers: dict[int, _Worker] = {index: start(index) for index in range(count)}
        while workers:
            left = remaining()
            for index, worker in list(workers.items()):
                code = worker.code()
                if code is None:
                    continue
                del workers[index]
                if code > _KILLED:
                    restarts += 1
                    if restarts > most_restarts:
                        raise SweepError(
                            f"workers were killed {restarts} times, the last one by signal {code - _KILLED}; "
                            "free memory or lower sweep.workers, then run again"
                        )
                elif code != 0:
                    raise SweepError(
                        f"a worker failed: {worker.failure()}; repair it, then run again to go on"
                    )
                if left > len(workers) and (once or code != 0):
                    workers[index] = start(index)
            time.sleep(0.5)


def _devices(env: Mapping[str, str], index: int) -> dict[str, str]:
    """One of the GPUs that CUDA_VISIBLE_DEVICES lists, in turn; all workers share one GPU otherwise."""
    devices = [device for device in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    return {"CUDA_VISIBLE_DEVICES": devices[index % len(devices)]} if len(devices) > 1 else {}


def environment(run_id: str) -> dict[str, str]:
    """Environment of the workers of the sweep with this MLflow run."""
    from tasks.env import offline_environment
    from tasks.tracking import PARENT_RUN_VARIABLE

    quiet = {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
    return {**os.environ, **offline_environment(), **quiet, PARENT_RUN_VARIABLE: run_id}
