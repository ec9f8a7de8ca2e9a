"""Trains the tests' small policy and saves its weights: run by test_ranks.py, alone and under torchrun.

python -m tests.models.train_small OUT GRADIENT_ACCUMULATION ZERO_STAGE
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from models.checkpoint import Checkpoints
from models.config import SFTConfig
from models.demonstrations import encode_demonstration
from models.sft import train_sft
from models.training_engine import rank
from tests.models.policies import small_policy, some_demonstrations


def main(out: Path, gradient_accumulation: int, zero_stage: int) -> None:
    torch.set_num_threads(1)
    policy = small_policy()
    sequences = [encode_demonstration(policy.encoder, shown) for shown in some_demonstrations(16)]
    config = SFTConfig.model_validate(
        {
            "lr": 1e-3,
            "epochs": 1.0,
            "micro_batch_tokens": 500,
            "context_schedule": (400,),
            "gradient_accumulation": gradient_accumulation,
            "zero_stage": zero_stage,
            "checkpoint_every": 2,
        }
    )
    train_sft(policy, sequences, config, 0, Checkpoints(out.with_suffix(".states")), lambda *_: None)
    if rank() == 0:
        torch.save(policy.model.state_dict(), out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
