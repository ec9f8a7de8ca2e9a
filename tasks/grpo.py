"""Stage grpo: the online loop with cached rollouts, from the SFT policy."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from typing import TYPE_CHECKING

from tasks.cli import run_main
from tasks.params import Params, load_params

if TYPE_CHECKING:
    from environments.base import Prompt
    from models.checkpoint import Checkpoints
    from models.grpo import GRPOParts, GRPOState
    from tasks.tracked_run import StageRun
    from tools.cache import ToolResultCache

SHOWN_ROLLOUTS = 120  # on the page about a step's rollouts


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
    from tasks.episode_traces import log_page
    from tasks.plots import write_curves
    from tasks.rollout_store import save_rollouts
    from tasks.workspace import OUTPUTS, ProgressLog, fresh_folder, stage_checkpoints, use_threads
    from tools.cache import ToolResultCache

    use_threads(params)
    cache = ToolResultCache(params.rollout.cached_results)
    parts, state = build_parts(params, cache)
    config = params.grpo
    checkpoints, best = stage_checkpoints("grpo", params), stage_checkpoints("grpo", params, "best")
    state = restore(parts, state, checkpoints)
    questions = validation_questions(config.validation_items)
    run.expect_steps(config.steps)
    _describe(run, questions)
    if state.step == 0:
        metrics = validate(parts, questions, config.guards.diversity_prompts, config.guards.diversity_samples)
        run.log_metrics(metrics, 0)
        guard(parts, state, metrics, best)
    with ProgressLog("grpo") as progress:
        while state.step < config.steps:
            metrics, fresh = grpo_step(parts, state, config, params.reward, params.seed)
            metrics |= tool_metrics(cache)
            if state.step % config.eval_every == 0 or state.step == config.steps:
                prompts, samples = config.guards.diversity_prompts, config.guards.diversity_samples
                metrics |= validate(parts, questions, prompts, samples)
                log_validation_traces(parts, questions[: config.validation_traces], state.step, run)
                title, page = f"rollouts of step {state.step}", f"rollouts/step-{state.step:05d}.html"
                log_page(run, fresh[:SHOWN_ROLLOUTS], params.reward, title, page)
            if note := guard(parts, state, metrics, best):
                run.set_tags({f"rollback.{state.guard.rollbacks}": note})
            run.log_metrics(metrics, state.step)
            progress.update(state.step, config.steps, f"reward {metrics['reward/total']:.3f}")
            if state.step % config.checkpoint_every == 0 and state.step < config.steps:
                checkpoints.store(parts.engine, {"step": state.step, "state": state})
    if config.guards.rollback:
        restore(parts, state, best)
    with fresh_folder(OUTPUTS / "grpo") as folder:
        parts.policy.save(folder)
    with fresh_folder(OUTPUTS / "curves" / "grpo") as folder:
        write_curves(run, ("reward/total", "grpo/validation_success"), folder)
    with fresh_folder(OUTPUTS / "rollouts") as folder:
        save_rollouts(folder, state.replay)
    checkpoints.clear()
    best.clear()


def _describe(run: StageRun, questions: list[Prompt]) -> None:
    """Record which validation questions the curves are about; training asks fresh maps drawn from the seed."""
    asked = json.dumps([(p.prompt_id, p.question, p.hidden["map_hash"], p.tools) for p in questions])
    digest = hashlib.sha256(asked.encode()).hexdigest()
    source = "data/cold_start/validation_items.parquet"
    run.log_dataset("validation_items", source, digest, "validation", len(questions))


def build_parts(params: Params, cache: ToolResultCache) -> tuple[GRPOParts, GRPOState]:
    """Policy, frozen reference, DeepSpeed engine, sampler and prompt source, and the state before step 0."""
    from environments.vsp.prompts import VSP
    from models.curriculum import prompt_source
    from models.grpo import GRPOParts, GRPOState
    from models.training_engine import start_engine
    from tasks.engines import open_policy, rollout_engine
    from tasks.prefill import prefill
    from tasks.workspace import OUTPUTS
    from tools.vsp import VSP_TOOLS

    config = params.grpo
    policy, reference = open_policy(OUTPUTS / "sft", params), open_policy(OUTPUTS / "sft", params)
    reference.model.requires_grad_(False)
    if config.advantage == "gae":
        policy.model.add_critic()
    engine = start_engine(
        policy.model,
        lr=config.lr,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        zero_stage=config.zero_stage,
    )
    environment = VSP()
    draw = prompt_source(environment, config, VSP_TOOLS, params.data, params.seed)
    parts = GRPOParts(
        policy=policy,
        reference=reference,
        engine=engine,
        rollouts=rollout_engine(policy, params, cache),
        draw_prompts=draw,
        environment=environment,
    )
    state = GRPOState.start(config)
    state.pool.admit(policy.model)
    state.replay.spill_folder = OUTPUTS / ".spilled_rollouts"
    prefill(state, policy, params)
    return parts, state


def restore(parts: GRPOParts, state: GRPOState, checkpoints: Checkpoints) -> GRPOState:
    """The stored state, with the weights that belong to it, or the given one if nothing is stored."""
    saved = checkpoints.restore(parts.engine)
    if saved is None:
        return state
    restored: GRPOState = saved["state"]
    restored.replay.spill_folder = state.replay.spill_folder
    restored.pool.load_current_into(parts.reference.model)
    parts.rollouts.sync(restored.version)
    return restored


def guard(parts: GRPOParts, state: GRPOState, metrics: dict[str, float], best: Checkpoints) -> str | None:
    """Keep the best policy; on divergence go back to it with a smaller learning rate and say why.

    Metrics that are not finite are taken out of `metrics`. Raises ValueError when there is nothing to go back to.
    """
    success, guards = metrics.get("grpo/validation_success"), state.guard
    if not guards.config.rollback:
        return None
    reason = guards.divergence(metrics)
    if reason is None:
        if success is not None and guards.is_best(success):
            best.store(parts.engine, {"step": state.step, "state": state})
        return None
    saved = best.restore(parts.engine)
    if saved is None:
        raise ValueError(f"grpo diverged before its first evaluation: {reason}; lower grpo.lr")
    state.replay.forget_after(saved["state"].version)
    state.lr_scale *= guards.config.lr_factor
    state.last_kl = saved["state"].last_kl
    parts.rollouts.sync(state.version)
    for name in [name for name, value in metrics.items() if not math.isfinite(value)]:
        del metrics[name]
    metrics["grpo/rollbacks"] = float(guards.rollbacks + 1)
    return guards.note_rollback(state.step, reason)


def validation_questions(count: int) -> list[Prompt]:
    """Up to `count` validation prompts, spread evenly over the file so that every task and size is there."""
    from tasks.schema import load_items
    from tasks.workspace import COLD_START

    items = load_items(COLD_START / "validation_items.parquet")
    stride = max(1, len(items) // count)
    return items[::stride][:count]


def validate(
    parts: GRPOParts, questions: list[Prompt], diversity_prompts: int = 0, diversity_samples: int = 2
) -> dict[str, float]:
    """Greedy success on validation prompts, by task and by whether ASTAR is offered, and diversity of plans."""
    from models.guards import plan_diversity
    from models.rollout import RolloutRequest

    trajectories = parts.rollouts.sample([RolloutRequest(p, 0, 0) for p in questions], 0.0)
    won: dict[str, list[bool]] = {}
    for trajectory in trajectories:
        prompt = trajectory.prompt
        right = trajectory.response is not None and parts.environment.grade(prompt, trajectory.response)
        name = prompt.task + ("_with_astar" if "ASTAR" in prompt.tools else "")
        won.setdefault(f"grpo/validation_{name}", []).append(right)
        won.setdefault("grpo/validation_success", []).append(right)
    metrics = {name: sum(values) / len(values) for name, values in won.items()}
    metrics["grpo/validation_calls"] = sum(t.calls for t in trajectories) / len(trajectories)
    if diversity_prompts:
        stride = max(1, len(questions) // diversity_prompts)
        requests = [
            RolloutRequest(prompt, n, 1000 * index + n)
            for index, prompt in enumerate(questions[::stride][:diversity_prompts])
            for n in range(diversity_samples)
        ]
        metrics["grpo/plan_diversity"] = plan_diversity(parts.rollouts.sample(requests, 1.0))
    return metrics


def log_validation_traces(parts: GRPOParts, questions: list[Prompt], step: int, run: StageRun) -> None:
    """The same few validation episodes after each evaluation, as traces of the run."""
    from models.grpo import score
    from models.rollout import RolloutRequest
    from tasks.episode_traces import log_traces

    episodes = parts.rollouts.sample([RolloutRequest(p, 0, 0) for p in questions], 0.0)
    log_traces(run, [score(each, parts.environment) for each in episodes], {"grpo.step": str(step)})


def tool_metrics(cache: ToolResultCache) -> dict[str, float]:
    """Hit rate of the tool-result cache by tool, over the run so far."""
    return {
        f"tools/{name}_hit_rate": counts["hits"] / max(1, counts["hits"] + counts["misses"])
        for name, counts in cache.stats().items()
    }


if __name__ == "__main__":
    from models.checkpoint import CheckpointError

    run_main(main, CheckpointError, ValueError)
