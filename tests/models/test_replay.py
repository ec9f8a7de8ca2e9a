"""The rollout cache: small, complete in a checkpoint, corrected for its own preferences."""

from __future__ import annotations

import pickle
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.config import ReplayConfig
from models.replay import ReplayBuffer, ReplayGroup
from models.trajectory import Trajectory
from tests.models.policies import small_policy, some_prompts
from tests.models.test_grpo import AGENT, _sampled
from tools.base import Picture


@pytest.fixture(scope="module")
def trajectory() -> Trajectory:
    sampled = _sampled(small_policy(agent=AGENT), 1)[0]
    return replace(sampled, components={"accuracy": 0.0, "format": 1.0, "tool": 4.0})


def _long(base: Trajectory, length: int, version: int, picture: Picture) -> Trajectory:
    """An episode of its own arrays and steps, `length` tokens long."""
    prompt = replace(base.prompt, pictures=(picture,), prompt_id=f"p{version}")
    return replace(
        base,
        prompt=prompt,
        pictures=(picture,),
        ids=np.zeros(length, dtype=np.int32),
        mask=np.ones(length, dtype=bool),
        logprobs=np.zeros(length, dtype=np.float32),
        policy_version=version,
        components=dict(base.components),
    )


def test_ten_thousand_trajectories_fit_into_300_megabytes(trajectory: Trajectory) -> None:
    """S2 §5.3: texts and decoded pictures of 10,000 episodes would take gigabytes."""
    pictures = [prompt.pictures[0] for prompt in some_prompts(50, size=8)]
    for picture in pictures:
        assert picture.rgb.nbytes > 500_000  # decoded, and kept by the prompt's own object
    buffer = ReplayBuffer(ReplayConfig(capacity=10_000))
    tracemalloc.start()
    for group in range(1250):
        picture = pictures[group % len(pictures)]
        members = [_long(trajectory, 768, group, picture) for _ in range(8)]
        buffer.add(ReplayGroup(f"g{group}", members, 0.5))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(buffer) == 10_000
    assert held < 300e6, f"{held / 1e6:.0f} MB"
    assert len(buffer.pictures) == len({p.sha256 for p in pictures})


def test_beyond_the_limit_groups_go_to_disk_and_come_back_whole(
    trajectory: Trajectory, tmp_path: Path
) -> None:
    buffer = ReplayBuffer(ReplayConfig(capacity=1000, memory_mb=1, max_age=10), tmp_path)
    picture = trajectory.prompt.pictures[0]
    for version in range(20):
        buffer.add(ReplayGroup(f"g{version}", [_long(trajectory, 5000, version, picture)] * 4, 0.5))
    assert buffer.bytes <= 1e6
    assert len(list(tmp_path.iterdir())) > 5
    spilled = buffer.groups[0]
    assert spilled.path is not None
    assert len(spilled.trajectories[0].ids) == 5000
    buffer.drop_stale(25)
    kept = sum(group.path is not None for group in buffer.groups)
    assert len(list(tmp_path.iterdir())) == kept, "files of forgotten groups stay behind"


def test_a_checkpoint_holds_what_was_on_disk(trajectory: Trajectory, tmp_path: Path) -> None:
    """NeMo-RL#3599: a buffer that a restart empties loses a third of the data."""
    buffer = ReplayBuffer(ReplayConfig(capacity=1000, memory_mb=1), tmp_path)
    picture = trajectory.prompt.pictures[0]
    for version in range(10):
        buffer.add(ReplayGroup(f"g{version}", [_long(trajectory, 9000, version, picture)] * 4, 0.5))
    saved = pickle.dumps(buffer)
    for file in tmp_path.iterdir():
        file.unlink()
    restored: ReplayBuffer = pickle.loads(saved)
    assert [group.key for group in restored.groups] == [f"g{n}" for n in range(10)]
    assert all(len(group.trajectories) == 4 for group in restored.groups)


def test_weights_correct_for_how_often_a_group_is_drawn(trajectory: Trajectory) -> None:
    """Schaul et al. 2016 §3.4: with exponent 1 the weighted draws are as if uniform."""
    config = ReplayConfig(capacity=100, priority_exponent=1.0, importance_exponent=1.0, max_age=50)
    buffer = ReplayBuffer(config)
    for name, priority in (("low", 0.1), ("high", 0.4)):
        buffer.add(ReplayGroup(name, [trajectory], priority))
    rng = np.random.default_rng(0)
    weight = {"low": 0.0, "high": 0.0}
    drawn = {"low": 0, "high": 0}
    for _ in range(2000):
        for each in buffer.sample(2, 1, rng):
            weight[each.group.key] = each.weight
        drawn[buffer.sample(1, 1, rng)[0].group.key] += 1
    assert weight["low"] == 1.0
    assert weight["high"] == pytest.approx(0.25)
    assert drawn["high"] / drawn["low"] == pytest.approx(4, rel=0.2)


def test_nothing_is_replayed_before_the_warm_up(trajectory: Trajectory) -> None:
    buffer = ReplayBuffer(ReplayConfig(capacity=100, warmup=5))
    rng = np.random.default_rng(0)
    buffer.add(ReplayGroup("a", [trajectory] * 3, 0.5))
    assert buffer.sample(1, 1, rng) == []
    buffer.add(ReplayGroup("b", [trajectory] * 3, 0.5))
    assert len(buffer.sample(1, 1, rng)) == 1


def test_rollouts_of_a_policy_too_far_away_are_dropped(trajectory: Trajectory) -> None:
    """S2 §3.1: age is not the only way to be stale."""
    buffer = ReplayBuffer(ReplayConfig(capacity=100, max_divergence=0.5))
    for name in "ab":
        buffer.add(ReplayGroup(name, [trajectory], 0.5))
    assert buffer.drop_diverged({"a": 0.6, "b": 0.4, "not in the buffer": 9.0}) == 1
    assert [group.key for group in buffer.groups] == ["b"]


def test_a_run_that_went_back_forgets_what_came_after(trajectory: Trajectory) -> None:
    buffer = ReplayBuffer(ReplayConfig(capacity=100))
    for version in range(4):
        buffer.add(ReplayGroup(f"v{version}", [replace(trajectory, policy_version=version)], 0.5))
    buffer.forget_after(1)
    assert [group.key for group in buffer.groups] == ["v0", "v1"]


def test_unsolved_prompts_wait_their_turn_until_they_are_solved(trajectory: Trajectory) -> None:
    buffer = ReplayBuffer(ReplayConfig(capacity=10, success_capacity=3))
    failures = [replace(trajectory, prompt=prompt) for prompt in some_prompts(3)]
    for failure in failures:
        buffer.remember([failure])
    first, second = buffer.revisited(1), buffer.revisited(2)
    assert first[0].question == failures[0].prompt.question
    assert [p.prompt_id for p in second] == [f.prompt.prompt_id for f in failures[1:]]
    solved = replace(failures[0], components={**trajectory.components, "accuracy": 4.0})
    buffer.remember([failures[0], solved])
    assert len(buffer.unsolved) == 2
    assert buffer.success_for(failures[0].prompt) is not None
    assert buffer.success_for(failures[1].prompt) is None


def test_the_number_of_kept_solutions_is_bounded(trajectory: Trajectory) -> None:
    buffer = ReplayBuffer(ReplayConfig(capacity=10, success_capacity=2))
    for prompt in some_prompts(5):
        buffer.remember(
            [replace(trajectory, prompt=prompt, components={**trajectory.components, "accuracy": 4.0})]
        )
    assert len(buffer.successes) == 2
