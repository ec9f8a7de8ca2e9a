"""`dvc repro` that waits for its turn, and takes its stage with it when it is stopped.

DVC alone refuses a second `dvc repro` in mid-stage with "is busy", even with --wait-for-lock (treeverse/dvc#10465),
and leaves the stage's process running when it is terminated. The lock is the one that the pipeline's flow holds.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.env import offline_environment
from tasks.params import PROJECT_ROOT

logger = logging.getLogger("tasks.repro")


def repro(arguments: Sequence[str], root: Path = PROJECT_ROOT) -> int:
    """Run `dvc repro` once nobody else does; its exit code. Its output goes to stdout."""
    from filelock import FileLock, Timeout

    from tasks.process_group import run_guarded

    file = root / ".dvc" / "tmp" / "pipeline.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("another pipeline is at work in %s; waiting for it to end", root)
        lock.acquire()
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    env = {**os.environ, **offline_environment(), "PATH": programs}  # stages call `python`
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", *arguments]
    try:
        return run_guarded(command, lambda line: print(line, flush=True), root, env)
    finally:
        lock.release()


def main() -> int:
    """Hand the arguments on."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.repro",
        description="Run `dvc repro` with the same arguments, after any pipeline that is at work here.",
        epilog="Example: python -m tasks.repro --single-item grpo",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of `dvc repro`")
    return repro(parser.parse_args().arguments)


if __name__ == "__main__":
    from tasks.cli import run_main

    run_main(main)
