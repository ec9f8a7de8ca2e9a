"""Supervised fine-tuning, tokens per second at an equal loss curve: the project's step against TRL's SFTTrainer.

Both start from the same random weights and see the same trajectories, with the same optimizer and learning rate. They
take turns, step by step.

With --batches same they train on the same batches, so their losses must be the same curve; the largest difference is
reported. (Our ban on tokens that only the environment may write is lifted for this: TRL has none.) With --batches own,
TRL takes the trajectories as they come, its default, and ours sorts them into batches of similar length and as many
tokens; the mean losses over the last half of the tokens are reported. Padding counts as no token.

Needs `pip install -e '.[benchmarks]'` and the cold start (`make run`).
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.peers.measure import parser, ratio, report, single_thread

if TYPE_CHECKING:
    from models.policy import Sequence
    from tasks.params import Params

WARM_UP = 5  # steps


def main() -> None:
    arguments = parser("sft_speed", __doc__ or "", " --steps 20 --batch 8 --batches own")
    arguments.add_argument("--steps", type=int, default=20, help="optimizer steps a repeat (default: 20)")
    arguments.add_argument("--batch", type=int, default=8, help="trajectories a step (default: 8)")
    arguments.add_argument("--batches", choices=("same", "own"), default="same", help="default: same")
    options = arguments.parse_args()
    measure(options.steps, options.batch, options.repeats, options.batches)


def measure(steps: int, batch: int, repeats: int, batches: str) -> None:
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
    as_they_come = [list(range(step * batch, (step + 1) * batch)) for step in range(total)]
    own = iter(as_they_come) if batches == "same" else sorted_batches(sequences, batch, params)
    rows: dict[str, list[dict[str, float]]] = {"TRL": [], "ours": []}
    seen = {"TRL": 0, "ours": 0}

    def ours_after_trl(step: int, seconds: float, pictures: float, loss: float) -> None:
        tokens = sum(len(sequences[index].ids) for index in as_they_come[step])
        seen["TRL"] += tokens
        rows["TRL"].append({"tokens": tokens, "seconds": seconds, "picture_seconds": pictures, "loss": loss})
        while seen["ours"] < seen["TRL"]:
            chosen = next(own)
            began = time.perf_counter()
            own_loss, _, _, tokens, _ = sft_step(engine, ours, sequences, [chosen])
            rows["ours"].append({"tokens": tokens, "seconds": time.perf_counter() - began, "loss": own_loss})
            seen["ours"] += tokens
        if step % 10 == 0:
            print(f"step {step}: loss {own_loss:.4f} and TRL {loss:.4f}", flush=True)

    with tempfile.TemporaryDirectory(prefix="toolplan-trl-") as scratch:
        trainer = build(theirs, sequences, as_they_come, params, ours_after_trl, Path(scratch))
        engine = start_engine(
            ours.model,
            lr=config.lr,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            zero_stage=config.zero_stage,
        )
        ours.model.train()
        trainer.train()
    write(rows, repeats, {"batch": batch, "batches": batches, "trl": trl.__version__})


def sorted_batches(sequences: list[Sequence], batch: int, params: Params) -> Iterator[list[int]]:
    """Batches of similar length as the stage plans them, with the tokens of `batch` mean trajectories each."""
    import numpy as np

    from models.sft import plan_batches

    lengths = np.array([len(each.ids) for each in sequences])
    changes = {
        "micro_batch_tokens": int(batch * lengths.mean()),
        "gradient_accumulation": 1,
        "context_schedule": (int(lengths.max()),),
        "epochs": 2.0,  # more than is needed: the caller stops where TRL does
        "token_budget": None,
    }
    plan = plan_batches(lengths, params.sft.model_copy(update=changes), params.seed)
    return (step[0] for step in plan.steps)


def write(rows: dict[str, list[dict[str, float]]], repeats: int, setting: dict[str, Any]) -> None:
    """The row and the result file."""
    speed = {name: speeds(side, repeats) for name, side in rows.items()}
    faster = ratio(speed["ours"], speed["TRL"])
    facts: dict[str, Any] = {**setting, "faster": faster, "tokens_per_second": speed}
    if setting["batches"] == "same":
        pairs = zip(rows["ours"], rows["TRL"], strict=True)
        facts["largest_loss_difference"] = max(abs(a["loss"] - b["loss"]) for a, b in pairs)
        curve = f"same batches, largest loss difference {facts['largest_loss_difference']:.0e}"
    else:
        facts["late_loss"] = {name: late_loss(side) for name, side in rows.items()}
        late = facts["late_loss"]
        curve = f"each with its own batches, late loss {late['ours']:.3f} and {late['TRL']:.3f}"
    seconds = sum(row["seconds"] for row in rows["TRL"])
    facts["trl_share_of_pictures"] = sum(row["picture_seconds"] for row in rows["TRL"]) / seconds
    report(
        "sft_speed",
        f"SFT tokens/s, {curve}",
        f"TRL {setting['trl']} SFTTrainer, CPU",
        f"{faster['median']:.1f}× ({median(speed['ours']):.0f} against {median(speed['TRL']):.0f} tokens/s)",
        "≥ 2×",
        {**facts, "steps": rows},
        f"{setting['batches']}-batches",
    )


def late_loss(rows: list[dict[str, float]]) -> float:
    """The mean loss over the last half of the tokens."""
    half, seen, late = sum(row["tokens"] for row in rows) / 2, 0.0, []
    for row in rows:
        seen += row["tokens"]
        if seen > half:
            late.append(row)
    return sum(r["loss"] * r["tokens"] for r in late) / sum(r["tokens"] for r in late)


def speeds(rows: list[dict[str, float]], parts: int) -> list[float]:
    """Tokens a second in each of `parts` equal stretches of a run, warm-up left out."""
    measured = rows[WARM_UP:]
    size = len(measured) // parts
    stretches = [measured[first : first + size] for first in range(0, size * parts, size)]
    return [sum(r["tokens"] for r in some) / sum(r["seconds"] for r in some) for some in stretches]


if __name__ == "__main__":
    from tasks.cli import run_main

    run_main(main, FileNotFoundError, ValueError)
