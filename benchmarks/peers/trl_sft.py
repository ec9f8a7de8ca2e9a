"""TRL's SFTTrainer on the project's trajectories, already encoded, with batches that the caller chooses."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from transformers import TrainerCallback
from trl import SFTConfig as TRLSFTConfig
from trl import SFTTrainer

from benchmarks.peers.measure import Clock
from benchmarks.peers.trl_format import processor, scaled
from models.encoding import Encoder
from models.policy import Policy
from models.policy import Sequence as Trained
from tasks.params import Params


class Collator:
    """Trajectories as the model wants them, with pictures processed per batch, as TRL's own vision collator does.

    TRL's collator starts from conversations; this one starts from our ids, so that both sides train on the same tokens
    with the same loss mask.
    """

    def __init__(self, encoder: Encoder, sequences: Sequence[Trained]) -> None:
        self._sequences, self._pad, self._image_pad = (
            sequences,
            encoder.tokenizer.pad_token_id,
            encoder.image_pad,
        )
        self._pictures = processor(encoder).image_processor
        self._png: dict[str, bytes] = {}  # pictures of the data set, stored in their final size
        for picture in {p.sha256: p for s in sequences for p in s.pictures}.values():
            buffer = io.BytesIO()
            scaled(picture, encoder.image_scale).save(buffer, format="PNG")
            self._png[picture.sha256] = buffer.getvalue()
        self.seeing = Clock()

    def __call__(self, rows: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        chosen = [self._sequences[row["number"]] for row in rows]
        width = max(len(each.ids) for each in chosen)
        ids = np.full((len(chosen), width), self._pad, dtype=np.int64)
        labels = np.full((len(chosen), width), -100, dtype=np.int64)
        attention = np.zeros((len(chosen), width), dtype=np.int64)
        for line, each in enumerate(chosen):
            length = len(each.ids)
            ids[line, :length], attention[line, :length] = each.ids, 1
            labels[line, :length][each.mask] = each.ids[each.mask]
        with self.seeing.running():
            images = [Image.open(io.BytesIO(self._png[p.sha256])) for each in chosen for p in each.pictures]
            seen = self._pictures(images=images, return_tensors="pt")
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(attention),
            "labels": torch.from_numpy(labels),
            "mm_token_type_ids": torch.from_numpy((ids == self._image_pad).astype(np.int64)),
            "pixel_values": seen["pixel_values"],
            "image_grid_thw": seen["image_grid_thw"],
        }


class _Listening(SFTTrainer):
    """The trainer itself; it keeps the loss of its last step."""

    last_loss = 0.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.last_loss = float(loss.detach())
        return loss


class _OnStep(TrainerCallback):
    """Calls back after every step with its seconds, fetching the batch included."""

    def __init__(self, finished: Callable[[int, float], None]) -> None:
        self._finished, self._began = finished, 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._finished(state.global_step - 1, time.perf_counter() - self._began)
        self._began = time.perf_counter()


def build(
    policy: Policy,
    sequences: Sequence[Trained],
    steps: Sequence[Sequence[int]],
    params: Params,
    on_step: Callable[[int, float, float, float], None],
    scratch: Path,
) -> SFTTrainer:
    """A trainer of `policy` on the sequences `steps[k]` in step k.

    After each it calls `on_step(k, seconds, of which pictures, loss)`. Build it before any DeepSpeed engine: with one
    in the process, accelerate wraps TRL's model for several ranks.

    Gradient checkpointing, bf16, logging and saving are off.
    """
    collator = Collator(policy.encoder, sequences)
    settings = TRLSFTConfig(
        output_dir=str(scratch),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        max_steps=len(steps),
        per_device_train_batch_size=len(steps[0]),
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        learning_rate=params.sft.lr,
        lr_scheduler_type="constant",
        weight_decay=params.sft.weight_decay,
        max_grad_norm=params.sft.max_grad_norm,
        adam_beta2=0.98,
        max_length=None,
        seed=params.seed,
    )

    def finished(step: int, seconds: float) -> None:
        on_step(step, seconds, collator.seeing.seconds, trainer.last_loss)
        collator.seeing.seconds = 0.0

    trainer = _Listening(
        model=policy.model.network,
        args=settings,
        train_dataset=Dataset.from_dict({"number": [number for step in steps for number in step]}),
        data_collator=collator,
        processing_class=processor(policy.encoder).tokenizer,
        callbacks=[_OnStep(finished)],
    )
    return trainer
