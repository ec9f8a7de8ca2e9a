"""Attention over sequences that lie end to end in one row, so that no position is padding.

Half of the positions of a batch of random trajectories were padding when rows were padded to the longest. A function
of transformers' AttentionInterface; without `lengths` it is transformers' own SDPA, which sampling uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED = "packed_sdpa"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    lengths: Sequence[int] | None = None,
    **settings: Any,  # those of `sdpa_attention_forward`
) -> tuple[Tensor, None]:
    """Causal attention within each of the sequences of `lengths` (tokens, their sum is T).

    query (1, heads, T, d), key and value (1, key-value heads, T, d); returns (1, T, heads, d).
    """
    if lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    parts = zip(*(each.split(list(lengths), dim=2) for each in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, q, k, v, None, **settings)[0] for q, k, v in parts]
    return torch.cat(outputs, dim=1), None


def use_packed_attention(network: PreTrainedModel) -> None:
    """Make the language model of a network attend by `packed_attention`, in place."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, sdpa_mask)
    network.set_attn_implementation({"text_config": PACKED})
