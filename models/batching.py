"""Micro-batches by token count."""

from __future__ import annotations

from collections.abc import Sequence


def by_tokens(indices: Sequence[int], lengths: Sequence[int], micro_batch_tokens: int) -> list[list[int]]:
    """Cut `indices`, in their order, into batches of at most `micro_batch_tokens` tokens each.

    A sequence longer than that stands alone.
    """
    batches: list[list[int]] = []
    room = 0
    for index in indices:
        if not batches or lengths[index] > room:
            batches.append([])
            room = micro_batch_tokens
        batches[-1].append(index)
        room -= lengths[index]
    return batches
