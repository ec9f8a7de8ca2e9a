"""A key/value cache with one row per running sequence, each at its own length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class SlotCache(Cache):
    """Preallocated (slots, heads, capacity, head_dim) keys and values per layer: each head's lie in one piece.

    Before each forward pass `select` says which rows take part and at which positions their new tokens go. Rows
    keep their content between turns, and a freed row is simply written over: attention never looks beyond the
    current position of a row, so nothing has to be cleared. `like` gives type and device.
    """

    def __init__(self, layers: int, slots: int, capacity: int, heads: int, head_dim: int, like: Tensor):
        super().__init__(layers=[])
        shape = (slots, heads, capacity, head_dim)
        self.keys = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(layers)]
        self.slots, self.capacity = slots, capacity
        self._rows: Tensor = torch.arange(slots)
        self._positions: Tensor = torch.zeros((slots, 1), dtype=torch.int64)
        self._are_first = True
        self._length = 0

    def select(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Choose rows (b,) and the positions (b, q) of their new tokens; returns the mask (b, 1, q, keys)."""
        self._rows, self._positions = rows, positions
        self._are_first = torch.equal(rows, torch.arange(len(rows), device=rows.device))
        self._length = int(positions.max()) + 1
        return torch.arange(self._length, device=positions.device) <= positions[:, None, :, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new (b, heads, q, head_dim) states; returns those rows' states up to the longest one."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        where = (self._rows[:, None], slice(None), self._positions)
        keys[where] = key_states.transpose(1, 2)
        values[where] = value_states.transpose(1, 2)
        if self._are_first:  # a view, no copy
            count = len(self._rows)
            return keys[:count, :, : self._length], values[:count, :, : self._length]
        return keys[self._rows, :, : self._length], values[self._rows, :, : self._length]

    def copy_row(self, source: int, targets: list[int], length: int) -> None:
        """Give other rows the first `length` positions of one row: prompts shared by a group are read once."""
        for store in (*self.keys, *self.values):
            store[targets, :, :length] = store[source, :, :length].clone()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length
