"""A small cold start with its tokenizer, and reading files against it, for tests of import and export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from environments.vsp.config import ColdStartConfig
from environments.vsp.expert import Demonstration
from models.config import AgentConfig
from models.demonstrations import demonstration_text
from models.encoding import Encoder
from models.tokenizer import train_tokenizer
from tasks.cold_start import build_cold_start
from tasks.conversations.fitting import Fitter
from tasks.conversations.reading import Reading, read_file
from tasks.gate.facts import PictureReader
from tasks.gate.tokens import TokenCounter
from tasks.params import ValidateConfig
from tasks.schema import iter_trajectories
from tools.vsp import vsp_registry

DATA = ColdStartConfig(
    n_trajectories=160,
    validation_trajectories=12,
    validation_items=12,
    test_items_per_size=2,
    shards=2,
    workers=1,
)


@dataclass(frozen=True)
class SmallData:
    """A built cold start, its training rows and trajectories in order, and an encoder for them."""

    folder: Path
    rows: list[dict[str, Any]]
    shown: list[Demonstration]
    encoder: Encoder

    def read(self, file: Path, limits: ValidateConfig | None = None) -> Reading:
        fitter = Fitter(self.encoder.registry, DATA)
        counter = TokenCounter(self.encoder, PictureReader())
        return read_file(file, fitter, counter, limits or ValidateConfig(), {})


def build_small_data(folder: Path) -> SmallData:
    build_cold_start(DATA, 0, folder)
    shown = list(iter_trajectories(folder, "train"))
    rows = [row for file in sorted(folder.glob("train-*")) for row in pq.read_table(file).to_pylist()]
    registry, agent = vsp_registry(), AgentConfig()
    tokenizer = train_tokenizer([demonstration_text(each, registry, agent) for each in shown], 1024)
    return SmallData(folder, rows, shown, Encoder(tokenizer, registry, agent, 0.4375))


def write_lines(file: Path, records: Sequence[Any]) -> Path:
    """A line per record; text and bytes as they are."""
    lines = [
        each if isinstance(each, bytes) else (each if isinstance(each, str) else json.dumps(each)).encode()
        for each in records
    ]
    file.write_bytes(b"\n".join(lines) + b"\n")
    return file


def without_id(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"trajectory_id": ""}
