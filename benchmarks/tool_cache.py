"""Live tool calls with the tool-result cache on and off, over the online loop's own steps.

Two runs of GRPO from the same policy with the same seeds, one with the cache and one without. Their episodes, rewards
and weights must stay the same, step after step; the command fails if they do not. Run `make run` first: the policy is
outputs/sft.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.peers.measure import parser, report, single_thread

if TYPE_CHECKING:
    from models.trajectory import Trajectory
    from tools.base import Tool
    from tools.registry import ToolRegistry


def main() -> None:
    arguments = parser("tool_cache", __doc__ or "", " --steps 4 --group 16", repeats=False)
    arguments.add_argument("--steps", type=int, default=4, help="steps of the online loop (default: 4)")
    arguments.add_argument("--group", type=int, help="episodes of each prompt (default: grpo.group_size)")
    options = arguments.parse_args()
    measure(options.steps, options.group)


def measure(steps: int, group: int | None) -> None:
    """Run both loops side by side. Raises ValueError when an episode or a reward differs."""
    from models.grpo import grpo_step
    from models.transformers_engine import TransformersEngine
    from tasks.grpo import build_parts
    from tools.cache import ToolResultCache
    from tools.executor import ToolExecutor

    size = {} if group is None else {"grpo.group_size": {"start": group, "end": group}}
    params = single_thread({"grpo.steps": steps, **size})
    cache = ToolResultCache(params.rollout.cached_results)
    loops, live = {}, {}
    for name, used in (("on", cache), ("off", None)):
        parts, state = build_parts(params, cache)
        registry, live[name] = counting(parts.policy.encoder.registry)
        executor = ToolExecutor(registry, used, params.rollout.call_deadline_s)
        engine = TransformersEngine(parts.policy, executor, params.agent, params.rollout)
        loops[name] = (replace(parts, rollouts=engine), state)
    difference, rows = 0.0, []
    for step in range(steps):
        found: dict[str, list[Trajectory]] = {}
        metrics: dict[str, dict[str, float]] = {}
        for name, (parts, state) in loops.items():
            metrics[name], found[name] = grpo_step(parts, state, params.grpo, params.reward, params.seed)
        rewards = {name: each["reward/total"] for name, each in metrics.items()}
        difference = max(difference, abs(rewards["on"] - rewards["off"]))
        if difference > 0 or [told(t) for t in found["on"]] != [told(t) for t in found["off"]]:
            raise ValueError(f"step {step}: with the cache, episodes or rewards are not those without it")
        ran = {name: count.total() for name, count in live.items()}
        seconds = {name: each["grpo/sampling_seconds"] for name, each in metrics.items()}
        rows.append(
            {
                "episodes": len(found["on"]),
                "live_so_far": ran,
                "rewards": rewards,
                "sampling_seconds": seconds,
            }
        )
        print(f"step {step}: live calls so far {ran}", flush=True)
    first, last = (round(params.grpo.group_size.at(end)) for end in (0.0, 1.0))
    sizes = f"{first}" if first == last else f"{first} to {last}"
    saved = 1 - live["on"].total() / live["off"].total()
    report(
        "tool_cache",
        f"live tool calls with the result cache, groups of {sizes}",
        "the same GRPO run without it",
        f"{100 * saved:.0f} % fewer ({live['on'].total()} against {live['off'].total()}), "
        f"reward difference {difference:g}",
        "≥ 70 % fewer",
        {
            "saved": saved,
            "group_size": params.grpo.group_size.model_dump(),
            "reward_difference": difference,
            "by_tool": live,
            "cache": cache.stats(),
            "steps": rows,
        },
    )


def counting(registry: ToolRegistry) -> tuple[ToolRegistry, Counter[str]]:
    """The same tools, and how often each of them really ran."""
    from tools.registry import ToolRegistry

    ran: Counter[str] = Counter()

    def counted(tool: Tool) -> Tool:
        def run(picture: Any, given: Any) -> Any:
            ran[tool.name] += 1
            return tool.run(picture, given)

        return replace(tool, run=run)

    return ToolRegistry([counted(registry.get(name)) for name in registry.names]), ran


def told(trajectory: Trajectory) -> tuple[Any, ...]:
    """All that must not depend on where a tool's result came from."""
    return (
        trajectory.ids.tobytes(),
        trajectory.mask.tobytes(),
        trajectory.logprobs.tobytes(),
        [picture.sha256 for picture in trajectory.pictures],
        trajectory.components,
        trajectory.stop_reason,
    )


if __name__ == "__main__":
    from tasks.cli import run_main

    run_main(main, FileNotFoundError, ValueError)
