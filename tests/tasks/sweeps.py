"""A small project of its own for tests of sweeps: the real code, a tiny policy, a search that ends in seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tasks.env import offline_environment
from tasks.params import PROJECT_ROOT, Params, load_params, override

CODE = ("tasks", "models", "environments", "tools", "mlflow")
SMALL: dict[str, Any] = {
    "policy.hidden_size": 48,
    "policy.layers": 2,
    "policy.heads": 3,
    "policy.kv_heads": 3,
    "policy.intermediate_size": 64,
    "policy.vision_hidden_size": 32,
    "policy.vision_depth": 1,
    "policy.vocab_size": 520,
    "agent.max_tokens": 160,
    "agent.max_turns": 3,
    "rollout.slots": 32,
    "grpo.sizes": [4],
    "grpo.group_size": {"start": 4, "end": 4},
    "grpo.validation_items": 4,
    "sweep.n_trials": 3,
    "sweep.steps": 2,
    "sweep.eval_every": 1,
    "sweep.fresh_prompts": 1,
    "sweep.replayed_groups": 1,
    "sweep.shared_prompts": 2,
    "sweep.pruner": {"percentile": 50.0, "startup_trials": 1, "warmup_steps": 0},
    "reward.lambda_tool": 2.0,
    "sweep.space": {
        "reward.lambda_tool": {"low": 0.5, "high": 4.0},
        "grpo.lr": {"low": 1e-5, "high": 1e-3, "log": True},
    },
}


def small_params(**changes: Any) -> Params:
    """The laptop's parameters, shrunk; `changes` have `__` for dots."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return override(load_params(profile="laptop"), {**SMALL, **named})


def write_project(root: Path, params: Params, empty_store: Path) -> Path:
    """The code, these parameters, an SFT policy of random weights and a few validation questions in `root`."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from ruamel.yaml import YAML

    from tasks.schema import ITEMS, item_row
    from tests.models.policies import small_policy, some_prompts

    for name in CODE:
        shutil.copytree(PROJECT_ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "profiles").mkdir()
    data = params.model_dump(mode="json")
    with (root / "params.yaml").open("w", encoding="utf-8") as stream:
        YAML(typ="safe", pure=True).dump(data, stream)
    blocks = [key for key, value in data.items() if isinstance(value, dict)]
    (root / "profiles" / "laptop.yaml").write_text("".join(f"{key}: {{}}\n" for key in blocks))
    shutil.copy(empty_store, root / "mlflow.db")
    small_policy(agent=params.agent, config=params.policy).save(root / "outputs" / "sft")
    (root / "data" / "cold_start").mkdir(parents=True)
    table = pa.Table.from_pylist([item_row(prompt) for prompt in some_prompts(4)], schema=ITEMS)
    pq.write_table(table, root / "data" / "cold_start" / "validation_items.parquet")
    return root


def command(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m …` in the project."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=root,
        env={**os.environ, **offline_environment()},
        capture_output=True,
        text=True,
        check=False,
    )
