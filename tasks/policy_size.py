"""How many weights a policy has, from its sizes alone: no torch, no download."""

from __future__ import annotations

import json
import re
from pathlib import Path

from models.config import PolicyConfig

# Weights of the published Qwen2.5-VL, by the size in their name (which leaves the vision tower out).
_PUBLISHED = {"3B": 3.75e9, "7B": 8.29e9, "32B": 33.5e9, "72B": 73.4e9}


def parameters_of(policy: PolicyConfig) -> float:
    """Number of weights: counted for the tiny policy and for a checkpoint in a folder, known for published names.

    An unknown name counts as 7B.
    """
    if policy.checkpoint is None:
        return count_weights(
            hidden=policy.hidden_size,
            layers=policy.layers,
            heads=policy.heads,
            kv_heads=policy.kv_heads,
            intermediate=policy.intermediate_size,
            vocab=policy.vocab_size,
            tied=True,
            vision_hidden=policy.vision_hidden_size,
            vision_depth=policy.vision_depth,
            vision_intermediate=2 * policy.vision_hidden_size,
        )
    config = Path(policy.checkpoint) / "config.json"
    if config.is_file():
        return _of_config(json.loads(config.read_text(encoding="utf-8")))
    named = re.search(r"(\d+B)\b", policy.checkpoint, re.IGNORECASE)
    return _PUBLISHED.get(named.group(1).upper() if named else "7B", _PUBLISHED["7B"])


def count_weights(
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
    tied: bool,
    vision_hidden: int,
    vision_depth: int,
    vision_intermediate: int,
) -> float:
    """Weights of a Qwen2.5-VL of these sizes; a test compares with the real network."""
    key_value = hidden // heads * kv_heads
    attention = 2 * hidden * hidden + 2 * hidden * key_value + hidden + 2 * key_value
    language = layers * (attention + 3 * hidden * intermediate + 2 * hidden) + hidden
    embeddings = vocab * hidden * (1 if tied else 2)
    wide, deep = vision_hidden, vision_intermediate
    block = 4 * wide * wide + 4 * wide + 3 * wide * deep + 2 * deep + wide + 2 * wide
    merger = wide + (4 * wide) ** 2 + 4 * wide + 4 * wide * hidden + hidden
    patches = 3 * 2 * 14 * 14 * wide
    return float(language + embeddings + vision_depth * block + merger + patches)


def _of_config(config: dict[str, object]) -> float:
    """Newer files nest the language model's sizes, older ones have them at the top."""
    nested, vision = config.get("text_config") or config, config["vision_config"]
    assert isinstance(nested, dict)
    assert isinstance(vision, dict)
    return count_weights(
        hidden=nested["hidden_size"],
        layers=nested["num_hidden_layers"],
        heads=nested["num_attention_heads"],
        kv_heads=nested["num_key_value_heads"],
        intermediate=nested["intermediate_size"],
        vocab=nested["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", nested.get("tie_word_embeddings", False))),
        vision_hidden=vision["hidden_size"],
        vision_depth=vision["depth"],
        vision_intermediate=vision["intermediate_size"],
    )
