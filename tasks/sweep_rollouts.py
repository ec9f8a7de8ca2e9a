"""The rollouts that all trials of a sweep share: sampled once by the SFT policy, re-scored by each trial.

A trajectory holds its reward components, so a trial's weights only have to be applied to them. It also holds the
log-probs it was sampled with, so the loop's importance weights correct for the policy having moved since.
"""

from __future__ import annotations

import gzip
import json
import logging
import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from tasks.params import Params, override
from tasks.sweep_plan import Plan

if TYPE_CHECKING:
    from models.replay import ReplayBuffer
    from models.trajectory import Trajectory
    from tools.base import Picture
    from tools.cache import ToolResultCache

log = logging.getLogger(__name__)

# Older than the first policy of a trial, which has version 0: groups of the present version are not replayed.
SHARED_VERSION = -1


def shared_rollouts(plan: Plan, cache: ToolResultCache) -> list[Trajectory]:
    """The shared trajectories, sampled by the first process that asks while the others wait."""
    file = plan.folder / "rollouts.pkl.gz"
    with FileLock(plan.folder / "rollouts.lock"):
        if not file.is_file():
            began = time.monotonic()
            sampled = _sample(plan, cache)
            cost = {"trajectories": len(sampled), "seconds": round(time.monotonic() - began, 1)}
            (plan.folder / "rollouts.json").write_text(json.dumps(cost), encoding="utf-8")
            _write(file, sampled)
    with gzip.open(file, "rb") as stream:
        trajectories: list[Trajectory] = pickle.load(stream)
    return trajectories


def fill(buffer: ReplayBuffer, trajectories: Sequence[Trajectory], params: Params) -> None:
    """Put the shared rollouts into a trial's buffer, N of each prompt, with priorities under its own weights."""
    from models.grpo import group

    size = round(params.grpo.group_size.start)
    for each in group(list(trajectories), SHARED_VERSION, params.reward):
        for own in group(each.trajectories[:size], SHARED_VERSION, params.reward):
            buffer.add(own)


def _sample(plan: Plan, cache: ToolResultCache) -> list[Trajectory]:
    """Groups as large as the largest N of the space, on prompts that no trial samples anew."""
    import numpy as np

    from models.grpo import score
    from models.rollout import RolloutRequest
    from tasks.grpo import build_parts

    sweep = plan.params.sweep
    if sweep.shared_prompts == 0:
        return []
    # a seed of its own: a trial's prompts depend on its own seed
    params = override(plan.trial_params(plan.base), {"seed": plan.params.seed + 1})
    parts, _ = build_parts(params, cache)
    prompts = []
    for step in range(-(-sweep.shared_prompts // params.grpo.prompts_per_step)):
        prompts += parts.draw_prompts(step, step * params.grpo.prompts_per_step / sweep.shared_prompts)
    prompts = prompts[: sweep.shared_prompts]
    size, rng = _largest_group(plan), np.random.default_rng([params.seed, 0])
    log.info("sampling %d rollouts of %d prompts for all trials", size * len(prompts), len(prompts))
    requests = [RolloutRequest(p, n, int(rng.integers(2**62))) for p in prompts for n in range(size)]
    sampled = parts.rollouts.sample(requests, params.grpo.temperature)
    return _compact([score(each, parts.environment) for each in sampled])


def _largest_group(plan: Plan) -> int:
    """The most trajectories of a prompt that a trial may want at its start."""
    dimension = plan.space.get("grpo.group_size.start")
    if dimension is None:
        return round(plan.params.grpo.group_size.start)
    ends = dimension.choices if dimension.choices is not None else (dimension.high,)
    return max(round(end) for end in ends if isinstance(end, int | float))


def _compact(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Without what no update reads (the steps' texts), each picture once and undecoded."""
    from tools.base import Picture

    known: dict[str, Picture] = {}

    def shared(pictures: tuple[Picture, ...]) -> tuple[Picture, ...]:
        return tuple(known.setdefault(picture.sha256, Picture(picture.png)) for picture in pictures)

    return [
        replace(
            each,
            policy_version=SHARED_VERSION,
            steps=(),
            pictures=shared(each.pictures),
            prompt=replace(each.prompt, pictures=shared(each.prompt.pictures)),
        )
        for each in trajectories
    ]


def _write(file: Path, trajectories: Sequence[Trajectory]) -> None:
    draft = file.with_suffix(".tmp")
    with gzip.open(draft, "wb", compresslevel=3) as stream:
        pickle.dump(list(trajectories), stream)
    draft.replace(file)
