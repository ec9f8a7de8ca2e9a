"""What of the large profiles can be checked without a GPU: shapes, memory, adapters, and the code on tiny weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLConfig

from models.config import AgentConfig
from models.demonstrations import encode_demonstration
from models.memory import parameter_count, training_bytes
from models.policy import build_policy, load_policy, token_logprobs
from tasks.params import load_params
from tests.models.policies import SMALL, small_policy, some_demonstrations
from tools.vsp import vsp_registry

QWEN_7B = Qwen2_5_VLConfig(
    text_config={
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    vision_config={
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
    },
    tie_word_embeddings=False,
)


def test_the_7b_policy_fits_its_profile() -> None:
    params = load_params(profile="a100x8")
    count = parameter_count(QWEN_7B)
    assert count == pytest.approx(8.29e9, rel=0.01)
    each = training_bytes(count, params.sft.zero_stage, params.sft.processes, bf16=True)
    assert each < 40e9  # of 80 GB, the rest is for activations
    assert training_bytes(count, 0, 1, bf16=True) > 80e9  # on one GPU it does not fit


def test_a_saved_policy_goes_through_the_checkpoint_path(tmp_path: Path) -> None:
    """A tiny checkpoint stands for a downloaded one: `policy.checkpoint` loads both with the same code."""
    policy = small_policy()
    policy.save(tmp_path)
    config = SMALL.model_copy(update={"checkpoint": str(tmp_path)})
    loaded = build_policy(config, AgentConfig(), vsp_registry(), None, seed=1)
    sequences = [encode_demonstration(policy.encoder, shown) for shown in some_demonstrations(3)]
    for own, theirs in zip(
        token_logprobs(policy, sequences, 1.0, 2000),
        token_logprobs(loaded, sequences, 1.0, 2000),
        strict=True,
    ):
        torch.testing.assert_close(own, theirs)
    assert loaded.encoder.tokenizer.chat_template


def test_lora_trains_only_adapters_and_is_merged_when_saved(tmp_path: Path) -> None:
    small_policy().save(tmp_path / "base")
    config = SMALL.model_copy(update={"checkpoint": str(tmp_path / "base"), "lora_rank": 4})
    policy = build_policy(config, AgentConfig(), vsp_registry(), None, seed=0)
    trained = {name for name, weight in policy.model.named_parameters() if weight.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    sequences = [encode_demonstration(policy.encoder, shown) for shown in some_demonstrations(3)]
    optimizer = torch.optim.SGD([w for w in policy.model.parameters() if w.requires_grad], lr=1.0)
    for _ in range(3):
        logprobs, _ = policy.model(policy.collate(sequences))
        (-logprobs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    policy.save(tmp_path / "merged")
    plain = load_policy(tmp_path / "merged", SMALL, AgentConfig(), vsp_registry())
    for own, theirs in zip(
        token_logprobs(policy, sequences, 1.0, 2000), token_logprobs(plain, sequences, 1.0, 2000), strict=True
    ):
        torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0)
