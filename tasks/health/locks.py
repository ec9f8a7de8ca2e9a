"""Locks and leftovers in the working copy: who holds them, and which of them hold up everybody for nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from tasks.health.check import Check, fail, ok, warn

_DRAFT = re.compile(r"^\..+\.(\d+)\.tmp$")  # tasks/workspace.py: fresh_folder


@dataclass(frozen=True)
class Holder:
    """An entry of DVC's rwlock: a path and the process that reads or writes it."""

    path: str
    pid: int
    command: str


def check_dvc_lock(root: Path, fix: bool) -> Check:
    """DVC's own locks. It drops entries of dead processes when it meets them, but one whose number now belongs to
    another process blocks the path for ever, and a half-written file stops every command (treeverse/dvc#10465)."""
    file = root / ".dvc" / "tmp" / "rwlock"
    try:
        holders = list(_holders(json.loads(file.read_text(encoding="utf-8")))) if file.is_file() else []
    except (ValueError, KeyError, TypeError, AttributeError):
        if fix:
            file.unlink()
            return ok("dvc lock", "a damaged .dvc/tmp/rwlock was removed")
        return fail(
            "dvc lock",
            ".dvc/tmp/rwlock is damaged, so no dvc command works",
            "python -m tasks.doctor --fix removes it",
        )
    stale = [holder for holder in holders if not _is_dvc(holder.pid)]
    if stale and fix:
        _drop(file, {holder.pid for holder in stale})
        return ok("dvc lock", f"{len(stale)} entries of ended processes were removed")
    if stale:
        named = ", ".join(sorted({f"{holder.path} (process {holder.pid})" for holder in stale})[:3])
        return fail(
            "dvc lock",
            f"held by processes that have ended: {named}",
            "python -m tasks.doctor --fix releases them",
        )
    if holders:
        return warn("dvc lock", f"dvc is at work (process {holders[0].pid})", "wait for it, or stop it")
    return ok("dvc lock", "free")


def check_pipeline_locks(root: Path) -> Check:
    """The locks of the pipeline and of each stage. The system releases them with their process: a held one is at
    work."""
    files = [root / ".dvc" / "tmp" / "pipeline.lock", *sorted((root / "outputs" / ".runs").glob("*.lock"))]
    held = [file.stem for file in files if file.is_file() and _is_held(file)]
    if held:
        return warn(
            "locks", f"at work: {', '.join(held)}", "wait for them, or stop them, before starting a run"
        )
    return ok("locks", "no pipeline or stage is at work")


def check_drafts(root: Path, fix: bool) -> Check:
    """Half-written folders that a killed stage left beside its output."""
    drafts = [
        path for folder in ("data", "outputs") for path in (root / folder).glob(".*.tmp") if _is_left(path)
    ]
    if not drafts:
        return ok("leftovers", "none")
    size = sum(file.stat().st_size for draft in drafts for file in draft.rglob("*") if file.is_file())
    if fix:
        for draft in drafts:
            shutil.rmtree(draft)
        return ok("leftovers", f"{len(drafts)} half-written folders were removed ({size / 1e6:.0f} MB)")
    names = ", ".join(draft.relative_to(root).as_posix() for draft in drafts[:3])
    return warn(
        "leftovers",
        f"{names} of killed stages ({size / 1e6:.0f} MB)",
        "python -m tasks.doctor --fix removes them",
    )


def _holders(content: dict[str, Any]) -> Iterator[Holder]:
    for path, entry in content.get("write", {}).items():
        yield Holder(path, int(entry["pid"]), str(entry["cmd"]))
    for path, entries in content.get("read", {}).items():
        for entry in entries:
            yield Holder(path, int(entry["pid"]), str(entry["cmd"]))


def _drop(file: Path, pids: set[int]) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    read = {
        path: [entry for entry in entries if entry["pid"] not in pids]
        for path, entries in content.get("read", {}).items()
    }
    write = {path: entry for path, entry in content.get("write", {}).items() if entry["pid"] not in pids}
    kept = {"read": {path: entries for path, entries in read.items() if entries}, "write": write}
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(kept), encoding="utf-8")
    draft.replace(file)


def _is_dvc(pid: int) -> bool:
    try:
        return any(
            "dvc" in Path(word).parts or Path(word).name == "dvc"
            for word in psutil.Process(pid).cmdline()[:4]
        )
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True  # of another user: nobody here can tell


def _is_held(file: Path) -> bool:
    try:
        with FileLock(file, timeout=0):
            return False
    except Timeout:
        return True


def _is_left(path: Path) -> bool:
    match = _DRAFT.match(path.name)
    return match is not None and path.is_dir() and not psutil.pid_exists(int(match.group(1)))
