"""The policy: Qwen2.5-VL in every profile, a tiny one built from a config or any checkpoint by path or name."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2_5_VLConfig
from transformers import Qwen2_5_VLForConditionalGeneration as QwenVL

from models.attention import use_packed_attention
from models.batching import by_tokens
from models.config import AgentConfig, PolicyConfig
from models.encoding import (
    MERGE,
    PATCH,
    Encoder,
    picture_grid,
    picture_patches,
    rope_positions,
    token_id,
)
from models.tokenizer import END_OF_TEXT, IM_END, IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START
from tools.base import Picture
from tools.registry import ToolRegistry


@dataclass(frozen=True)
class Sequence:
    """One trajectory as the model sees it: ids (T,), agent mask (T,), and its pictures in order."""

    ids: np.ndarray
    mask: np.ndarray
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class Batch:
    """Sequences end to end in one row. `targets` marks tokens whose log-prob is wanted, never a sequence's first."""

    ids: Tensor  # (1, T) int64
    positions: Tensor  # (3, 1, T) int64, from 0 in each sequence
    targets: Tensor  # (1, T) bool
    patches: Tensor  # (sum of patches over distinct pictures, 1176)
    grids: Tensor  # (distinct pictures, 3) int64
    image_source: Tensor  # (placeholders,) row of the merged picture features for each, in order
    lengths: tuple[int, ...]  # tokens of each sequence, their sum is T

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        moved: dict[str, Any] = {
            k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(self).items()
        }
        return Batch(**moved)


