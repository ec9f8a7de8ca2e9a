"""The one reader of params.yaml: YAML 1.2, overlaid by a profile, checked into one frozen pydantic model.

Every stage, flow, sweep and test gets its settings from `load_params`, so `1e-5` is a float everywhere
(PyYAML reads it as a string; treeverse/dvc#5971), a misspelt key is an error that names the key, and a
string where a number belongs never gets coerced silently.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from environments.vsp.config import ColdStartConfig
from models.config import (
    AgentConfig,
    GRPOConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
    Settings,
    SFTConfig,
)
from tasks.sweep_config import SweepConfig

PROJECT_ROOT = Path(__file__).resolve().parents[1]

# Not in profiles: `dvc exp run -S seed=1` sets params.yaml and must not lose against the profile.
_PLAIN_KEYS = ("profile", "seed", "threads")


class ParamsError(Exception):
    """The parameters cannot be used. The message has one line per mistake: file, key, value, remedy."""


class ValidateConfig(Settings):
    """Limits of the data gate."""

    min_rows: int = Field(1, ge=1, description="fewest training trajectories that may pass")
    max_rows: int = Field(1_000_000, ge=1)
    max_tokens: int = Field(1024, ge=64, description="longest trajectory, prompt included")
    max_turns: int = Field(12, ge=1)
    share_tolerance: float = Field(0.02, ge=0, le=1, description="allowed drift of each share of the mix")
    report_rows: int = Field(5, ge=1, description="bad rows shown per failed expectation")


class EvaluateConfig(Settings):
    """What is measured after training."""

    items_per_size: int | None = Field(None, ge=1, description="per task and size; null takes all")
    benchmark: str | None = Field(None, description="folder with the published VSP benchmark, or null")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    confidence: float = Field(0.95, gt=0, lt=1, description="of every interval, and of the promotion test")
    report_episodes: int = Field(120, ge=0, description="episodes in the HTML report")
    traces: int = Field(20, ge=0, description="episodes stored as MLflow traces, one span per tool call")


class PromoteConfig(Settings):
    """When a new model replaces the champion."""

    model_name: str = Field("toolplan-vsp", min_length=1, description="name in the MLflow registry")
    policy: Literal["grpo", "sft"] = Field("grpo", description="the policy that is registered")
    suite: Literal["held_out", "benchmark"] = "held_out"


class TrackingConfig(Settings):
    """Where MLflow keeps its records. Not part of any stage's hash: it never changes a result."""

    experiment: str = Field("toolplan-vsp", min_length=1)
    tracking_uri: str | None = Field(
        None, description="null: sqlite in the project; MLFLOW_TRACKING_URI wins"
    )
    artifact_root: str | None = Field(None, description="null: mlartifacts/ in the project, or the server's")
    max_points_per_metric: int = Field(1000, ge=16)
    system_metrics_interval_s: float = Field(10.0, gt=0)


class Params(Settings):
    """All of params.yaml with the profile laid over it."""

    profile: str = Field("laptop", min_length=1)
    seed: int = Field(..., ge=0)
    threads: int = Field(..., ge=1, description="CPU threads of each training process")
    data: ColdStartConfig
    gate: ValidateConfig
    policy: PolicyConfig
    agent: AgentConfig
    rollout: RolloutConfig
    sft: SFTConfig
    grpo: GRPOConfig
    reward: RewardConfig
    evaluate: EvaluateConfig
    promote: PromoteConfig
    sweep: SweepConfig
    tracking: TrackingConfig

    @model_validator(mode="after")
    def _sizes_are_trained(self) -> Params:
        unseen = sorted(set(self.grpo.sizes) - set(self.data.sizes))
        if unseen:
            raise ValueError(f"grpo.sizes has {unseen}, unlike data.sizes: those stay unseen until the test")
        return self


