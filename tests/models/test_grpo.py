"""GRPO: one step on real rollouts, exact resume, and what replay may and may not do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from environments.base import Environment, Prompt
from environments.vsp.config import ColdStartConfig
from environments.vsp.hypotheses import failures
from environments.vsp.maps import Split, split_of
from environments.vsp.prompts import VSP, map_of
from models.checkpoint import Checkpoints
from models.config import AgentConfig, CurriculumConfig, GRPOConfig, ReplayConfig, RewardConfig, Schedule
from models.curriculum import prompt_source
from models.grpo import GRPOParts, GRPOState, group, grpo_step, score
from models.policy import Policy
from models.replay import ReplayBuffer, ReplayGroup
from models.rollout import RolloutRequest
from models.training_engine import start_engine
from models.trajectory import Trajectory
from models.update import Example, Knobs, update
from tests.models.policies import engine_for, small_policy, some_prompts
from tools.vsp import VSP_TOOLS

AGENT = AgentConfig(max_tokens=160, max_turns=3)
CONFIG = GRPOConfig(
    steps=4,
    prompts_per_step=3,
    group_size=Schedule(start=3, end=3),
    lr=1e-3,
    sizes=(4,),
    replay=ReplayConfig(capacity=100, replayed_groups=1),
    std_floor=1e-6,
)
REWARD = RewardConfig()
DATA = ColdStartConfig(path_lengths=(1, 3))


class OddLengths(VSP):
    """Grades by length: random weights never find a path."""

    def grade(self, prompt: Prompt, response: str) -> bool:
        return len(response) % 2 == 0


def _parts(policy: Policy, config: GRPOConfig = CONFIG) -> GRPOParts:
    return GRPOParts(
        policy=policy,
        reference=small_policy(agent=AGENT),
        engine=start_engine(policy.model, lr=1e-3, weight_decay=0.0, max_grad_norm=1.0, zero_stage=0),
        rollouts=engine_for(policy),
        draw_prompts=prompt_source(VSP(), config, VSP_TOOLS, DATA, 0),
        environment=OddLengths(),
    )


def _with_reward(trajectory: Trajectory, environment: Environment) -> Trajectory:
    """Random weights answer nothing: reward the share of one token instead, so that groups have spread."""
    scored = score(trajectory, environment)
    share = float((trajectory.ids[trajectory.mask] % 2).mean())
    return replace(scored, components={**scored.components, "format": 1.0, "tool": 4 * share})


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.grpo.score", _with_reward)


def _weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


def test_a_step_moves_the_policy_and_reports_finite_metrics(spread: None) -> None:
    policy = small_policy(agent=AGENT)
    before = _weights(policy)
    parts, state = _parts(policy), GRPOState.start(CONFIG)
    for _ in range(2):
        metrics, fresh = grpo_step(parts, state, CONFIG, REWARD, 0)
        assert all(np.isfinite(value) for value in metrics.values()), metrics
    assert len(fresh) == 9
    assert metrics["replay/replayed_groups"] == 1
    assert metrics["grpo/sampler_gap"] < 0.2
    assert not torch.equal(before, _weights(policy))
    assert {t.policy_version for t in fresh} == {1}


def test_a_killed_run_resumes_to_the_same_weights(spread: None, tmp_path: Path) -> None:
    """NeMo-RL#3599: the buffer, the cursor and the weights are one state, or data are lost."""

    def run(steps: int, stored: Checkpoints | None, restore: bool) -> torch.Tensor:
        policy = small_policy(agent=AGENT)
        parts, state = _parts(policy), GRPOState.start(CONFIG)
        if restore and stored is not None:
            saved = stored.restore(parts.engine)
            assert saved is not None
            state = saved["state"]
            parts.rollouts.sync(state.version)
        while state.step < steps:
            grpo_step(parts, state, CONFIG, REWARD, 0)
        if stored is not None and not restore:
            stored.store(parts.engine, {"step": state.step, "state": state})
        return _weights(policy)

    wanted = run(4, None, False)
    checkpoints = Checkpoints(tmp_path)
    run(2, checkpoints, False)
    torch.testing.assert_close(run(4, checkpoints, True), wanted, atol=0, rtol=0)


