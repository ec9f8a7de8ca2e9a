"""Where stages read and write, and the objects that several of them build from parameters."""

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
    from models.policy import Policy
    from models.rollout import RolloutEngine
    from tools.cache import ToolResultCache

log = logging.getLogger(__name__)

COLD_START = PROJECT_ROOT / "data" / "cold_start"
TOKENIZER = PROJECT_ROOT / "data" / "tokenizer"
OUTPUTS = PROJECT_ROOT / "outputs"


def use_threads(params: Params) -> None:
    """Fix the number of CPU threads: speed on small machines, and the same sums on every run."""
    import torch

    torch.set_num_threads(params.threads)


def stage_checkpoints(stage: str, params: Params) -> Checkpoints:
    """Resumable states of this very job, outside DVC's outs; states of other settings are removed."""
    from models.checkpoint import Checkpoints

    family = OUTPUTS / ".checkpoints" / stage
    folder = family / stage_fingerprint(stage, params)[:16]
    if family.is_dir():
        for other in family.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
    return Checkpoints(folder)


def open_policy(folder: Path, params: Params) -> Policy:
    """A policy that an earlier stage saved. Raises FileNotFoundError naming the stage that makes it."""
    from models.policy import load_policy
    from tools.vsp import vsp_registry

    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder.relative_to(PROJECT_ROOT) if folder.is_relative_to(PROJECT_ROOT) else folder} holds no "
            f"model; make it with `dvc repro {folder.name}`"
        )
    return load_policy(folder, params.policy, params.agent, vsp_registry())


def rollout_engine(policy: Policy, params: Params, cache: ToolResultCache) -> RolloutEngine:
    """The engine that `rollout.engine` names, sampling from `policy`; known tool results come from `cache`."""
    from models.transformers_engine import TransformersEngine
    from tools.executor import ToolExecutor

    executor = ToolExecutor(policy.encoder.registry, cache, params.rollout.call_deadline_s)
    if params.rollout.engine == "transformers":
        return TransformersEngine(policy, executor, params.agent, params.rollout)
    from models.vllm_engine import VLLMEngine, start_vllm

    weights = OUTPUTS / ".weights"

    def save_weights() -> Path:
        with fresh_folder(weights) as folder:
            policy.save(folder)
        return weights

    llm = start_vllm(save_weights(), params.policy, params.agent, params.rollout)
    return VLLMEngine(llm, policy.encoder, executor, params.agent, params.rollout, save_weights)


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
