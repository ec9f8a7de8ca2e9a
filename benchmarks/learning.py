"""What the parts of the GRPO loop are worth, measured: replay, guards, reward weights, and the gain over SFT.

Each benchmark compares arms (settings over params.yaml) on several seeds, all from the SFT policy in outputs/sft, on
navigation without ASTAR. Results are files under outputs/benchmarks: an interrupted benchmark goes on. Remove them when
parameters or outputs/sft change.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.arms import RESULTS, Arm, Budget, run_arms

SIZES = (4, 6, 8)
ONLY_WITHOUT_ASTAR = {"grpo.navigation_share": 1.0, "grpo.astar_share": 0.0}
NO_REPLAY = {"grpo.replay.replayed_groups": 0, "grpo.replay.revisit_share": 0.0}
# The probe that fell from 35 % to 18 % in 40 steps: a cost per call, two passes, nothing that holds it back.
GUARDS_OFF = {
    **ONLY_WITHOUT_ASTAR,
    **NO_REPLAY,
    "grpo.prompts_per_step": 12,
    "grpo.group_size.start": 8,
    "grpo.group_size.end": 8,
    "grpo.lr": 2e-4,
    "grpo.passes": 2,
    "grpo.minibatches": 1,
    "grpo.clip_high": 1.0,
    "grpo.entropy_bonus": 0.0,
    "grpo.kl_beta.start": 0.0,
    "grpo.kl_beta.end": 0.0,
    "grpo.kl.floor": 0.0,
    "grpo.guards.rollback": False,
    "reward.step_cost": 0.02,
    "reward.cost_on_failures": True,
}
GUARDS_ON = {
    **ONLY_WITHOUT_ASTAR,
    "grpo.prompts_per_step": 12,
    "grpo.group_size.start": 8,
    "grpo.group_size.end": 8,
    "reward.step_cost": 0.02,
}
FEW = {**ONLY_WITHOUT_ASTAR, "grpo.prompts_per_step": 4}
REPLAY = {**FEW, "grpo.replay.replayed_groups": 12}


@dataclass(frozen=True)
class Benchmark:
    """Arms and budget, and how the results are put into words."""

    arms: tuple[Arm, ...]
    budget: Budget
    seeds: int
    table: Callable[[Mapping[str, Sequence[dict[str, Any]]]], list[str]]


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % bootstrap interval."""
    from models.statistics import bootstrap_mean_interval

    low, high = bootstrap_mean_interval(values)
    return f"{sum(values) / len(values):.3f} [{low:.3f}, {high:.3f}]"


def rollouts_until(result: dict[str, Any]) -> int | None:
    """Fresh rollouts at the first evaluation that is `stop_gain` above the start, which all arms share; else None."""
    target = result["curve"][0]["success"] + result["budget"]["stop_gain"]
    reached = (point["fresh_rollouts"] for point in result["curve"] if point["success"] >= target)
    return next(reached, None)


