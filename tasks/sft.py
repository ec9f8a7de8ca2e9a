"""Stage sft: supervised fine-tuning on the cold start; with --no-tools the baseline of the same budget."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from tasks.cli import run_main
from tasks.launch import RankFailed, start_ranks
from tasks.params import Params, load_params

if TYPE_CHECKING:
    from models.policy import Policy, Sequence
    from tasks.tracked_run import StageRun


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.sft",
        description="Fine-tune the policy on the cold start with the DeepSpeed engine. Goes on where a killed "
        "run stopped.",
        epilog="Example: python -m tasks.sft",
    )
    parser.add_argument(
        "--no-tools",
        action="store_true",
        help="train the baseline: the same questions, answered without tools",
    )
    arguments = parser.parse_args()
    params = load_params()
    if not start_ranks("tasks.sft", ["--no-tools"] if arguments.no_tools else [], params):
        run_sft(params, "baseline" if arguments.no_tools else "sft")


def run_sft(params: Params, stage: str) -> None:
    """Train, save the policy to outputs/<stage> and record everything in the stage's MLflow run.

    Of several ranks only the first one records (transformers#15663: every rank opened a run of its own).
    """
    from models.training_engine import rank
    from tasks.tracking import stage_run

    if rank() == 0:
        with stage_run(stage, params) as run:
            _train(params, stage, run)
    else:
        _train(params, stage, None)


def _train(params: Params, stage: str, run: StageRun | None) -> None:
    from transformers import AutoTokenizer

    from models.policy import build_policy
    from models.sft import train_sft
    from tasks.plots import write_curves
    from tasks.workspace import (
        OUTPUTS,
        TOKENIZER,
        ProgressLog,
        fresh_folder,
        stage_checkpoints,
        use_threads,
    )
    from tools.vsp import vsp_registry

    use_threads(params)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER) if params.policy.checkpoint is None else None
    policy = build_policy(params.policy, params.agent, vsp_registry(), tokenizer, params.seed)
    direct = stage == "baseline"
    training = load_sequences(policy, params, "train", direct)
    held_out = load_sequences(policy, params, "validation", direct)
    if run is not None:
        _describe(run, policy, len(training))
    checkpoints = stage_checkpoints(stage, params)
    with ProgressLog(stage) as progress:

        def on_step(step: int, total: int, metrics: dict[str, float]) -> None:
            if run is None:
                return
            run.expect_steps(total)
            run.log_metrics(metrics, step)
            progress.update(step, total, f"loss {metrics['sft/loss']:.3f}")

        train_sft(
            policy,
            training,
            params.sft,
            params.seed,
            checkpoints,
            on_step,
            validation_loss(policy, held_out, params.sft.micro_batch_tokens),
        )
    if run is not None:
        with fresh_folder(OUTPUTS / stage) as folder:
            policy.save(folder)
        with fresh_folder(OUTPUTS / "curves" / stage) as folder:
            write_curves(run, ("sft/loss", "sft/validation_loss"), folder)
        checkpoints.clear()


def load_sequences(policy: Policy, params: Params, split: str, direct: bool) -> list[Sequence]:
    """The split's trajectories as training sequences; those of one map share one picture object.

    `direct`: without tools.
    """
    from models.demonstrations import encode_demonstration, encode_direct
    from models.policy import Sequence
    from tasks.schema import iter_trajectories
    from tasks.workspace import COLD_START
    from tools.base import Picture

    pictures: dict[bytes, Picture] = {}
    sequences = []
    for demonstration in iter_trajectories(COLD_START, split):
        if direct:
            sequence = encode_direct(policy.encoder, demonstration)
        else:
            sequence = encode_demonstration(policy.encoder, demonstration, params.sft.train_on_mistakes)
        shared = tuple(pictures.setdefault(picture.png, picture) for picture in sequence.pictures)
        sequences.append(Sequence(sequence.ids, sequence.mask, shared))
    return sequences


def validation_loss(
    policy: Policy, sequences: list[Sequence], micro_batch_tokens: int
) -> Callable[[], dict[str, float]]:
    """A function that measures the mean negative log-prob per agent token on held-out trajectories."""
    from models.policy import token_logprobs

    def measure() -> dict[str, float]:
        logprobs = token_logprobs(policy, sequences, 1.0, micro_batch_tokens)
        tokens = sum(len(piece) for piece in logprobs)
        return {"sft/validation_loss": -sum(float(piece.sum()) for piece in logprobs) / tokens}

    return measure


def _describe(run: StageRun, policy: Policy, rows: int) -> None:
    """Record what is trained on what. The manifest holds the hash of every file, so its own hash is the data's."""
    from tasks.workspace import COLD_START

    run.set_tags(
        {
            "policy.parameters": sum(weight.numel() for weight in policy.model.parameters()),
            "policy.vocabulary": len(policy.encoder.tokenizer),
        }
    )
    digest = hashlib.sha256((COLD_START / "manifest.json").read_bytes()).hexdigest()
    run.log_dataset("cold_start/train", "data/cold_start", digest, "training", rows)


if __name__ == "__main__":
    from models.checkpoint import CheckpointError

    run_main(main, CheckpointError, RankFailed, ValueError)
