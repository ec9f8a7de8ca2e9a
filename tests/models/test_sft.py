"""SFT: the plan is exact, the loss does not depend on the split, and a resumed run repeats an uninterrupted one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from environments.vsp.expert import Kind, demonstrate
from environments.vsp.prompts import VSP
from models.batching import by_tokens
from models.checkpoint import CheckpointError, Checkpoints
from models.config import SFTConfig
from models.demonstrations import encode_demonstration, encode_direct
from models.policy import Policy, Sequence
from models.sft import learning_rate, plan_batches, train_sft
from models.training_engine import optimizer_step, start_engine
from tests.models.policies import small_policy, some_demonstrations, some_prompts
from tools.executor import ToolExecutor

CONFIG = SFTConfig(
    lr=1e-3,
    epochs=2.0,
    micro_batch_tokens=600,
    context_schedule=(160, 256),
    checkpoint_every=3,
    eval_every=100,
)


@pytest.fixture(scope="module")
def sequences() -> list[Sequence]:
    encoder = small_policy().encoder
    return [encode_demonstration(encoder, demonstration) for demonstration in some_demonstrations(24)]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(0, 5))
def test_every_planned_batch_fits_its_window_and_its_tokens(lengths: list[int], seed: int) -> None:
    config = SFTConfig(lr=1.0, micro_batch_tokens=400, context_schedule=(100, 300), gradient_accumulation=2)
    plan = plan_batches(np.array(lengths), config, seed)
    assert plan == plan_batches(np.array(lengths), config, seed)
    for step, window in zip(plan.steps, plan.windows, strict=True):
        assert len(step) == 2
        for batch in step:
            assert max(lengths[i] for i in batch) <= window
            assert len(batch) == 1 or sum(lengths[i] for i in batch) <= 400
    assert plan.windows == sorted(plan.windows)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 100))
def test_micro_batches_hold_every_sequence_once(lengths: list[int], limit: int) -> None:
    batches = by_tokens(list(range(len(lengths))), lengths, limit)
    assert [i for batch in batches for i in batch] == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= limit for batch in batches)


def test_a_token_budget_ends_the_plan() -> None:
    lengths = np.full(100, 50)
    config = SFTConfig(lr=1.0, token_budget=1000, micro_batch_tokens=100, context_schedule=(64,), epochs=50)
    assert plan_batches(lengths, config, 0).tokens(lengths) == 1000


def test_the_learning_rate_warms_up_and_decays() -> None:
    rates = [learning_rate(step, 100, CONFIG) for step in range(100)]
    assert rates[0] < rates[4] == max(rates) == CONFIG.lr
    assert rates[-1] == pytest.approx(CONFIG.lr / 10, rel=0.01)


def _gradients(policy: Policy, sequences: list[Sequence], split: list[list[int]]) -> torch.Tensor:
    policy.model.zero_grad()
    tokens = sum(int(s.mask[1:].sum()) for s in sequences)
    for part in split:
        logprobs, _ = policy.model(policy.collate([sequences[i] for i in part]))
        (-logprobs.sum() / tokens).backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("split", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[i] for i in range(8)]])
def test_the_gradient_does_not_depend_on_the_split(sequences: list[Sequence], split: list[list[int]]) -> None:
    """trl#6439, open-instruct#1137: a denominator per micro-batch makes it depend."""
    policy = small_policy()
    whole = _gradients(policy, sequences[:8], [list(range(8))])
    torch.testing.assert_close(_gradients(policy, sequences[:8], split), whole, atol=1e-6, rtol=1e-4)


def test_the_engine_steps_alike_for_any_number_of_micro_batches(sequences: list[Sequence]) -> None:
    def weights(split: list[list[int]]) -> torch.Tensor:
        policy = small_policy()
        engine = start_engine(policy.model, lr=1e-3, weight_decay=0.0, max_grad_norm=1.0, zero_stage=0)
        tokens = sum(int(s.mask[1:].sum()) for s in sequences[:4])
        for _ in range(2):
            optimizer_step(
                engine,
                (-engine(policy.collate([sequences[i] for i in part]))[0].sum() / tokens for part in split),
            )
        return torch.cat([p.detach().flatten() for p in policy.model.parameters()])

    torch.testing.assert_close(weights([[0, 1, 2, 3]]), weights([[0], [1, 2], [3]]), atol=2e-5, rtol=0)


class Killed(Exception):
    """Stands for SIGKILL: nothing after it runs."""


def _train(
    sequences: list[Sequence], folder: Path, kill_after: int | None = None
) -> tuple[torch.Tensor, dict[int, float]]:
    policy = small_policy()
    losses: dict[int, float] = {}

    def on_step(step: int, total: int, metrics: dict[str, float]) -> None:
        losses[step] = metrics["sft/loss"]
        if step == kill_after:
            raise Killed

    train_sft(policy, sequences, CONFIG, 7, Checkpoints(folder), on_step)
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()]), losses


def test_a_killed_run_resumes_to_the_same_weights(sequences: list[Sequence], tmp_path: Path) -> None:
    """trl#3247, ms-swift#9935: resumed runs that start over, skip data or draw other numbers."""
    wanted, losses = _train(sequences, tmp_path / "whole")
    assert len(losses) > 8
    resumed: dict[int, float] = {}
    for kill_after in (2, 4, 8):
        with pytest.raises(Killed):
            _train(sequences, tmp_path / "cut", kill_after)
    got, resumed = _train(sequences, tmp_path / "cut")
    assert min(resumed) == 7  # the last checkpoint before the kill at step 8 holds step 6
    assert resumed == {step: losses[step] for step in resumed}
    torch.testing.assert_close(got, wanted, atol=0, rtol=0)


def test_a_half_written_checkpoint_is_not_picked_up(sequences: list[Sequence], tmp_path: Path) -> None:
    with pytest.raises(Killed):
        _train(sequences, tmp_path, 4)
    half = tmp_path / "step-00000006"
    half.mkdir()
    (half / "mp_rank_00_model_states.pt").write_bytes(b"half")
    _, losses = _train(sequences, tmp_path)
    assert min(losses) == 4


def test_a_lost_state_is_an_error_not_a_silent_restart(tmp_path: Path) -> None:
    """transformers#22170: DeepSpeed returns (None, None) and training starts again at step 0."""
    engine = start_engine(small_policy().model, lr=1e-3, weight_decay=0.0, max_grad_norm=1.0, zero_stage=0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.store(engine, {"step": 1})
    for file in (tmp_path / "step-00000001").glob("mp_rank*"):
        file.unlink()
    with pytest.raises(CheckpointError):
        checkpoints.restore(engine)


def test_corrected_slips_carry_no_loss_unless_asked() -> None:
    policy = small_policy()
    executor = ToolExecutor(policy.encoder.registry, None, 5.0)
    shown = demonstrate(some_prompts(1)[0], Kind.TOOL_FAILURE, executor, VSP(), random.Random(0))
    strict = encode_demonstration(policy.encoder, shown)
    loose = encode_demonstration(policy.encoder, shown, train_on_mistakes=True)
    np.testing.assert_array_equal(strict.ids, loose.ids)
    assert strict.mask.sum() < loose.mask.sum()
    assert not (strict.mask & ~loose.mask).any()


def test_the_baseline_sees_no_tools_and_answers_the_same_question() -> None:
    policy = small_policy()
    demonstration = some_demonstrations(2)[0]
    text = policy.encoder.tokenizer.decode(encode_direct(policy.encoder, demonstration).ids)
    assert "POINT" not in text
    assert demonstration.prompt.question in text
    assert "<obs>" not in text
