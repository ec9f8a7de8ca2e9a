"""One GRPO step, rollout and update: the project's loop against TRL's GRPOTrainer.

The same policy (the tiny Qwen2.5-VL with the map's picture in the prompt), prompt ids, tools, group size, token limits,
KL weight and learning rate (so small that both policies stay what they are). TRL runs its own tool loop with
`environment_factory` and transformers `generate`. Without replay on our side, and with no picture in observations on
either. The two take turns within TRL's training loop. Needs `pip install -e '.[benchmarks]'` and outputs/sft
(`make run`).
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.peers.measure import parser, ratio, report, single_thread

if TYPE_CHECKING:
    from benchmarks.peers.trl_grpo import TRLStep

SETTINGS = {
    "agent.observation_pictures": [],
    "grpo.lr": 1e-6,
    "grpo.passes": 1,
    "grpo.minibatches": 1,
    "grpo.replay.replayed_groups": 0,
    "grpo.replay.revisit_share": 0.0,
    "grpo.eval_every": 1000,
}


def main() -> None:
    arguments = parser("grpo_step", __doc__ or "", " --prompts 8 --group 8 --repeats 4")
    arguments.add_argument("--prompts", type=int, default=8, help="prompts a step (default: 8)")
    arguments.add_argument("--group", type=int, default=8, help="episodes of each prompt (default: 8)")
    arguments.add_argument(
        "--trl-batch",
        type=int,
        default=32,
        help="sequences in one forward pass of TRL's update (default: 32)",
    )
    options = arguments.parse_args()
    measure(options.prompts, options.group, options.trl_batch, options.repeats)


def measure(prompts: int, group: int, trl_batch: int, repeats: int) -> None:
    """One step of warm-up and `repeats` measured ones; each step's prompts are the same for both sides."""
    import tempfile
    import time
    from dataclasses import asdict, replace
    from pathlib import Path

    from benchmarks.peers.questions import fresh_prompts
    from benchmarks.peers.trl_grpo import build
    from environments.vsp.prompts import VSP
    from models.grpo import grpo_step
    from tasks.engines import open_policy
    from tasks.grpo import build_parts
    from tasks.workspace import OUTPUTS
    from tools.cache import ToolResultCache
    from tools.executor import ToolExecutor

    sizes = {"grpo.prompts_per_step": prompts, "grpo.group_size": {"start": group, "end": group}}
    params = single_thread({**SETTINGS, **sizes, "grpo.steps": repeats + 1})
    steps = [fresh_prompts(params, prompts, f"grpo-{number}") for number in range(repeats + 1)]
    encoder = open_policy(OUTPUTS / "sft", params).encoder
    sides: dict[str, list[dict[str, Any]]] = {"TRL": [], "ours": []}
    grade = VSP().grade

    def ours_after_trl(number: int, theirs: TRLStep) -> None:
        began = time.perf_counter()
        metrics, fresh = grpo_step(parts, state, params.grpo, params.reward, params.seed)
        seconds = time.perf_counter() - began
        if number == 0:  # both have warmed up
            return
        sides["TRL"].append(asdict(theirs))
        sides["ours"].append(
            {
                "seconds": seconds,
                "rollout_seconds": metrics["grpo/sampling_seconds"],
                "sampled_tokens": sum(t.sampled_tokens for t in fresh),
                "trained_tokens": metrics["grpo/updated_tokens"],
                "episodes": len(fresh),
                "calls": sum(t.calls for t in fresh),
                "success": right(fresh, grade),
            }
        )
        print(f"step {number}: TRL {theirs.seconds:.2f} s, ours {seconds:.2f} s", flush=True)

    with tempfile.TemporaryDirectory(prefix="toolplan-trl-") as scratch:
        trainer = build(
            OUTPUTS / "sft",
            steps,
            encoder,
            ToolExecutor(encoder.registry, None, params.rollout.call_deadline_s),
            grade,
            params,
            group,
            trl_batch,
            ours_after_trl,
            Path(scratch),
        )
        parts, state = build_parts(params, ToolResultCache(params.rollout.cached_results))
        parts = replace(parts, draw_prompts=lambda *_: steps[state.step])
        trainer.train()
    write(sides, {"prompts": prompts, "group": group, "trl_batch": trl_batch})


def right(trajectories: list[Any], grade: Any) -> float:
    """The share of episodes with a right answer."""
    return sum(t.response is not None and grade(t.prompt, t.response) for t in trajectories) / len(
        trajectories
    )


def write(sides: dict[str, list[dict[str, Any]]], setting: dict[str, int]) -> None:
    """The row and the result file."""
    import trl

    def column(name: str, key: str) -> list[float]:
        return [float(row[key]) for row in sides[name]]

    def per_token(name: str) -> list[float]:
        return [row["seconds"] / row["sampled_tokens"] for row in sides[name]]

    def update_per_token(name: str) -> list[float]:
        """Groups without spread are left out of our updates, not of TRL's."""
        return [update_seconds(row) / max(1.0, row["trained_tokens"]) for row in sides[name]]

    faster = ratio(column("TRL", "seconds"), column("ours", "seconds"))
    tokens = {name: median(column(name, "sampled_tokens")) for name in sides}
    report(
        "grpo_step",
        f"one GRPO step, {setting['prompts']} prompts × {setting['group']}",
        f"TRL {trl.__version__} GRPOTrainer, CPU",
        f"{faster['median']:.1f}× ({median(column('ours', 'seconds')):.1f} against "
        f"{median(column('TRL', 'seconds')):.1f} s; sampled tokens {tokens['ours']:.0f} and {tokens['TRL']:.0f})",
        "≥ 3×",
        {
            **setting,
            "trl": trl.__version__,
            "faster": faster,
            "faster_per_sampled_token": ratio(per_token("TRL"), per_token("ours")),
            "faster_rollout": ratio(column("TRL", "rollout_seconds"), column("ours", "rollout_seconds")),
            "faster_update": ratio(
                *([update_seconds(row) for row in sides[name]] for name in ("TRL", "ours"))
            ),
            "faster_update_per_trained_token": ratio(update_per_token("TRL"), update_per_token("ours")),
            "steps": sides,
        },
    )


def update_seconds(row: dict[str, Any]) -> float:
    """Seconds of a step that were not rollout."""
    return float(row["seconds"] - row["rollout_seconds"])


if __name__ == "__main__":
    from tasks.cli import run_main

    run_main(main, FileNotFoundError, ValueError)