def load_params(path: Path | str | None = None, profile: str | None = None) -> Params:
    """Read params.yaml and lay `profiles/<profile>.yaml` (next to it) over it.

    A profile names every block, if only as `{}`: dvc.yaml follows each block of the profile on its own.

    Args:
        path: the file; the project's own when absent.
        profile: use this profile instead of the one the file names.

    Raises:
        ParamsError: one line per mistake.
    """
    file = PROJECT_ROOT / "params.yaml" if path is None else Path(path)
    base = read_yaml(file)
    if profile is not None:
        base["profile"] = profile
    name = base.get("profile", "laptop")
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise ParamsError(f"{file}: profile: {name!r} is no profile; use one of {_profiles(file.parent)}")
    overlay_file = file.parent / "profiles" / f"{name}.yaml"
    if not overlay_file.is_file():
        close = difflib.get_close_matches(name, _profiles(file.parent), 1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {_profiles(file.parent)}"
        raise ParamsError(f"{file}: profile: {name!r} has no file {overlay_file}; {hint}")
    overlay = read_yaml(overlay_file)
    blocks = [key for key in Params.model_fields if key not in _PLAIN_KEYS]
    wrong = [f"{overlay_file}: {key}: belongs in params.yaml" for key in overlay if key in _PLAIN_KEYS]
    wrong += [f"{overlay_file}: {key}: is missing; add `{key}: {{}}`" for key in blocks if key not in overlay]
    if wrong:
        raise ParamsError("\n".join(wrong))
    sources = dict.fromkeys(_leaf_paths(overlay), overlay_file)
    return _validate(merge(base, overlay), file, sources)


def override(params: Params, changes: Mapping[str, Any]) -> Params:
    """A checked copy with dotted keys replaced, e.g. `override(p, {"grpo.lr": 1e-4})`. For sweeps and tests.

    Raises:
        ParamsError: for an unknown key or an unfit value.
    """
    data = params.model_dump(mode="json")
    for dotted, value in changes.items():
        *parents, leaf = dotted.split(".")
        reduce(lambda node, key: node.setdefault(key, {}), parents, data)[leaf] = value
    return _validate(data, Path("override"), {})


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML 1.2 file; an empty file is an empty mapping.

    Raises:
        ParamsError: the file is missing, unreadable, not YAML or not a mapping.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ParamsError(f"{file}: no such file; restore it with `git checkout {file.name}`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ParamsError(f"{file}: cannot be read ({error}); it must be a readable UTF-8 file") from None
    try:
        data = YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        line = f"line {mark.line + 1} " if mark is not None else ""
        problem = " ".join(str(error.problem).split())
        raise ParamsError(f"{file}: {line}is not valid YAML: {problem}") from None
    except YAMLError as error:
        raise ParamsError(f"{file}: is not valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ParamsError(f"{file}: must hold `key: value` lines, but holds a {type(data).__name__}")
    return data


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """`overlay` laid over `base`: mappings merge key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in overlay.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def flatten(params: BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys to leaves. Lists are leaves; so are empty mappings."""
    data = params.model_dump(mode="json") if isinstance(params, BaseModel) else params
    return dict(_flat_items(data, ""))


def config_hash(params: Params, blocks: Iterable[str]) -> str:
    """SHA-256 (hex) over the named top-level blocks, independent of file layout and of `1` against `1.0`."""
    data = params.model_dump(mode="json")
    chosen = {block: data[block] for block in sorted(set(blocks))}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _flat_items(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flat_items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _profiles(root: Path) -> list[str]:
    return sorted(file.stem for file in (root / "profiles").glob("*.yaml"))


def _leaf_paths(node: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaf_paths(value, (*path, str(key)))
        else:
            yield (*path, str(key))


def _validate(data: dict[str, Any], file: Path, sources: Mapping[tuple[str, ...], Path]) -> Params:
    """Check plain data; `sources` says which paths come from another file than `file`."""

    def where(path: tuple[Any, ...]) -> str:
        keys = tuple(str(part) for part in path)
        found = (sources[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in sources)
        return f"{next(found, file)}: {'.'.join(keys) or '(top level)'}"

    unfit = [f"{where(path)}: {problem}" for path, problem in _unfit_leaves(data, ())]
    if unfit:
        raise ParamsError("\n".join(unfit))
    try:
        # JSON mode: lists become tuples and 1 a float, but "1e-5" stays a string and true no number.
        return Params.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        lines = [f"{where(item['loc'])}: {_explain(item)}" for item in error.errors(include_url=False)]
        raise ParamsError("\n".join(lines)) from None


def _unfit_leaves(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Leaves that JSON cannot hold or that are no number for any purpose."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if isinstance(key, str):
                yield from _unfit_leaves(value, (*path, key))
            else:
                yield (
                    (*path, key),
                    f"the key {key!r} is a {type(key).__name__}; quote it if it is a word",
                )
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _unfit_leaves(value, (*path, index))
    elif isinstance(node, float) and not math.isfinite(node):
        yield path, f"{node} is not a finite number; write a finite one"
    elif not isinstance(node, str | int | float | bool | None):
        yield path, f"{node} is read as a {type(node).__name__}; quote it if it is text"


def _explain(item: Any) -> str:
    """One pydantic error as `value problem; remedy`."""
    kind, value, location = item["type"], item.get("input"), item["loc"]
    if kind == "extra_forbidden":
        known = list(_model_at(location[:-1]).model_fields)
        close = difflib.get_close_matches(str(location[-1]), known, 1)
        return (
            f"unknown key; did you mean {close[0]}?"
            if close
            else f"unknown key; known here: {', '.join(known)}"
        )
    if kind == "missing":
        return "is missing; add it"
    if kind == "value_error":
        block = ".".join(str(part) for part in location)
        return str(item["ctx"]["error"]).removeprefix(f"{block}: ")
    shown = json.dumps(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    hint = "; write the number without quotes" if isinstance(value, str) and _is_number(value) else ""
    return f"{shown}: {item['msg'][0].lower()}{item['msg'][1:]}{hint}"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _model_at(location: tuple[Any, ...]) -> type[BaseModel]:
    """The settings class that holds the keys at `location`, e.g. ("grpo", "replay") -> ReplayConfig."""
    model: type[BaseModel] = Params
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None:
            break
        candidates = (field.annotation, *typing.get_args(field.annotation))
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), model)
    return model
