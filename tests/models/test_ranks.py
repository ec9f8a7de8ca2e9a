"""Several training processes: the same update as one, and no deadlock while saving."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tasks.env import offline_environment


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_two_ranks_train_like_one(tmp_path: Path, zero_stage: int) -> None:
    """verl#3741, open-instruct#1161: the denominator must be of all ranks; DeepSpeed#797: all ranks must save."""
    env = {**os.environ, **offline_environment(), "OMP_NUM_THREADS": "1"}
    env = {name: value for name, value in env.items() if name not in {"RANK", "LOCAL_RANK", "WORLD_SIZE"}}
    module = "tests.models.train_small"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    alone, together = tmp_path / "alone.pt", tmp_path / "together.pt"
    commands = (
        ["-m", module, str(alone), "2", "0"],
        [*launcher, "-m", module, str(together), "1", str(zero_stage)],
    )
    for arguments in commands:
        done = subprocess.run(
            [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
    wanted, got = torch.load(alone), torch.load(together)
    for name, weights in wanted.items():
        torch.testing.assert_close(got[name], weights, atol=2e-4, rtol=0)
