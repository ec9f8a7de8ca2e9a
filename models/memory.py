"""How much memory training a policy takes, from its configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLConfig


def parameter_count(config: Qwen2_5_VLConfig) -> int:
    """Weights of a Qwen2.5-VL, counted on the meta device: shapes only, no memory."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration as QwenVL

    with torch.device("meta"):
        network = QwenVL(config)
    return sum(weight.numel() for weight in network.parameters())


def training_bytes(parameters: int, zero_stage: int, ranks: int, bf16: bool) -> int:
    """Bytes per rank for weights, gradients and AdamW states, without activations (ZeRO, arXiv 1910.02054 §3).

    fp32: 4 + 4 + 8 bytes a weight. bf16: 2 + 2, and 12 for the fp32 copy and both moments. Stage 1 shares the
    optimizer states among the ranks, stage 2 the gradients too, stage 3 the weights too.
    """
    weights, gradients, optimizer = (2, 2, 12) if bf16 else (4, 4, 8)
    parts = [(weights, 3), (gradients, 2), (optimizer, 1)]
    return sum(size * parameters // (ranks if zero_stage >= stage else 1) for size, stage in parts)