def _sampled(policy: Policy, count: int = 8) -> list[Trajectory]:
    requests = [RolloutRequest(p, 0, i) for i, p in enumerate(some_prompts(count))]
    return engine_for(policy).sample(requests, 1.0)


def _update(
    parts: GRPOParts, examples: list[Example], config: GRPOConfig
) -> tuple[dict[str, float], list[float]]:
    knobs = Knobs(clip_epsilon=0.2, kl_beta=0.1, lr=1e-3)
    rng = np.random.default_rng(0)
    return update(parts.policy, parts.reference, parts.engine, examples, config, knobs, rng)


def test_padding_and_micro_batches_change_no_update() -> None:
    """ms-swift#10117, miles#2796: same update for 1×8, 2×4 and 8×1."""
    results = []
    for micro_batch_tokens in (100_000, 700, 1):
        policy = small_policy(agent=AGENT)
        config = CONFIG.model_copy(update={"micro_batch_tokens": micro_batch_tokens})
        trajectories = _sampled(policy)
        examples = [
            Example(t, a) for t, a in zip(trajectories, np.linspace(-1, 1, len(trajectories)), strict=True)
        ]
        _update(_parts(policy), examples, config)
        results.append(_weights(policy))
    torch.testing.assert_close(results[1], results[0], atol=3e-5, rtol=0)
    torch.testing.assert_close(results[2], results[0], atol=3e-5, rtol=0)


def test_rows_without_a_trained_token_change_no_update() -> None:
    """trl#6439, miles#2796: a masked row in the denominator, or in the numerator, scales every gradient."""
    results = []
    for padding_rows in (0, 3):
        policy = small_policy(agent=AGENT)
        trajectories = _sampled(policy, 4)
        examples = [Example(t, a) for t, a in zip(trajectories, (1.0, -1.0, 0.5, -0.5), strict=True)]
        empty = replace(trajectories[0], mask=np.zeros_like(trajectories[0].mask))
        examples += [Example(empty, 1.0)] * padding_rows
        _update(_parts(policy), examples, CONFIG)
        results.append(_weights(policy))
    torch.testing.assert_close(results[1], results[0], atol=3e-5, rtol=0)


def test_a_first_update_on_fresh_rollouts_clips_nothing_and_has_no_kl() -> None:
    policy = small_policy(agent=AGENT)
    trajectories = _sampled(policy)
    metrics, _ = _update(_parts(policy), [Example(t, 1.0) for t in trajectories], CONFIG)
    assert metrics["grpo/clipped"] == 0
    assert metrics["grpo/kl"] < 1e-9
    assert metrics["grpo/sampler_gap"] < 1e-5


def test_no_spread_means_no_update() -> None:
    policy = small_policy(agent=AGENT)
    before = _weights(policy)
    state = GRPOState.start(CONFIG)
    metrics, _ = grpo_step(_parts(policy), state, CONFIG, REWARD, 0)  # untrained: every reward is 0
    assert metrics["grpo/zero_variance_share"] == 1.0
    assert torch.equal(before, _weights(policy))
    assert len(state.replay) == 0


def _group(key: str, version: int, priority: float, size: int = 2) -> ReplayGroup:
    trajectory = replace(_TRAJECTORY, policy_version=version)
    return ReplayGroup(key, [trajectory] * size, priority)


@pytest.fixture(scope="module", autouse=True)
def _one_trajectory() -> None:
    global _TRAJECTORY
    _TRAJECTORY = _sampled(small_policy(agent=AGENT), 1)[0]


_TRAJECTORY: Trajectory


def test_an_empty_buffer_gives_nothing_and_equal_priorities_do_not_crash() -> None:
    """trl#6804: heap ties compare dicts, an empty heap is iterated as None; SPEAR#1."""
    buffer = ReplayBuffer(ReplayConfig(capacity=10, replayed_groups=2))
    rng = np.random.default_rng(0)
    assert buffer.sample(2, 5, rng) == []
    for name in "abc":
        buffer.add(_group(name, 1, 0.5))
    assert len(buffer.sample(2, 5, rng)) == 2
    assert len(buffer.sample(9, 5, rng)) == 3


