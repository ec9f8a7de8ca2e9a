"""Where stages read and write, and how they report progress."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.dvc_graph import stage_fingerprint
from tasks.params import PROJECT_ROOT, Params

if TYPE_CHECKING:
    from models.checkpoint import Checkpoints

log = logging.getLogger(__name__)

COLD_START = PROJECT_ROOT / "data" / "cold_start"
TOKENIZER = PROJECT_ROOT / "data" / "tokenizer"
OUTPUTS = PROJECT_ROOT / "outputs"


def use_threads(params: Params) -> None:
    """Fix the number of CPU threads of this process: with one, sums come out the same every time."""
    import torch

    torch.set_num_threads(params.threads)


def stage_checkpoints(stage: str, params: Params, kind: str = "latest") -> Checkpoints:
    """Resumable states of this very job, outside DVC's outs; states of other settings are removed.

    `kind` tells apart the states that a stage goes on from and those that it may go back to.
    """
    from models.checkpoint import Checkpoints

    family = OUTPUTS / ".checkpoints" / stage
    folder = family / stage_fingerprint(stage, params)[:16]
    if family.is_dir():
        for other in family.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
    return Checkpoints(folder / kind)


@contextmanager
def fresh_folder(folder: Path) -> Iterator[Path]:
    """A folder that appears complete or not at all: written beside its place, then renamed."""
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


class ProgressLog:
    """A bar on a terminal; elsewhere a line every `interval` seconds with the rate and the time left."""

    def __init__(self, what: str, interval: float = 15.0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
        self._terminal = console.is_terminal
        self._what, self._interval = what, interval
        self._task = self._bar.add_task(what, total=None, note="")
        self._began = self._said = time.monotonic()
        self._first: int | None = None

    def __enter__(self) -> ProgressLog:
        if self._terminal:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._terminal:
            self._bar.stop()

    def update(self, done: int, total: int, note: str = "") -> None:
        """Report `done` of `total`."""
        if self._terminal:
            self._bar.update(self._task, completed=done, total=total, note=note)
            return
        now = time.monotonic()
        self._first = done - 1 if self._first is None else self._first
        if now - self._said < self._interval and done < total:
            return
        self._said = now
        left = (now - self._began) / max(1, done - self._first) * (total - done)
        log.info("%s: %d of %d, %.0f s left  %s", self._what, done, total, left, note)
