"""The policy and the rollout engine that stages grpo and evaluate build from parameters."""

from __future__ import annotations

from pathlib import Path

from environments.vsp.pruning import hopeless
from models.policy import Policy, load_policy
from models.rollout import RolloutEngine
from models.transformers_engine import TransformersEngine
from tasks.params import PROJECT_ROOT, Params
from tasks.workspace import OUTPUTS, fresh_folder
from tools.cache import ToolResultCache
from tools.executor import ToolExecutor
from tools.vsp import vsp_registry


def open_policy(folder: Path, params: Params) -> Policy:
    """A policy that an earlier stage saved. Raises FileNotFoundError naming the stage that makes it."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder.relative_to(PROJECT_ROOT) if folder.is_relative_to(PROJECT_ROOT) else folder} holds no "
            f"model; make it with `dvc repro {folder.name}`"
        )
    return load_policy(folder, params.policy, params.agent, vsp_registry())


def rollout_engine(policy: Policy, params: Params, cache: ToolResultCache) -> RolloutEngine:
    """The engine that `rollout.engine` names, sampling from `policy`; known tool results come from `cache`."""
    executor = ToolExecutor(policy.encoder.registry, cache, params.rollout.call_deadline_s)
    if params.rollout.engine == "transformers":
        return TransformersEngine(policy, executor, params.agent, params.rollout, hopeless)
    from models.vllm_engine import VLLMEngine, start_vllm

    weights = OUTPUTS / ".weights"

    def save_weights() -> Path:
        with fresh_folder(weights) as folder:
            policy.save(folder)
        return weights

    llm = start_vllm(save_weights(), params.policy, params.agent, params.rollout)
    return VLLMEngine(llm, policy.encoder, executor, params.agent, params.rollout, save_weights, hopeless)
