"""Trajectories from elsewhere, which the cold start takes in beside its own.

    data/ingested/<name>-<hash>.parquet       rows of tasks.schema.TRAJECTORIES; DVC has the file, git its .dvc
    data/cold_start/train-ingested-*.parquet  the same files in the cold start

Files of their own, so that the experts' files have the same bytes with and without them.
"""

from __future__ import annotations

from pathlib import Path

from tasks.params import PROJECT_ROOT

INGESTED = PROJECT_ROOT / "data" / "ingested"
INGESTED_SPLIT = "train-ingested"  # what its files in the cold start are named after


def ingested_parts(folder: Path = INGESTED) -> list[Path]:
    """The files to take in, in a fixed order; none if there is no such folder."""
    return sorted(folder.glob("*.parquet"))


def ingested_name(number: int, total: int) -> str:
    """The name in the cold start of the part with that number, counted from 0."""
    return f"{INGESTED_SPLIT}-{number:05d}-of-{total:05d}.parquet"


def is_ingested(name: str) -> bool:
    """Whether a file of the cold start holds trajectories from elsewhere."""
    return name.startswith(f"{INGESTED_SPLIT}-")
