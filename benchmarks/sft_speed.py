"""Supervised fine-tuning, tokens per second at an equal loss curve: the project's step against TRL's SFTTrainer.

Both start from the same random weights and see the same trajectories, with the same optimizer and learning rate. They
take turns, step by step.

They train on the same batches, so their losses must be the same curve; the largest difference is reported. (Our ban
on tokens that only the environment may write is lifted for this: TRL has none.) TRL pads a batch to its longest
trajectory, ours lays trajectories end to end; padding counts as no token.

Needs `pip install -e '.[benchmarks]'` and the cold start (`make run`).
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.peers.measure import parser, ratio, report, single_thread

if TYPE_CHECKING:
    pass

WARM_UP = 5  # steps


def main() -> None:
    arguments = parser("sft_speed", __doc__ or "", " --steps 20 --batch 8")
    arguments.add_argument("--steps", type=int, default=20, help="optimizer steps a repeat (default: 20)")
    arguments.add_argument("--batch", type=int, default=8, help="trajectories a step (default: 8)")
    options = arguments.parse_args()
    measure(options.steps, options.batch, options.repeats)


def measure(steps: int, batch: int, repeats: int) -> None:
    """Train both for a few warm-up steps and `repeats` × `steps` measured ones."""
    import tempfile
    import time
    from itertools import islice
    from pathlib import Path

    import trl
    from transformers import AutoTokenizer

    from benchmarks.peers.trl_sft import build
    from models.demonstrations import encode_demonstration
    from models.policy import build_policy
    from models.sft import sft_step
    from models.training_engine import start_engine
    from tasks.schema import iter_trajectories
    from tasks.workspace import COLD_START, TOKENIZER
    from tools.vsp import vsp_registry

    params = single_thread()
    config, total = params.sft, WARM_UP + steps * repeats
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    ours, theirs = (
        build_policy(params.policy, params.agent, vsp_registry(), tokenizer, params.seed) for _ in range(2)
    )
    ours.model.forbidden = []
    some = islice(iter_trajectories(COLD_START, "train"), total * batch)
    sequences = [encode_demonstration(ours.encoder, each, config.train_on_mistakes) for each in some]
    batches = [list(range(step * batch, (step + 1) * batch)) for step in range(total)]
    rows: dict[str, list[dict[str, float]]] = {"TRL": [], "ours": []}

    def ours_after_trl(step: int, seconds: float, pictures: float, loss: float) -> None:
        began = time.perf_counter()
        own_loss, _, _, tokens = sft_step(engine, ours, sequences, [batches[step]])
        rows["ours"].append({"tokens": tokens, "seconds": time.perf_counter() - began, "loss": own_loss})
        rows["TRL"].append({"tokens": tokens, "seconds": seconds, "picture_seconds": pictures, "loss": loss})
        if step % 10 == 0:
            print(f"step {step}: loss {own_loss:.4f} and TRL {loss:.4f}", flush=True)

    with tempfile.TemporaryDirectory(prefix="toolplan-trl-") as scratch:
        trainer = build(theirs, sequences, batches, params, ours_after_trl, Path(scratch))
        engine = start_engine(
            ours.model,
            lr=config.lr,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            zero_stage=config.zero_stage,
        )
        ours.model.train()
        trainer.train()
    write(rows, repeats, {"batch": batch, "trl": trl.__version__})


def write(rows: dict[str, list[dict[str, float]]], repeats: int, setting: dict[str, Any]) -> None:
    """The row and the result file."""
    speed = {name: speeds(side, repeats) for name, side in rows.items()}
    faster = ratio(speed["ours"], speed["TRL"])
    facts: dict[str, Any] = {**setting, "faster": faster, "tokens_per_second": speed}
    pairs = zip(rows["ours"], rows["TRL"], strict=True)
    facts["largest_loss_difference"] = max(abs(a["loss"] - b["loss"]) for a, b in pairs)
    seconds = sum(row["seconds"] for row in rows["TRL"])
    facts["trl_share_of_pictures"] = sum(row["picture_seconds"] for row in rows["TRL"]) / seconds
    report(
        "sft_speed",
        f"SFT tokens/s, same batches, largest loss difference {facts['largest_loss_difference']:.0e}",
        f"TRL {setting['trl']} SFTTrainer, CPU",
        f"{faster['median']:.1f}× ({median(speed['ours']):.0f} against {median(speed['TRL']):.0f} tokens/s)",
        "≥ 2×",
        {**facts, "steps": rows},
    )


def speeds(rows: list[dict[str, float]], parts: int) -> list[float]:
    """Tokens a second in each of `parts` equal stretches of a run, warm-up left out."""
    measured = rows[WARM_UP:]
    size = len(measured) // parts
    stretches = [measured[first : first + size] for first in range(0, size * parts, size)]
    return [sum(r["tokens"] for r in some) / sum(r["seconds"] for r in some) for some in stretches]


if __name__ == "__main__":
    from tasks.cli import run_main

    run_main(main, FileNotFoundError, ValueError)
