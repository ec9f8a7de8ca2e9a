"""Add trajectories from elsewhere to the cold start, as a new version in DVC.

Every line is checked; what does not fit is listed with its line number and the reason. Without --skip-bad one bad
line is enough to add nothing. The next `make run` builds the cold start with the new rows, passes them through the
gate and trains on them.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.ingested import INGESTED, ingested_parts, is_ingested
from tasks.params import PROJECT_ROOT, Params, load_params

if TYPE_CHECKING:
    from tasks.conversations.reading import Reading

logger = logging.getLogger("tasks.ingest")

COLD_START = PROJECT_ROOT / "data" / "cold_start"
TOKENIZER = PROJECT_ROOT / "data" / "tokenizer"


class IngestError(Exception):
    """Nothing was added; the message says why, a line per mistake."""


def check_file(file: Path, params: Params, cold_start: Path, tokenizer: Path, ingested: Path) -> Reading:
    """Read `file` and check every line, also against what is there already. Raises OSError."""
    from transformers import PreTrainedTokenizerFast

    from models.encoding import Encoder
    from tasks.conversations.fitting import Fitter
    from tasks.conversations.reading import read_file
    from tasks.gate.facts import PictureReader
    from tasks.gate.tokens import TokenCounter
    from tasks.workspace import ProgressLog
    from tools.vsp import vsp_registry

    if not tokenizer.is_dir():
        raise IngestError(
            f"no folder {tokenizer}, which counts tokens: run `python -m tasks.cold_start` or `dvc pull` first"
        )
    registry = vsp_registry()
    words = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    counter = TokenCounter(Encoder(words, registry, params.agent, params.policy.image_scale), PictureReader())
    known = known_trajectories(cold_start, ingested)
    with ProgressLog("ingest") as progress:
        return read_file(file, Fitter(registry, params.data), counter, params.gate, known, progress.update)


def known_trajectories(cold_start: Path, ingested: Path) -> dict[str, str]:
    """Ids of all training trajectories that there are, and where each is."""
    import pyarrow.parquet as pq

    from tasks.conversations.fitting import ID_PREFIX, content_hash

    columns = ["map_hash", "question", "tools", "turns"]
    known: dict[str, str] = {}
    for path in sorted(cold_start.glob("train-*.parquet")):
        if not is_ingested(path.name):
            rows = pq.read_table(path, columns=columns).to_pylist()
            known |= dict.fromkeys(
                (ID_PREFIX + content_hash(row) for row in rows), f"the cold start ({path.name})"
            )
    for path in ingested_parts(ingested):
        if _dvc_file(path).is_file():  # without it, an ingest that was killed; the same one completes it
            ids = pq.read_table(path, columns=["trajectory_id"])["trajectory_id"].to_pylist()
            known |= dict.fromkeys(ids, path.name)
    return known


def add_rows(rows: Sequence[dict[str, Any]], name: str, ingested: Path) -> Path:
    """Write the rows to a new file in `ingested` and let DVC track it; all of it or nothing.

    Raises IngestError if DVC refuses, OSError if the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tasks.schema import TRAJECTORIES

    digest = hashlib.sha256("\n".join(row["trajectory_id"] for row in rows).encode()).hexdigest()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "data"
    path = ingested / f"{slug}-{digest[:8]}.parquet"
    ingested.mkdir(parents=True, exist_ok=True)
    draft = ingested.parent / f".{path.name}.{os.getpid()}.tmp"  # beside: the folder is a dependency
    try:
        pq.write_table(pa.Table.from_pylist(list(rows), schema=TRAJECTORIES), draft, compression="zstd")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "add", "--quiet", path.name]
    done = subprocess.run(command, cwd=ingested, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        path.unlink()
        _dvc_file(path).unlink(missing_ok=True)
        raise IngestError(f"dvc add: {' '.join((done.stderr or done.stdout).split())}")
    return path


def _dvc_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.dvc")


def main() -> None:
    """Check a file, then add it."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.ingest",
        description="Add trajectories to the cold start: OpenAI messages with tool_calls, or the ShareGPT tool "
        "format; which one is seen line by line. Lists every line that does not fit.",
        epilog="Example: python -m tasks.ingest mine.jsonl --dry-run",
    )
    parser.add_argument("file", type=Path, help="one JSON object per line")
    parser.add_argument(
        "--skip-bad", action="store_true", help="add the lines that fit and leave out the others"
    )
    parser.add_argument("--dry-run", action="store_true", help="check only")
    arguments = parser.parse_args()
    reading = check_file(arguments.file, load_params(), COLD_START, TOKENIZER, INGESTED)
    found = [f"{arguments.file}:{problem.line}: {problem.reason}" for problem in reading.problems]
    if found and not arguments.skip_bad:
        bad = len({problem.line for problem in reading.problems})
        verdict = (
            f"{bad} lines do not fit, {len(reading.rows)} do; nothing was added (--skip-bad leaves them out)"
        )
        raise IngestError("\n".join([*found, verdict]))
    for line in found:
        logger.warning("left out: %s", line)
    if not reading.rows:
        raise IngestError(f"{arguments.file}: has no line to add")
    if arguments.dry_run:
        logger.info("%d trajectories fit; nothing was added (--dry-run)", len(reading.rows))
        return
    path = add_rows(reading.rows, arguments.file.stem, INGESTED)
    name = path.relative_to(PROJECT_ROOT)
    logger.info("added %d trajectories: %s", len(reading.rows), name)
    logger.info("keep them: git add %s.dvc %s && git commit", name, name.with_name(".gitignore"))
    logger.info("train on them: make run")


if __name__ == "__main__":
    from tasks.cli import run_main

    run_main(main, IngestError)
