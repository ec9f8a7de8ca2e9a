"""Write the cold start in the formats of others: OpenAI messages, ShareGPT (LLaMA-Factory), TRL's SFTTrainer."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.params import PROJECT_ROOT, load_params

if TYPE_CHECKING:
    from environments.vsp.expert import Demonstration
    from models.config import AgentConfig
    from tools.base import Picture

logger = logging.getLogger("tasks.export")

COLD_START = PROJECT_ROOT / "data" / "cold_start"
FORMATS = ("openai", "sharegpt", "trl")
SPLITS = ("train", "validation")
_ROWS = 512  # written at a time


class ExportError(Exception):
    """Nothing was written; the message is one line."""


def export(
    shown: Iterable[Demonstration], form: str, name: str, folder: Path, agent: AgentConfig
) -> tuple[Path, int]:
    """Write trajectories to `folder`/`name` and what it needs; the file, and how many.

    openai: NAME.jsonl, pictures inside. sharegpt: NAME.jsonl, images/, dataset_info.json. trl: NAME.parquet.

    Raises ExportError if the folder holds something, OSError if it cannot be written.
    """
    from tasks.workspace import fresh_folder

    if folder.exists() and any(folder.iterdir()):
        raise ExportError(f"{folder} is not empty; name another folder with --out")
    with fresh_folder(folder.resolve()) as draft:
        if form == "trl":
            file, count = _write_trl(shown, draft / f"{name}.parquet", agent)
        else:
            file = draft / f"{name}.jsonl"
            count = _write_lines(_records(shown, form, file), file)
    return folder / file.name, count


def _records(shown: Iterable[Demonstration], form: str, file: Path) -> Iterator[dict[str, Any]]:
    from tasks.conversations import openai_messages, sharegpt
    from tools.vsp import vsp_registry

    registry = vsp_registry()
    if form == "openai":
        for each in shown:
            yield openai_messages.write(each, registry)
        return
    images = file.with_name("images")
    images.mkdir()

    def store(picture: Picture) -> str:
        name = f"{picture.sha256[:24]}.png"
        if not (images / name).exists():
            (images / name).write_bytes(picture.png)
        return f"{images.name}/{name}"

    for each in shown:
        yield sharegpt.write(each, registry, store)
    info = sharegpt.dataset_info(f"toolplan_{file.stem}", file.name)
    file.with_name("dataset_info.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")


def _write_lines(records: Iterable[dict[str, Any]], file: Path) -> int:
    count = 0
    with file.open("w", encoding="utf-8") as stream:
        for record in records:
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")
            count += 1
    return count


def _write_trl(shown: Iterable[Demonstration], file: Path, agent: AgentConfig) -> tuple[Path, int]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tasks.conversations import trl
    from tools.vsp import vsp_registry

    registry, source, count = vsp_registry(), iter(shown), 0
    with pq.ParquetWriter(file, trl.SCHEMA, compression="zstd") as writer:
        while rows := [trl.write(each, registry, agent) for each in itertools.islice(source, _ROWS)]:
            writer.write_table(pa.Table.from_pylist(rows, schema=trl.SCHEMA))
            count += len(rows)
    return file, count


def main() -> None:
    """Export a split of the cold start."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.export",
        description="Write the cold start for other trainers. What this writes as openai or sharegpt, "
        "`python -m tasks.ingest` reads.",
        epilog="Example: python -m tasks.export --format trl --split train --out exported --limit 1000",
    )
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--split", choices=SPLITS, default="train", help="(default %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new or empty folder")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N trajectories")
    arguments = parser.parse_args()
    from tasks.schema import iter_trajectories

    shown = itertools.islice(iter_trajectories(COLD_START, arguments.split), arguments.limit)
    agent = load_params().agent
    file, count = export(shown, arguments.format, arguments.split, arguments.out, agent)
    logger.info("wrote %d trajectories to %s", count, file)


if __name__ == "__main__":
    from tasks.cli import run_main

    run_main(main, ExportError)
