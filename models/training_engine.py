"""The DeepSpeed engine behind SFT and GRPO: the same call on a laptop's CPU and on eight GPUs."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

CRITIC = "value_head."  # how names of the critic's weights begin


def start_engine(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    max_grad_norm: float,
    zero_stage: int,
    bf16: bool = False,
) -> Any:
    """A DeepSpeed engine with AdamW, to be driven by `optimizer_step`.

    Micro-batches are sized by tokens and differ in number from step to step, so DeepSpeed's own batch arithmetic
    is told 1 (DeepSpeed#6914: never state all three) and the boundary of a step is set by hand. Norm weights and
    biases do not decay.
    """
    _single_process_defaults()
    import deepspeed
    import deepspeed.ops

    # Its shared-memory all-reduce is compiled for two minutes at first start; gloo serves one host as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    critic = [p for n, p in trained if n.startswith(CRITIC)]
    actor = [p for n, p in trained if not n.startswith(CRITIC)]
    groups = [
        {"params": [p for p in actor if p.ndim > 1], "weight_decay": weight_decay, "part": "actor"},
        {"params": [p for p in actor if p.ndim <= 1], "weight_decay": 0.0, "part": "actor"},
        {"params": critic, "weight_decay": 0.0, "part": "critic"},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=lr,
        betas=(0.9, 0.98),
        fused=True,
    )
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": {"stage": zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def optimizer_step(engine: Any, losses: Iterable[Tensor]) -> float:
    """One optimizer step over the sum of micro-batch losses, each already divided by the step's denominator.

    Returns the gradient's norm before clipping.

    `losses` is consumed lazily: one micro-batch's graph is alive at a time. Raises ValueError when it is empty.
    """
    pending: Tensor | None = None
    for loss in losses:
        if pending is not None:
            engine.set_gradient_accumulation_boundary(False)
            engine.backward(pending)
            engine.step()
        pending = loss
    if pending is None:
        raise ValueError("an optimizer step needs at least one micro-batch")
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(pending)
    if (
        engine.zero_optimization_stage() > 0
    ):  # gradients are spread over the ranks, DeepSpeed knows their norm
        engine.step()
        return float(engine.get_global_grad_norm())
    gradients = [weight.grad for weight in engine.module.parameters() if weight.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients))
    engine.step()
    return norm


def set_learning_rate(engine: Any, lr: float, critic_lr: float | None = None) -> None:
    """Set the learning rate of the policy, and that of its value head if it has one."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr if group["part"] == "actor" or critic_lr is None else critic_lr


def rank() -> int:
    """This process's number among the trainers."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many trainers there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def sum_over_ranks(value: float) -> float:
    """The sum of every rank's `value`, on every rank."""
    if world_size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64)
    if torch.cuda.is_available():
        total = total.cuda()
    torch.distributed.all_reduce(total)
    return float(total)


def _single_process_defaults() -> None:
    """Without a launcher DeepSpeed asks for MPI; these are what a launcher would set for one process."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