def test_the_buffer_keeps_its_capacity_age_limit_and_version_order() -> None:
    buffer = ReplayBuffer(ReplayConfig(capacity=6, replayed_groups=2, max_age=2))
    for version in range(5):
        buffer.add(_group(f"v{version}", version, 0.5))
    assert [group.key for group in buffer.groups] == ["v2", "v3", "v4"]
    assert buffer.drop_stale(5) == 1
    assert [group.key for group in buffer.groups] == ["v3", "v4"]
    rng = np.random.default_rng(0)
    assert {r.group.key for _ in range(20) for r in buffer.sample(1, 4, rng)} == {
        "v3"
    }  # not the current version's own


def test_priority_and_recency_decide_what_is_replayed() -> None:
    buffer = ReplayBuffer(ReplayConfig(capacity=100, replayed_groups=1, priority_exponent=1.0))
    buffer.add(_group("dull", 3, 0.01))
    buffer.add(_group("old", 0, 0.5))
    buffer.add(_group("new", 3, 0.5))
    rng = np.random.default_rng(0)
    drawn = [buffer.sample(1, 4, rng)[0].group.key for _ in range(300)]
    assert drawn.count("new") > drawn.count("old") > drawn.count("dull")


def test_prompts_repeat_exactly_and_keep_the_mix() -> None:
    config = CONFIG.model_copy(update={"prompts_per_step": 8, "navigation_share": 0.75, "astar_share": 0.5})
    draw = prompt_source(VSP(), config, VSP_TOOLS, DATA, 0)
    first, again, later = draw(3, 0.5), draw(3, 0.5), draw(4, 0.5)
    assert [p.hidden for p in first] == [p.hidden for p in again]
    assert [p.hidden for p in first] != [p.hidden for p in later]
    assert sum(p.task == "navigation" for p in first) == 6
    assert sum("ASTAR" in p.tools for p in first) == 3


def test_searches_get_longer_over_the_run_and_nothing_else_gets_harder() -> None:
    config = CONFIG.model_copy(
        update={
            "prompts_per_step": 60,
            "navigation_share": 0.8,
            "astar_share": 0.25,
            "sizes": (6,),
            "curriculum": CurriculumConfig(hardest_of=Schedule(start=1, end=6)),
        }
    )
    draw = prompt_source(VSP(), config, VSP_TOOLS, DATA, 0)

    def wrong_paths(progress: float, searched: bool) -> float:
        prompts = [prompt for step in range(4) for prompt in draw(step, progress)]
        asked = [p for p in prompts if (p.task == "navigation" and "ASTAR" not in p.tools) == searched]
        return sum(failures(map_of(p)) or 0 for p in asked) / len(asked)

    assert wrong_paths(1.0, searched=True) > 2 * wrong_paths(0.0, searched=True)
    assert wrong_paths(1.0, searched=False) < 1.5 * wrong_paths(0.0, searched=False)
    assert all(split_of(map_of(p).sha256) is Split.TRAIN for p in draw(1, 1.0))


def test_groups_are_formed_by_prompt_whatever_the_order() -> None:
    """rllm#924: grouped by the trajectory's own id, every group has one member and rewards become advantages."""
    trajectories = [replace(t, components=_SCORED) for t in _sampled(small_policy(agent=AGENT), 3)]
    again = [replace(t, sample=1) for t in trajectories]
    groups = group([*trajectories, *reversed(again)], 0, REWARD)
    assert [each.size for each in groups] == [2, 2, 2]
    for each in groups:
        assert len({t.prompt.prompt_id for t in each.trajectories}) == 1


_SCORED = {
    "format": 1.0,
    "tool": 4.0,
    "accuracy": 0.0,
    "calls": 1.0,
    "repeats": 0.0,
    "utilisation": 0.0,
    "turning_points": 0.0,
    "exploration": 0.0,
}