def replay_table(results: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """Fresh rollouts until the target; a run that never got there counts with all of its rollouts (a lower bound)."""
    from models.statistics import bootstrap_mean_interval

    lines = [
        "| arm | fresh rollouts to the target | 95 % interval | reached | gradient steps |",
        "|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        found = [rollouts_until(run) for run in runs]
        spent = [
            run["curve"][-1]["fresh_rollouts"] if n is None else n for run, n in zip(runs, found, strict=True)
        ]
        low, high = bootstrap_mean_interval(spent)
        steps = sum(run["curve"][-1]["step"] for run in runs) / len(runs)
        reached = sum(n is not None for n in found)
        mean = sum(spent) / len(spent)
        lines.append(
            f"| {name} | {mean:.0f} | [{low:.0f}, {high:.0f}] | {reached} of {len(runs)} | {steps:.0f} |"
        )
    return lines


def stability_table(results: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """Runs that end above their start and never fall more than 10 points below it."""
    from models.statistics import proportion

    lines = [
        "| arm | stable runs | 95 % interval | start | end | calls at the end |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        stable = [
            run["end"]["success"] > run["start"]["success"]
            and min(p["success"] for p in run["curve"]) >= run["curve"][0]["success"] - 0.1
            for run in runs
        ]
        share = proportion(sum(stable), len(stable))
        assert share.value is not None
        assert share.interval is not None
        low, high = share.interval
        calls = sum(run["end"]["calls"] for run in runs) / len(runs)
        start, end = (
            interval([r["start"]["success"] for r in runs]),
            interval([r["end"]["success"] for r in runs]),
        )
        lines.append(
            f"| {name} | {share.value:.0%} | [{low:.0%}, {high:.0%}] | {start} | {end} | {calls:.1f} |"
        )
    return lines


def end_table(results: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """Success at the start and at the end, with intervals over seeds, and by the fewest bends of a safe path."""
    lines = [
        "| arm | SFT | GRPO | greedy: SFT | GRPO | calls per episode | GRPO by fewest bends |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        calls = interval([run["end"]["calls"] for run in runs])
        stages = ("start", "end", "greedy_start", "greedy_end")
        success = " | ".join(interval([run[stage]["success"] for run in runs]) for stage in stages)
        solved: dict[str, list[int]] = {}
        for run in runs:
            for bends, (won, asked) in run["end"]["by_bends"].items():
                before = solved.get(bends, [0, 0])
                solved[bends] = [before[0] + won, before[1] + asked]
        by_bends = ", ".join(f"{bends}: {won}/{asked}" for bends, (won, asked) in sorted(solved.items()))
        lines.append(f"| {name} | {success} | {calls} | {by_bends} |")
    return lines


BENCHMARKS = {
    "replay": Benchmark(
        (
            Arm(
                "no replay, 16 fresh groups", {**ONLY_WITHOUT_ASTAR, **NO_REPLAY, "grpo.prompts_per_step": 16}
            ),
            Arm("no replay, 4 fresh groups", {**FEW, **NO_REPLAY}),
            Arm("replay, 4 fresh and 12 replayed", REPLAY),
            Arm("replay without importance weights", {**REPLAY, "grpo.replay.importance_weights": False}),
            Arm(
                "replay without age limit",
                {**REPLAY, "grpo.replay.max_age": 10_000, "grpo.replay.max_divergence": 1e6},
            ),
        ),
        Budget(steps=24, eval_every=2, items=150, sizes=SIZES, stop_gain=0.05),
        5,
        replay_table,
    ),
    "stability": Benchmark(
        (Arm("guards on", GUARDS_ON), Arm("guards off", GUARDS_OFF)),
        Budget(steps=12, eval_every=4, items=120, sizes=SIZES),
        20,
        stability_table,
    ),
    "gain": Benchmark(
        (Arm("navigation without ASTAR", ONLY_WITHOUT_ASTAR),),
        Budget(steps=32, eval_every=8, items=240, sizes=SIZES),
        3,
        end_table,
    ),
    "weights": Benchmark(
        tuple(
            Arm(
                f"λ_tool:λ_acc {tool}:{accuracy}",
                {**ONLY_WITHOUT_ASTAR, "reward.lambda_tool": tool, "reward.lambda_acc": accuracy},
            )
            for tool, accuracy in ((0.0, 1.0), (1.0, 2.0), (1.0, 1.0), (2.0, 1.0), (4.0, 1.0))
        ),
        Budget(steps=12, eval_every=6, items=120, sizes=SIZES),
        3,
        end_table,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning",
        description=__doc__,
        epilog="Example: python -m benchmarks.learning replay --seeds 5 --workers 2",
    )
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--seeds", type=int, help="how many; default: the benchmark's own number")
    parser.add_argument(
        "--workers", type=int, default=2, help="runs at a time, one CPU core each; default: 2"
    )
    arguments = parser.parse_args()
    chosen = BENCHMARKS[arguments.benchmark]
    seeds = range(arguments.seeds or chosen.seeds)
    results = run_arms(arguments.benchmark, chosen.arms, seeds, chosen.budget, arguments.workers)
    table = chosen.table(results)
    print("\n".join(table))
    summary = {"table": table, "seeds": len(seeds), "budget": vars(chosen.budget)}
    (RESULTS / f"{arguments.benchmark}.json").write_text(
        json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
    )


if __name__ == "__main__":
    main()
