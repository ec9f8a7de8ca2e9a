"""Resumable training states: written whole or not at all, restored exactly.

A state holds the engine (weights, optimizer), the RNGs of Python, NumPy and torch, and whatever the caller must
know to go on. It lives outside DVC's outs, which DVC deletes before a stage runs (treeverse/dvc#9221), in a
folder named after a hash of the stage's settings and inputs: other settings never pick it up.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.training_engine import rank

logger = logging.getLogger(__name__)


class CheckpointError(Exception):
    """A state is there but cannot be restored."""


class Checkpoints:
    """The states of one training run in `folder`; the newest two are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def _pointer(self) -> Path:
        return self.folder / "latest.json"

    def store(self, engine: Any, state: dict[str, Any]) -> None:
        """Save engine, RNGs and `state` under the step they belong to, then move the pointer atomically."""
        tag = f"step-{state['step']:08d}"
        self.folder.mkdir(parents=True, exist_ok=True)
        if rank() == 0:
            shutil.rmtree(self.folder / tag, ignore_errors=True)  # what a killed run left half-written
        # every rank saves its part (DeepSpeed#797: a save on rank 0 alone hangs)
        engine.save_checkpoint(str(self.folder), tag=tag, save_latest=False, client_state={})
        if rank() != 0:
            return
        with (self.folder / tag / "state.pkl").open("wb") as file:
            pickle.dump({"state": state, "rng": _rng_state()}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary = self._pointer.with_suffix(".tmp")
        temporary.write_text(json.dumps({"tag": tag}))
        os.replace(temporary, self._pointer)
        for old in sorted(self.folder.glob("step-*"))[:-2]:
            shutil.rmtree(old, ignore_errors=True)

    def restore(self, engine: Any) -> dict[str, Any] | None:
        """Load the newest state into the engine and the RNGs; None when there is none to go on from.

        Raises CheckpointError when the pointer names a state that DeepSpeed cannot load: training must not
        silently start again (transformers#22170).
        """
        if not self._pointer.exists():
            return None
        tag = json.loads(self._pointer.read_text())["tag"]
        with (self.folder / tag / "state.pkl").open("rb") as file:
            saved = pickle.load(file)
        unloadable = f"{self.folder / tag} cannot be loaded; delete {self.folder} to start again"
        try:
            path, _ = engine.load_checkpoint(str(self.folder), tag=tag)
        except (AssertionError, OSError, RuntimeError) as error:
            raise CheckpointError(unloadable) from error
        if path is None:
            raise CheckpointError(unloadable)
        _set_rng_state(saved["rng"])
        logger.info("going on from %s", tag)
        state: dict[str, Any] = saved["state"]
        return state

    def clear(self) -> None:
        """Remove all states: the run is over and its result is exported."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _rng_state() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
