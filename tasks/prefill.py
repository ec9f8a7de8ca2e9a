"""What the rollout cache begins with: rollouts of an earlier run, or expert trajectories (S2 §5.3)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.params import PROJECT_ROOT, Params

if TYPE_CHECKING:
    from environments.vsp.expert import Demonstration
    from models.grpo import GRPOState
    from models.policy import Policy
    from models.trajectory import Trajectory


def prefill(state: GRPOState, policy: Policy, params: Params) -> None:
    """Fill the buffer as `grpo.replay.prefill` and `prefill_demonstrations` say."""
    config = params.grpo.replay
    if config.prefill is not None:
        from models.grpo import group
        from tasks.rollout_store import load_rollouts

        for stored in load_rollouts(PROJECT_ROOT / config.prefill):
            for each in group(stored.trajectories, stored.version, params.reward):
                state.replay.add(each)
    if config.prefill_demonstrations:
        for trajectory in demonstrations(policy, params, config.prefill_demonstrations):
            state.replay.ask_with_solution(trajectory)


def demonstrations(policy: Policy, params: Params, count: int) -> list[Trajectory]:
    """Navigation without ASTAR as the expert does it, as solved trajectories.

    The expert's own probabilities are not known. The SFT policy's stand for them, which the expert taught: so the
    importance weights measure how far the policy has moved since, and the trust region applies.
    """
    from itertools import islice

    from models.policy import Sequence, token_logprobs
    from tasks.schema import iter_trajectories
    from tasks.workspace import COLD_START

    wanted = (
        shown
        for shown in iter_trajectories(Path(COLD_START), "train")
        if shown.prompt.task == "navigation" and "ASTAR" not in shown.prompt.tools
    )
    found = [as_trajectory(policy, shown) for shown in islice(wanted, count)]
    sequences = [Sequence(t.ids, t.mask, t.pictures) for t in found]
    logprobs = token_logprobs(policy, sequences, params.grpo.temperature, params.grpo.micro_batch_tokens)
    result = []
    for trajectory, own in zip(found, logprobs, strict=True):
        everywhere = trajectory.logprobs.copy()
        everywhere[trajectory.mask] = own.numpy()
        result.append(replace(trajectory, logprobs=everywhere))
    return result


def as_trajectory(policy: Policy, shown: Demonstration) -> Trajectory:
    """An expert's demonstration as an episode of version 0; log-probs are still 0."""
    import numpy as np

    from environments.vsp.prompts import VSP
    from models.demonstrations import encode_demonstration
    from models.grpo import score
    from models.trajectory import Step, StopReason, Trajectory

    sequence = encode_demonstration(policy.encoder, shown, train_on_mistakes=True)
    steps = tuple(
        Step(s.turn.think, s.turn.call, s.observation, s.turn.response, True, 4 if s.turn.call else 0)
        for s in shown.steps
    )
    episode = Trajectory(
        prompt=shown.prompt,
        sample=0,
        ids=sequence.ids,
        mask=sequence.mask,
        logprobs=np.zeros(len(sequence.ids), dtype=np.float32),
        pictures=sequence.pictures,
        steps=steps,
        stop_reason=StopReason.ANSWERED,
        policy_version=0,
        temperature=1.0,
        seed=0,
        seconds=0.0,
    )
    return score(episode, VSP())
