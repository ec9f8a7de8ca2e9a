"""Micro-batches by token count."""

from __future__ import annotations

from collections.abc import Sequence


def by_tokens(indices: list[int], lengths: Sequence[int], micro_batch_tokens: int) -> list[list[int]]:
    """Cut `indices`, sorted by length, into batches of at most `micro_batch_tokens` padded tokens each.

    A sequence longer than that stands alone. Deterministic; ties keep the order given.
    """
    batches: list[list[int]] = []
    batch: list[int] = []
    for index in sorted(indices, key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[index] > micro_batch_tokens:
            batches.append(batch)
            batch = []
        batch.append(index)
    if batch:
        batches.append(batch)
    return batches
