"""A copy of the project for one run with other parameters: the user's files are never edited.

A git worktree with the uncommitted changes of the original and its DVC cache, so that what is already
trained is checked out and not trained again. `dvc exp run --temp` would leave out new files
(treeverse/dvc#5801) and runs all stages as one command.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tasks.params import ParamsError
from tasks.provenance import git, owner_is_dead, owner_tags


@contextmanager
def project_copy(root: Path, name: str, env: Mapping[str, str]) -> Iterator[Path]:
    """A copy of the project in `outputs/.copies/<name>`, removed when the block ends.

    Args:
        root: the project.
        name: of the copy; unique among those that are alive.
        env: environment for `dvc`.

    Raises:
        ParamsError: the project is no git repository with a commit, or DVC cannot use the copy.
    """
    folder = _copies(root) / name
    owner = folder.with_suffix(".json")
    folder.parent.mkdir(parents=True, exist_ok=True)
    owner.write_text(json.dumps(owner_tags()))
    try:
        _add_worktree(root, folder)
        _carry_over_changes(root, folder)
        _share_cache(root, folder, env)
        yield folder
    finally:
        _remove(root, folder)


def remove_dead_copies(root: Path) -> list[str]:
    """Remove the copies whose process on this machine is gone (SIGKILL leaves them). Returns their names."""
    removed = []
    for owner in sorted(_copies(root).glob("*.json")):
        if owner_is_dead(json.loads(owner.read_text())):
            _remove(root, owner.with_suffix(""))
            removed.append(owner.stem)
    return removed


def _copies(root: Path) -> Path:
    return root / "outputs" / ".copies"


def _add_worktree(root: Path, folder: Path) -> None:
    if git(root, "rev-parse", "--verify", "HEAD") is None:
        raise ParamsError(
            f"{root}: parameters for one run are tried on a copy, which needs a commit: `git add --all`, then "
            "`git commit`"
        )
    git(root, "worktree", "prune")
    done = subprocess.run(
        ["git", "worktree", "add", "--detach", "--quiet", str(folder), "HEAD"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ParamsError(f"git worktree add: {' '.join(done.stderr.split())}; see `git worktree list`")


def _carry_over_changes(root: Path, folder: Path) -> None:
    """What is not committed belongs to the project as the user sees it: edits, new files, deletions."""
    edited = git(root, "diff", "--name-only", "--no-renames", "-z", "HEAD") or ""
    new = git(root, "ls-files", "--others", "--exclude-standard", "-z") or ""
    for name in filter(None, f"{edited}\0{new}".split("\0")):
        target = folder / name
        if (root / name).is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target)
        else:
            target.unlink(missing_ok=True)
    # which MLflow run made what is cached
    records = root / "outputs" / ".runs"
    for file in records.glob("*.json"):
        (folder / "outputs" / ".runs").mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, folder / "outputs" / ".runs")


def _share_cache(root: Path, folder: Path, env: Mapping[str, str]) -> None:
    local = root / ".dvc" / "config.local"
    if local.is_file():
        shutil.copy2(local, folder / ".dvc" / "config.local")
    cache = _dvc(root, env, "cache", "dir").strip()
    _dvc(folder, env, "cache", "dir", "--local", os.fspath((root / cache).resolve()))
    if (folder / "dvc.lock").is_file():
        _dvc(folder, env, "checkout", "--quiet", "--allow-missing")


def _dvc(folder: Path, env: Mapping[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *arguments],
        cwd=folder,
        env=dict(env),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ParamsError(f"dvc {' '.join(arguments[:2])}: {' '.join(done.stderr.split())}")
    return done.stdout


def _remove(root: Path, folder: Path) -> None:
    git(root, "worktree", "remove", "--force", "--force", str(folder))
    shutil.rmtree(folder, ignore_errors=True)
    git(root, "worktree", "prune")
    folder.with_suffix(".json").unlink(missing_ok=True)
