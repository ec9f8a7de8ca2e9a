"""Risks of a trial: rollouts scored by foreign weights, a killed trial that ends elsewhere, divergence as a result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.config import ReplayConfig
from models.replay import ReplayBuffer
from models.rollout import RolloutRequest
from models.trajectory import Trajectory
from tasks.sweep_plan import Plan
from tasks.sweep_rollouts import SHARED_VERSION, fill
from tasks.sweep_study import SettingsFailed
from tasks.trial import _check_finite
from tests.models.policies import engine_for, small_policy, some_prompts
from tests.tasks.sweeps import small_params

TOOL, RIGHT = {"tool": 4.0, "accuracy": 0.0}, {"tool": 0.0, "accuracy": 4.0}


@pytest.fixture(scope="module")
def rollouts() -> list[Trajectory]:
    """Four rollouts of each of two prompts: the first differ in their calls, the second in their answers."""
    policy = small_policy(agent=small_params().agent)
    requests = [RolloutRequest(prompt, n, n) for prompt in some_prompts(2) for n in range(4)]
    sampled = engine_for(policy).sample(requests, 1.0)
    plain = {
        "format": 1.0, "tool": 0.0, "accuracy": 0.0, "calls": 1.0,
        "repeats": 0.0, "utilisation": 0.0, "turning_points": 0.0, "exploration": 0.0,
    }  # fmt: skip
    return [
        replace(
            each, policy_version=SHARED_VERSION, components=plain | ((TOOL, RIGHT)[n // 4] if n % 2 else {})
        )
        for n, each in enumerate(sampled)
    ]


def filled(rollouts: list[Trajectory], **changes: Any) -> ReplayBuffer:
    params = small_params(**changes)
    buffer = ReplayBuffer(params.grpo.replay)
    fill(buffer, rollouts, params)
    return buffer


def test_shared_rollouts_are_scored_by_the_trials_own_weights(rollouts: list[Trajectory]) -> None:
    calls, answers = filled(rollouts, reward__lambda_tool=3.0, reward__lambda_acc=1.0).groups
    assert calls.priority == pytest.approx(3 * answers.priority)
    (only,) = filled(rollouts, reward__lambda_tool=0.0, reward__lambda_acc=1.0).groups
    assert only.key.startswith(rollouts[-1].prompt.prompt_id), "without weight, calls give no spread"


def test_a_trial_replays_shared_rollouts_from_its_first_step_and_takes_its_own_n(
    rollouts: list[Trajectory],
) -> None:
    buffer = filled(rollouts, grpo__group_size={"start": 2, "end": 4})
    assert [group.size for group in buffer.groups] == [2, 2]
    drawn = buffer.sample(2, 0, np.random.default_rng(0))
    assert len(drawn) == 2
    assert ReplayConfig().max_age >= 1


def test_a_metric_that_is_not_finite_fails_the_trial() -> None:
    with pytest.raises(SettingsFailed, match="diverged at step 7: grpo/kl is nan"):
        _check_finite({"grpo/kl": float("nan"), "grpo/policy": 0.1}, 7)
    _check_finite({"grpo/plan_diversity": float("nan")}, 7)


class Reports:
    """What a trial of Optuna does here: takes reports and stops nothing."""

    def __init__(self) -> None:
        self.number = 0


def test_a_killed_trial_ends_like_an_undisturbed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that left the buffer or the random numbers out would change the result (NeMo-RL#3599)."""
    from tasks import trial as module
    from tools.cache import ToolResultCache

    params = small_params(sweep__steps=3, sweep__objectives=["success", "calls"])
    monkeypatch.setattr("tasks.workspace.OUTPUTS", tmp_path / "outputs")
    small_policy(agent=params.agent, config=params.policy).save(tmp_path / "outputs" / "sft")
    monkeypatch.setattr("models.grpo.score", _by_tokens)

    class Killed(Exception):
        pass

    class Log:
        """The run of a trial, which keeps its metrics."""

        def __init__(self, dies_at: int | None = None) -> None:
            self.metrics: dict[int, dict[str, float]] = {}
            self._dies_at = dies_at

        def expect_steps(self, total: int) -> None:
            assert total == 3

        def log_metrics(self, values: dict[str, float], step: int) -> None:
            if step == self._dies_at:
                raise Killed
            self.metrics[step] = dict(values)

    def train(root: Path, log: Log) -> None:
        plan = Plan(params, root, "digest")
        runner = object.__new__(module.TrialRunner)
        runner.plan, runner.cache = plan, ToolResultCache(1000)
        runner.questions, runner.rollouts = some_prompts(2), []
        runner._train(Reports(), plan.trial_params(plan.base), root, log)  # type: ignore[arg-type]

    whole, before, after = Log(), Log(dies_at=3), Log()
    train(tmp_path / "whole", whole)
    with pytest.raises(Killed):
        train(tmp_path / "cut", before)
    train(tmp_path / "cut", after)
    assert sorted(after.metrics) == [3], "went on from the checkpoint after step 2"
    exact = ("grpo/grad_norm", "grpo/policy", "reward/total", "replay/size")
    assert {name: after.metrics[3][name] for name in exact} == {
        name: whole.metrics[3][name] for name in exact
    }
    assert whole.metrics[3]["grpo/grad_norm"] > 0


def _by_tokens(trajectory: Trajectory, environment: object) -> Trajectory:
    """Random weights answer nothing: reward the share of odd tokens, so that groups have spread."""
    share = float((trajectory.ids[trajectory.mask] % 2).mean())
    zero = dict.fromkeys(("accuracy", "repeats", "utilisation", "turning_points", "exploration"), 0.0)
    return replace(trajectory, components={**zero, "format": 1.0, "tool": 4 * share, "calls": 1.0})
