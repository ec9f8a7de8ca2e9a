"""Stage grpo: the online loop with cached rollouts, from the SFT policy."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tasks.cli import run_main
from tasks.params import Params, load_params

if TYPE_CHECKING:
    from environments.base import Prompt
    from models.grpo import GRPOParts, GRPOState
    from tasks.tracking import StageRun
    from tools.cache import ToolResultCache


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m tasks.grpo",
        description="Improve the SFT policy by GRPO on fresh training maps. Goes on where a killed run stopped.",
        epilog="Example: python -m tasks.grpo",
    ).parse_args()
    run_grpo(load_params())


def run_grpo(params: Params) -> None:
    """Train, save the policy to outputs/grpo and record everything in the stage's MLflow run."""
    from tasks.tracking import stage_run

    with stage_run("grpo", params) as run:
        _train(params, run)


def _train(params: Params, run: StageRun) -> None:
    from models.grpo import grpo_step
    from tasks.workspace import (
        COLD_START,
        OUTPUTS,
        ProgressLog,
        fresh_folder,
        stage_checkpoints,
        use_threads,
    )
    from tools.cache import ToolResultCache

    use_threads(params)
    cache = ToolResultCache(params.rollout.cached_results)
    parts, state = build_parts(params, cache)
    checkpoints = stage_checkpoints("grpo", params)
    saved = checkpoints.restore(parts.engine)
    if saved is not None:
        state.step, state.version, state.replay.groups = saved["step"], saved["version"], saved["groups"]
        parts.rollouts.sync(state.version)
    config = params.grpo
    questions = validation_questions(COLD_START / "validation_items.parquet", config.validation_items)
    run.expect_steps(config.steps)
    if state.step == 0:
        run.log_metrics(validate(parts, questions), 0)
    with ProgressLog("grpo") as progress:
        while state.step < config.steps:
            metrics, _ = grpo_step(parts, state, config, params.reward, params.seed)
            metrics |= tool_metrics(cache)
            if state.step % config.eval_every == 0 or state.step == config.steps:
                metrics |= validate(parts, questions)
            run.log_metrics(metrics, state.step)
            progress.update(state.step, config.steps, f"reward {metrics['reward/total']:.3f}")
            if state.step % config.checkpoint_every == 0 and state.step < config.steps:
                checkpoints.store(
                    parts.engine,
                    {"step": state.step, "version": state.version, "groups": state.replay.groups},
                )
    with fresh_folder(OUTPUTS / "grpo") as folder:
        parts.policy.save(folder)
    checkpoints.clear()


def build_parts(params: Params, cache: ToolResultCache) -> tuple[GRPOParts, GRPOState]:
    """Policy, frozen reference, DeepSpeed engine, sampler and prompt source, and the state before step 0."""
    from environments.vsp.prompts import VSP
    from models.curriculum import prompt_source
    from models.grpo import GRPOParts, GRPOState
    from models.replay import ReplayBuffer
    from models.training_engine import start_engine
    from tasks.engines import open_policy, rollout_engine
    from tasks.workspace import OUTPUTS
    from tools.vsp import VSP_TOOLS

    policy, reference = open_policy(OUTPUTS / "sft", params), open_policy(OUTPUTS / "sft", params)
    reference.model.requires_grad_(False)
    engine = start_engine(
        policy.model,
        lr=params.grpo.lr,
        weight_decay=params.grpo.weight_decay,
        max_grad_norm=params.grpo.max_grad_norm,
        zero_stage=params.grpo.zero_stage,
    )
    environment = VSP()
    parts = GRPOParts(
        policy=policy,
        reference=reference,
        engine=engine,
        rollouts=rollout_engine(policy, params, cache),
        draw_prompts=prompt_source(
            environment,
            params.grpo,
            VSP_TOOLS,
            params.data.hole_density,
            params.data.path_lengths,
            params.seed,
        ),
        grade=environment.grade,
    )
    return parts, GRPOState(step=0, version=0, replay=ReplayBuffer(params.grpo.replay))


def validation_questions(path: object, count: int) -> list[Prompt]:
    """Up to `count` validation prompts, spread evenly over the file so that every task and size is there."""
    from pathlib import Path

    from tasks.schema import load_items

    items = load_items(Path(str(path)))
    stride = max(1, len(items) // count)
    return items[::stride][:count]


def validate(parts: GRPOParts, questions: list[Prompt]) -> dict[str, float]:
    """Greedy success on validation prompts, by task and by whether ASTAR is offered."""
    from models.rollout import RolloutRequest

    trajectories = parts.rollouts.sample([RolloutRequest(p, 0, 0) for p in questions], 0.0)
    won: dict[str, list[bool]] = {}
    for trajectory in trajectories:
        prompt = trajectory.prompt
        right = trajectory.response is not None and parts.grade(prompt, trajectory.response)
        name = prompt.task + ("_with_astar" if "ASTAR" in prompt.tools else "")
        won.setdefault(f"grpo/validation_{name}", []).append(right)
        won.setdefault("grpo/validation_success", []).append(right)
    return {name: sum(values) / len(values) for name, values in won.items()}


def tool_metrics(cache: ToolResultCache) -> dict[str, float]:
    """Hit rate of the tool-result cache by tool, over the run so far."""
    return {
        f"tools/{name}_hit_rate": counts["hits"] / max(1, counts["hits"] + counts["misses"])
        for name, counts in cache.stats().items()
    }


if __name__ == "__main__":
    from models.checkpoint import CheckpointError

    run_main(main, CheckpointError, ValueError)
