"""What flows show in Prefect beside their states: tables, links, progress.

All of it is an extra. Prefect refuses a key with capitals or underscores, a server may be away: neither may
fail a flow, so every refusal becomes a warning in its log.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

# `sft: 120 of 1500, 310 s left`, as tasks/workspace.py prints it
_PROGRESS = re.compile(r"^\s*([a-z][\w -]*): (\d+) of (\d+)\b")


def artifact_key(text: str) -> str:
    """`text` as Prefect allows keys: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def show_markdown(key: str, markdown: str, description: str | None = None) -> None:
    """A page of Markdown."""
    _tried(lambda: create_markdown_artifact(markdown, key=artifact_key(key), description=description), key)


def show_table(key: str, rows: Sequence[Mapping[str, Any]], description: str | None = None) -> None:
    """A table, a mapping per row."""
    table = [dict(row) for row in rows]
    _tried(lambda: create_table_artifact(table, key=artifact_key(key), description=description), key)


def show_link(key: str, address: str, text: str, description: str | None = None) -> None:
    """A link."""
    _tried(lambda: create_link_artifact(address, text, key=artifact_key(key), description=description), key)


class StageProgress:
    """A progress bar that follows the lines a stage prints."""

    def __init__(self, stage: str, interval_s: float = 5.0) -> None:
        self._stage = stage
        self._interval_s = interval_s
        self._id: UUID | None = None
        self._said = float("-inf")

    def follow(self, line: str) -> None:
        """Move the bar, if `line` tells how far the stage is."""
        found = _PROGRESS.match(line)
        if found is None or int(found[3]) == 0:
            return
        percent = min(100.0, 100 * int(found[2]) / int(found[3]))
        now = time.monotonic()
        if percent < 100 and now - self._said < self._interval_s:
            return
        self._said = now
        _tried(lambda: self._show(percent), f"progress-{self._stage}")

    def _show(self, percent: float) -> None:
        if self._id is None:
            key = artifact_key(f"progress-{self._stage}")
            made: Any = create_progress_artifact(percent, key=key, description=f"stage {self._stage}")
            self._id = made
        else:
            update_progress_artifact(self._id, percent)


def _tried(show: Callable[[], Any], key: str) -> None:
    try:
        show()
    except Exception as error:
        get_run_logger().warning("Prefect did not take the artifact %s: %s", key, error)
