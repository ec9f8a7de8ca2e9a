"""What a sweep is: its parameters, its space and the folder that is named after both.

Everything that decides a trial's result is hashed into the folder's name, so a changed space, direction or base never
mixes with earlier trials. How many trials there are, and how many at a time, may change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tasks.params import PROJECT_ROOT, Params, ParamsError, override
from tasks.sweep_space import Space, base_values, resolve_space, space_data

FOLDER = Path("outputs/sweeps")
# Blocks that a trial reads, beside the SFT policy that it starts from.
_BASE = ("profile", "seed", "policy", "agent", "rollout", "grpo", "reward")
_SHAPE = ("objectives", "steps", "eval_every", "fresh_prompts", "replayed_groups", "shared_prompts")


class SweepError(Exception):
    """The sweep cannot go on; the message is one line with the remedy."""


@dataclass(frozen=True)
class Plan:
    """A sweep of the project in `root`: parameters with profile, and the resolved space."""

    params: Params
    root: Path
    policy_digest: str  # of the SFT policy; "missing" where there is none yet

    @cached_property
    def space(self) -> Space:
        return resolve_space(self.params)

    @cached_property
    def base(self) -> dict[str, Any]:
        """Settings of trial 0."""
        return base_values(self.params, self.space)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All that decides what a trial with given settings results in, dotted keys to plain values."""
        values = self.params.model_dump(mode="json")
        shape = {f"sweep.{key}": values["sweep"][key] for key in _SHAPE}
        space = {f"sweep.space.{name}": data for name, data in space_data(self.space).items()}
        base = {key: values[key] for key in _BASE}
        return {**base, **shape, **space, "outputs/sft": self.policy_digest}

    @property
    def name(self) -> str:
        text = json.dumps(self.identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def folder(self) -> Path:
        return self.root / FOLDER / self.name

    @property
    def directions(self) -> list[Literal["minimize", "maximize"]]:
        """Of the objectives, as Optuna names them."""
        return ["minimize" if name == "calls" else "maximize" for name in self.params.sweep.objectives]

    def trial_folder(self, number: int) -> Path:
        """Checkpoints and result of one trial."""
        return self.folder / "trials" / str(number)

    def trial_params(self, settings: Mapping[str, Any]) -> Params:
        """Parameters of a trial. Raises ParamsError for settings that do not go together."""
        sweep = self.params.sweep
        shape = {
            "grpo.steps": sweep.steps,
            "grpo.prompts_per_step": sweep.fresh_prompts,
            "grpo.replay.replayed_groups": sweep.replayed_groups,
            "grpo.eval_every": sweep.eval_every,
            "grpo.checkpoint_every": sweep.eval_every,
        }
        return override(self.params, {**shape, **settings})

    def save(self) -> None:
        """Write what workers read: they must not follow edits of params.yaml meanwhile."""
        self.folder.mkdir(parents=True, exist_ok=True)
        data = {"params": self.params.model_dump(mode="json"), "policy_digest": self.policy_digest}
        draft = self.folder / "plan.tmp"
        draft.write_text(json.dumps(data, indent=1), encoding="utf-8")
        draft.replace(self.folder / "plan.json")


def make_plan(params: Params, root: Path = PROJECT_ROOT, expected: str | None = None) -> Plan:
    """The sweep that the parameters describe.

    Args:
        params: parameters, with their profile.
        root: the project.
        expected: name of an earlier sweep that it has to be.

    Raises:
        ParamsError: the space does not fit the parameters, or this is another sweep than `expected`.
    """
    plan = Plan(params, root, _digest(root / "outputs" / "sft"))
    if expected is not None and expected != plan.name:
        raise ParamsError(_other_sweep(plan, expected))
    return plan


def load_plan(folder: Path) -> Plan:
    """The plan that `save` wrote. Raises SweepError if there is none."""
    try:
        data = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SweepError(f"{folder} holds no sweep; start one with `python -m tasks.sweep`") from None
    params = Params.model_validate_json(json.dumps(data["params"]), strict=True)
    return Plan(params, folder.resolve().parents[2], data["policy_digest"])


def _other_sweep(plan: Plan, expected: str) -> str:
    """Why the parameters are not those of the sweep that was asked for."""
    folder = plan.root / FOLDER / expected
    if not (folder / "plan.json").is_file():
        there = sorted(path.parent.name for path in folder.parent.glob("*/plan.json"))
        return f"--study: no sweep {expected} in {FOLDER}; there are {', '.join(there) or 'none'}"
    old, new = load_plan(folder).identity, plan.identity
    changed = sorted(key for key in {**old, **new} if old.get(key) != new.get(key))
    shown = "; ".join(_change(key, old.get(key), new.get(key)) for key in changed[:3])
    return (
        f"sweep {expected} was started with other settings: {shown}{' …' if len(changed) > 3 else ''}; "
        "put them back to go on with it, or leave out --study to begin a new one"
    )


def _change(key: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict) and not key.startswith("sweep.space."):
        old, new = (
            {k: v for k, v in one.items() if other.get(k) != v} for one, other in ((old, new), (new, old))
        )
    return f"{key} was {json.dumps(old)}, is {json.dumps(new)}"


def _digest(folder: Path) -> str:
    """SHA-256 over the files of a policy, "missing" without one."""
    if not (folder / "config.json").is_file():
        return "missing"
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            digest.update(file.relative_to(folder).as_posix().encode())
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
