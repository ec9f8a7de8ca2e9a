"""An SFT policy cut short, for learning benchmarks to start from: there is more to gain from it, and more to lose.

    python -m benchmarks.weak_start

One process, the shipped settings of stage sft but for the number of epochs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks.arms import RESULTS
from tasks.env import offline_environment
from tasks.params import load_params, override

WEAK_START = RESULTS / "weak_start"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weak_start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: python -m benchmarks.weak_start --epochs 0.27",
    )
    parser.add_argument("--epochs", type=float, default=0.27, help="default: 0.27")
    os.environ.update(offline_environment())
    train(parser.parse_args().epochs)


def train(epochs: float) -> None:
    """Train and save to `WEAK_START`."""
    from transformers import AutoTokenizer

    from models.checkpoint import Checkpoints
    from models.policy import build_policy
    from models.sft import train_sft
    from tasks.sft import load_sequences
    from tasks.workspace import TOKENIZER, ProgressLog, fresh_folder, use_threads
    from tools.vsp import vsp_registry

    params = load_params()
    # two micro-batches in one process are the step that two ranks make
    changes = {"sft.epochs": epochs, "sft.gradient_accumulation": params.sft.processes, "sft.processes": 1}
    params = override(params, changes)
    use_threads(params)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    policy = build_policy(params.policy, params.agent, vsp_registry(), tokenizer, params.seed)
    sequences = load_sequences(policy, "train", False, params.sft.train_on_mistakes)
    with tempfile.TemporaryDirectory() as folder, ProgressLog("weak start") as progress:

        def on_step(step: int, total: int, metrics: dict[str, float]) -> None:
            progress.update(step, total, f"loss {metrics['sft/loss']:.3f}")

        train_sft(policy, sequences, params.sft, params.seed, Checkpoints(Path(folder)), on_step)
    RESULTS.mkdir(parents=True, exist_ok=True)
    with fresh_folder(WEAK_START) as draft:
        policy.save(draft)


if __name__ == "__main__":
    main()
