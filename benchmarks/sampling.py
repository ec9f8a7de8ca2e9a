"""Multi-turn sampling: the project's engine against transformers `generate` once per turn, in agent tokens per second.

The same policy, prompts, tools, tool-result cache and limits. The baseline reads each conversation again at every
turn, batched over the live episodes and left padded; the engine keeps the KV cache of every episode between turns.
Run `make run` first: the policy is outputs/sft.
"""

from __future__ import annotations

from statistics import median

from benchmarks.peers.measure import alternate, parser, ratio, report, single_thread


def main() -> None:
    arguments = parser("sampling", __doc__ or "", " --episodes 128")
    arguments.add_argument("--episodes", type=int, default=128, help="episodes a repeat (default: 128)")
    arguments.add_argument("--group", type=int, default=8, help="episodes of each prompt (default: 8)")
    options = arguments.parse_args()
    measure(options.episodes, options.group, options.repeats)


def measure(episodes: int, group: int, repeats: int) -> None:
    """Sample `episodes` a repeat at the online loop's temperature with each engine."""
    import time

    from benchmarks.peers.generate_engine import GenerateEngine
    from benchmarks.peers.questions import fresh_prompts
    from models.rollout import RolloutEngine, RolloutRequest
    from tasks.engines import open_policy, rollout_engine
    from tasks.workspace import OUTPUTS
    from tools.cache import ToolResultCache
    from tools.executor import ToolExecutor

    params = single_thread()
    policy = open_policy(OUTPUTS / "sft", params)

    def cache() -> ToolResultCache:
        return ToolResultCache(params.rollout.cached_results)

    executor = ToolExecutor(policy.encoder.registry, cache(), params.rollout.call_deadline_s)
    engines: dict[str, RolloutEngine] = {
        "generate": GenerateEngine(policy, executor, params.agent, batch=params.rollout.slots),
        "engine": rollout_engine(policy, params, cache()),
    }

    def run(name: str, number: int) -> dict[str, float]:
        prompts = fresh_prompts(params, episodes // group, f"sampling-{number}")
        requests = [
            RolloutRequest(p, n, 1000 * number + 8 * i + n)
            for i, p in enumerate(prompts)
            for n in range(group)
        ]
        began = time.perf_counter()
        trajectories = engines[name].sample(requests, params.grpo.temperature)
        seconds = time.perf_counter() - began
        tokens = sum(t.sampled_tokens for t in trajectories)
        return {
            "seconds": seconds,
            "tokens": tokens,
            "calls": sum(t.calls for t in trajectories),
            "tokens_per_second": tokens / seconds,
            "answered": sum(t.response is not None for t in trajectories) / len(trajectories),
        }

    rounds = alternate({name: lambda n, name=name: run(name, n) for name in engines}, repeats)
    speed = {name: [each["tokens_per_second"] for each in sides] for name, sides in rounds.items()}
    faster = ratio(speed["engine"], speed["generate"])
    report(
        "sampling",
        "multi-turn sampling, agent tokens/s",
        "transformers `generate` once per turn",
        f"{faster['median']:.1f}× ({median(speed['engine']):.0f} against {median(speed['generate']):.0f} tokens/s)",
        "≥ 5×",
        {
            "faster": faster,
            "episodes": episodes,
            "group": group,
            "slots": params.rollout.slots,
            "rounds": rounds,
        },
    )


if __name__ == "__main__":
    from tasks.cli import run_main

    run_main(main, FileNotFoundError, ValueError)
