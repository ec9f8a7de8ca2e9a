"""What DVC knows about the pipeline: order of the stages, which are up to date, what a stage depends on."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from tasks.params import PROJECT_ROOT, Params, ParamsError, read_yaml

# Changes of these never change a result; .dvcignore hides them from DVC for the same reason.
_IGNORED = ("__pycache__", ".ipynb_checkpoints", ".DS_Store")


class DvcError(Exception):
    """DVC itself failed; the message is its own, in one line."""


@dataclass(frozen=True)
class Stage:
    """One stage of dvc.yaml, `${profile}` filled in. Paths are relative to the folder of dvc.yaml."""

    name: str
    description: str
    command: str
    deps: tuple[str, ...]
    params: tuple[str, ...]
    outs: tuple[str, ...]


def read_stages(root: Path = PROJECT_ROOT, profile: str = "laptop") -> dict[str, Stage]:
    """The stages in an order in which they can run: each after those that make its dependencies.

    Raises:
        ParamsError: dvc.yaml is missing, has no stages, or its stages depend on each other in a circle.
    """
    file = root / "dvc.yaml"
    declared = read_yaml(file).get("stages") or {}
    stages = {name: _stage(name, body, profile) for name, body in declared.items()}
    if not stages:
        raise ParamsError(f"{file}: has no stages")
    ordered: dict[str, Stage] = {}
    while len(ordered) < len(stages):
        ready = [s for s in stages.values() if s.name not in ordered and upstream(s, stages) <= set(ordered)]
        if not ready:
            raise ParamsError(
                f"{file}: stages depend on each other in a circle: {sorted(set(stages) - set(ordered))}"
            )
        ordered[ready[0].name] = ready[0]
    return ordered


def upstream(stage: Stage, stages: dict[str, Stage]) -> set[str]:
    """Names of the stages whose outputs `stage` reads."""
    return {
        other.name
        for other in stages.values()
        if other.name != stage.name and any(_overlap(dep, out) for dep in stage.deps for out in other.outs)
    }


def out_of_date(root: Path, env: Mapping[str, str]) -> dict[str, list[str]]:
    """Stages that DVC would run now, each with what changed. One `dvc status`, about a second.

    A stage behind one of these may become out of date too once that has run.

    Raises:
        DvcError: `dvc status` failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "status", "--json"],
        cwd=root,
        env=dict(env),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise DvcError(f"dvc status: {' '.join(done.stderr.split())}")
    status: dict[str, list[Any]] = json.loads(done.stdout[done.stdout.index("{") :])
    return {
        stage: [reason for entry in entries for reason in _reasons(entry)]
        for stage, entries in status.items()
    }


def _reasons(entry: Any) -> list[str]:
    """`dvc status` has mappings such as {"changed deps": {path: "modified"}} and bare texts."""
    if isinstance(entry, str):
        return [entry]
    return [f"{name} {_state(state)}" for changes in entry.values() for name, state in changes.items()]


def _state(state: Any) -> str:
    """A state is a word, or for a parameter file the states of its keys."""
    if isinstance(state, dict):
        return ", ".join(f"{key} {_state(value)}" for key, value in state.items())
    return str(state)


def stage_inputs(stage: str, params: Params, root: Path = PROJECT_ROOT) -> dict[str, str]:
    """All that decides a stage's result: value of each parameter, MD5 of each file it depends on.

    A stage that dvc.yaml does not have depends on all parameters but `tracking`, and on no file.
    """
    values = params.model_dump(mode="json")
    stages = read_stages(root, params.profile) if (root / "dvc.yaml").is_file() else {}
    keys = stages[stage].params if stage in stages else tuple(key for key in values if key != "tracking")
    deps = stages[stage].deps if stage in stages else ()
    chosen = {key: reduce(lambda node, part: node[part], key.split("."), values) for key in keys}
    files = {name: digest for dep in deps for name, digest in _file_digests(root, dep)}
    return {f"param {key}": json.dumps(value, sort_keys=True) for key, value in chosen.items()} | files


def fingerprint(stage: str, inputs: dict[str, str]) -> str:
    """SHA-256 (hex) of `stage_inputs`. Two attempts with the same one are the same job: the second goes on
    with the first one's checkpoints and MLflow run."""
    text = json.dumps([stage, inputs], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def stage_fingerprint(stage: str, params: Params, root: Path = PROJECT_ROOT) -> str:
    """`fingerprint` of the present inputs; name checkpoint folders by it."""
    return fingerprint(stage, stage_inputs(stage, params, root))


def lock_digest(root: Path, stage: str, out: str) -> str | None:
    """MD5 that dvc.lock has for an output, None if it has none yet."""
    if not (root / "dvc.lock").is_file():
        return None
    outs = read_yaml(root / "dvc.lock").get("stages", {}).get(stage, {}).get("outs", [])
    return next((entry["md5"] for entry in outs if entry["path"] == out), None)


def _stage(name: str, body: dict[str, Any], profile: str) -> Stage:
    def names(*keys: str) -> tuple[str, ...]:
        entries = [entry for key in keys for entry in body.get(key) or []]
        flat = [next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries]
        return tuple(str(entry).replace("${profile}", profile) for entry in flat)

    # A mapping among the params names another file and its keys: the same keys, read through the overlay.
    params = tuple(entry for entry in body.get("params") or [] if isinstance(entry, str))
    command = body["cmd"] if isinstance(body["cmd"], str) else " && ".join(body["cmd"])
    return Stage(
        name, str(body.get("desc", "")), command, names("deps"), params, names("outs", "metrics", "plots")
    )


def _overlap(dep: str, out: str) -> bool:
    first, second = Path(dep), Path(out)
    return first == second or first in second.parents or second in first.parents


def _file_digests(root: Path, dep: str) -> Iterator[tuple[str, str]]:
    """(relative name, MD5) of a dependency's files; a missing one has the digest "missing"."""
    path = root / dep
    if not path.exists():
        yield dep, "missing"
        return
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and file.suffix != ".pyc" and not set(_IGNORED) & set(file.parts):
            with file.open("rb") as stream:
                yield file.relative_to(root).as_posix(), hashlib.file_digest(stream, "md5").hexdigest()
