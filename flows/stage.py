"""One DVC stage as a Prefect task, in its own process group."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows.artifacts import StageProgress
from tasks.env import offline_environment
from tasks.pipeline_report import Outcome
from tasks.process_group import CommandTimeout, run_guarded

# What DVC repeats after every stage; `git add dvc.lock` once at the end is enough.
_DVC_HINTS = ("To track the changes", "git add", "To enable auto staging", "dvc config", "Use `dvc push`")


class StageFailed(Exception):
    """A stage ended with an error, or was killed (`killed`), which is worth another attempt."""

    def __init__(self, message: str, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


def worth_a_retry(task: Any, task_run: Any, state: Any) -> bool:
    """Only a stage that was killed from outside (out of memory, a lost node) is tried again: it goes on from
    its checkpoint. An error would come back."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, StageFailed) and error.killed


@task(
    task_run_name="dvc:{stage}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=1,
    retry_delay_seconds=5,
    retry_condition_fn=worth_a_retry,
)
def run_stage(
    stage: str, up_to_date: bool, root: Path, env: dict[str, str], timeout_s: float | None
) -> tuple[Outcome, float]:
    """Bring one stage up to date with `dvc repro -s`; its output goes to the log as it comes.

    Raises:
        StageFailed: DVC or the stage ended with an error.
    """
    log = get_run_logger()
    if up_to_date:
        log.info("%s: cached", stage)
        return "cached", 0.0
    started = time.monotonic()
    lines: list[str] = []
    progress = StageProgress(stage)

    def on_line(line: str) -> None:
        lines.append(line)
        progress.follow(line)
        del lines[:-200]
        if line.strip() and not line.strip().startswith(_DVC_HINTS):
            log.info("%s", line)

    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", stage]
    try:
        code = run_guarded(command, on_line, root, env, timeout_s)
    except CommandTimeout as error:
        raise StageFailed(f"stage {stage}: {error}; raise --timeout-hours, then run again") from error
    if code != 0:
        raise _failure(stage, lines)
    ran = any(line.startswith(f"Running stage '{stage}'") for line in lines)
    return ("ran" if ran else "cached"), time.monotonic() - started


def child_environment() -> dict[str, str]:
    """The environment of stages: this Python first on PATH, nothing reported to anyone."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {
        **os.environ,
        **offline_environment(),
        "PATH": path,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def _failure(stage: str, lines: list[str]) -> StageFailed:
    """The stage's own error lines say more than DVC's."""
    own = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    dvc = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    code = re.search(r"exited with (-?\d+)", "\n".join(dvc))
    number = int(code.group(1)) if code else 0
    killed = number in {-9, 137}
    return StageFailed(f"stage {stage}: {'; '.join(own or dvc or lines[-1:]) or 'no output'}", killed)