class PolicyModel(nn.Module):
    """Log-probs of chosen tokens: the one forward pass that SFT, GRPO and their reference share."""

    def __init__(self, network: QwenVL, image_pad: int, forbidden: list[int]) -> None:
        super().__init__()
        self.network = network
        self.image_pad = image_pad
        self.forbidden = forbidden
        self.value_head: nn.Linear | None = None

    def add_critic(self) -> None:
        """Give the policy a value head (for `advantage: gae`); it starts at 0, the value of knowing nothing.

        It reads the policy's hidden states without sending a gradient back, so that the critic's learning rate and
        errors never touch the policy.
        """
        hidden = self.network.lm_head.in_features
        self.value_head = nn.Linear(hidden, 1, device=self.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def device(self) -> torch.device:
        return self.network.lm_head.weight.device

    def embed(self, ids: Tensor, patches: Tensor, grids: Tensor, image_source: Tensor) -> Tensor:
        """Token embeddings (B, T, H) with each placeholder replaced by its picture feature."""
        embeddings = self.network.get_input_embeddings()(ids)
        if not len(grids):
            return embeddings
        features = self.picture_features(patches, grids)[image_source]
        where = (ids == self.image_pad).unsqueeze(-1)
        return embeddings.masked_scatter(where, features.to(embeddings.dtype))

    def picture_features(self, patches: Tensor, grids: Tensor) -> Tensor:
        """Merged features of all pictures, concatenated: (sum of merged patches, H)."""
        return torch.cat(tuple(self.network.model.get_image_features(patches, grids).pooler_output))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in float32 with the tokens that only the environment may write removed."""
        logits = self.network.lm_head(hidden).float()
        logits[..., self.forbidden] = -torch.inf
        return logits

    def forward(
        self, batch: Batch, temperature: float = 1.0, with_values: bool = False
    ) -> tuple[Tensor, ...]:
        """Log-probs and entropies of the target tokens, both float32 of shape (number of targets,).

        With `with_values` also the critic's value of the state before each target. Raises ValueError without one.

        Log-probs are those of softmax(logits / temperature), as the sampler's (trl#4159: a ratio of 2 without it).
        """
        embeddings = self.embed(batch.ids, batch.patches, batch.grids, batch.image_source)
        hidden = self.network.model.language_model(
            inputs_embeds=embeddings, position_ids=batch.positions, use_cache=False, lengths=batch.lengths
        ).last_hidden_state
        targets = batch.targets[:, 1:]
        logprobs = log_softmax(self.logits(hidden[:, :-1][targets]) / temperature, dim=-1)
        chosen = logprobs.gather(-1, batch.ids[:, 1:][targets].unsqueeze(-1)).squeeze(-1)
        entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)
        if not with_values:
            return chosen, entropy
        if self.value_head is None:
            raise ValueError("this policy has no value head; call add_critic first")
        return chosen, entropy, self.value_head(hidden[:, :-1][targets].detach().float()).squeeze(-1)


@dataclass(frozen=True)
class Policy:
    """Weights, tokenizer and encoder that belong together."""

    model: PolicyModel
    encoder: Encoder

    def collate(self, sequences: list[Sequence]) -> Batch:
        """Lay sequences end to end; a picture that several of them share is patched and encoded once."""
        dtype = self.model.network.dtype
        batch = collate(sequences, self.encoder.image_pad, self.encoder.image_scale, dtype)
        return batch.to(self.model.device)

    def save(self, folder: Path) -> None:
        """Write the ordinary Hugging Face layout: config, safetensors, tokenizer with its chat template.

        LoRA adapters are merged into a copy of the weights first.
        """
        merge_lora(self.model.network).save_pretrained(folder)
        self.encoder.tokenizer.save_pretrained(folder)


@torch.no_grad()
def token_logprobs(
    policy: Policy, sequences: list[Sequence], temperature: float, micro_batch_tokens: int
) -> list[Tensor]:
    """Log-probs of each sequence's agent tokens, without gradient, on the CPU."""
    return _by_sequence(
        policy, sequences, micro_batch_tokens, lambda batch: policy.model(batch, temperature)[0]
    )


@torch.no_grad()
def token_values(policy: Policy, sequences: list[Sequence], micro_batch_tokens: int) -> list[Tensor]:
    """The critic's values before each of the sequences' agent tokens, without gradient, on the CPU."""
    return _by_sequence(
        policy, sequences, micro_batch_tokens, lambda batch: policy.model(batch, 1.0, True)[2]
    )


def _by_sequence(
    policy: Policy, sequences: list[Sequence], micro_batch_tokens: int, run: Callable[[Batch], Tensor]
) -> list[Tensor]:
    policy.model.eval()
    lengths = [len(sequence.ids) for sequence in sequences]
    pieces: list[Tensor] = []
    for micro in by_tokens(range(len(sequences)), lengths, micro_batch_tokens):
        numbers = run(policy.collate([sequences[i] for i in micro])).cpu()
        pieces += numbers.split([int(sequences[i].mask[1:].sum()) for i in micro])
    return pieces


def collate(sequences: list[Sequence], image_pad: int, scale: float, dtype: torch.dtype) -> Batch:
    """See `Policy.collate`."""
    distinct: dict[str, tuple[int, int]] = {}  # picture hash -> (first feature row, number of rows)
    patches: list[np.ndarray] = []
    grids: list[tuple[int, int, int]] = []
    source: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    rows = 0
    for sequence in sequences:
        own_grids = []
        for picture in sequence.pictures:
            grid = picture_grid(picture, scale)
            own_grids.append(grid)
            if picture.sha256 not in distinct:
                count = grid[1] * grid[2] // MERGE**2
                distinct[picture.sha256] = (rows, count)
                rows += count
                patches.append(picture_patches(picture, scale))
                grids.append(grid)
            first, count = distinct[picture.sha256]
            source.append(np.arange(first, first + count))
        positions.append(rope_positions(sequence.ids, own_grids, image_pad))
    lengths = tuple(len(sequence.ids) for sequence in sequences)
    ids = np.concatenate([sequence.ids for sequence in sequences]).astype(np.int64)
    targets = np.concatenate([sequence.mask for sequence in sequences])
    targets[np.cumsum((0, *lengths[:-1]))] = False
    patch_array = (
        np.concatenate(patches) if patches else np.zeros((0, 3 * 2 * PATCH * PATCH), dtype=np.float32)
    )
    return Batch(
        ids=torch.from_numpy(ids)[None],
        positions=torch.from_numpy(np.concatenate(positions, axis=1))[:, None],
        targets=torch.from_numpy(targets)[None],
        patches=torch.from_numpy(patch_array).to(dtype),
        grids=torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
        image_source=torch.from_numpy(np.concatenate(source) if source else np.zeros(0, dtype=np.int64)),
        lengths=lengths,
    )


def tiny_config(config: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLConfig:
    """A Qwen2.5-VL config of the given sizes; vision blocks all see the whole (small) picture."""
    head = config.hidden_size // config.heads
    sections = [
        head // 2 - 2 * (head // 6),
        head // 6,
        head // 6,
    ]  # time, height, width shares of half a head
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
        "bos_token_id": token_id(tokenizer, END_OF_TEXT),
        "eos_token_id": token_id(tokenizer, IM_END),
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": config.vision_depth,
        "hidden_size": config.vision_hidden_size,
        "intermediate_size": 2 * config.vision_hidden_size,
        "num_heads": max(1, config.vision_hidden_size // 16),
        "out_hidden_size": config.hidden_size,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": list(range(config.vision_depth)),
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token_id(tokenizer, IMAGE_PAD),
        video_token_id=token_id(tokenizer, VIDEO_PAD),
        vision_start_token_id=token_id(tokenizer, VISION_START),
        vision_end_token_id=token_id(tokenizer, VISION_END),
        tie_word_embeddings=True,
    )


def build_policy(
    config: PolicyConfig,
    agent: AgentConfig,
    registry: ToolRegistry,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
) -> Policy:
    """The policy that training starts from: `config.checkpoint`, or a tiny one with random weights.

    Raises ValueError when the tiny policy has no tokenizer, OSError when the checkpoint cannot be read.
    """
    if config.checkpoint is not None:
        return load_policy(config.checkpoint, config, agent, registry)
    if tokenizer is None:
        raise ValueError("the tiny policy needs the tokenizer trained on the cold start")
    torch.manual_seed(seed)
    network = QwenVL(tiny_config(config, tokenizer)).to(getattr(torch, config.dtype))
    return _assemble(network, tokenizer, config, agent, registry)


def load_policy(
    source: str | Path, config: PolicyConfig, agent: AgentConfig, registry: ToolRegistry
) -> Policy:
    """A saved policy (`Policy.save`) or any Qwen2.5-VL checkpoint, by folder or hub name."""
    network = QwenVL.from_pretrained(source, dtype=getattr(torch, config.dtype))
    return _assemble(network, AutoTokenizer.from_pretrained(source), config, agent, registry)


def _assemble(
    network: QwenVL,
    tokenizer: PreTrainedTokenizerBase,
    config: PolicyConfig,
    agent: AgentConfig,
    registry: ToolRegistry,
) -> Policy:
    encoder = Encoder(tokenizer, registry, agent, config.image_scale)
    use_packed_attention(network)
    if config.lora_rank:
        add_lora(network, config.lora_rank)
    return Policy(PolicyModel(_placed(network), encoder.image_pad, encoder.forbidden), encoder)


def _placed(network: QwenVL) -> QwenVL:
    nn.Module.to(network, compute_device())
    return network


def compute_device() -> torch.device:
    """This process's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def add_lora(network: QwenVL, rank: int) -> None:
    """Freeze the weights and put LoRA adapters beside every linear layer of the language model, in place."""
    from peft import LoraConfig, inject_adapter_in_model

    names = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names), network)


def merge_lora(network: QwenVL) -> QwenVL:
    """The network without adapters: itself if it has none, else a copy on the CPU with them merged in."""
    from peft.tuners.lora import LoraLayer

    if not any(isinstance(module, LoraLayer) for module in network.modules()):
        return network
    copied = copy.deepcopy(network).cpu()
    for name, module in list(copied.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            copied.set_submodule(name, module.get_base_layer())
    return copied
