"""What an episode leaves behind (DESIGN.md, vocabulary)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from environments.base import Prompt
from tools.base import Observation, Picture, ToolCall

NEVER = 2**31 - 1


class StopReason(StrEnum):
    """Why an episode ended; each one is a metric."""

    ANSWERED = "answered"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    PRUNED = "pruned"
    PARSE_ERROR = "parse_error"
    TOOL_ERROR = "tool_error"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class Step:
    """One agent turn: what was read from it and, for a call, what came back and how good the call was."""

    think: str
    call: ToolCall | None
    observation: Observation | None
    response: str | None
    well_formed: bool
    call_level: int = 0  # 0..4, tools.grading.call_level
    started: float = 0.0  # Unix times, in seconds: when the turn began to be written,
    written: float = 0.0  # when it was complete,
    ended: float = 0.0  # and when its call, if any, had returned
    forced: bool = False  # written by the loop to explore, not by the agent


@dataclass(frozen=True)
class Trajectory:
    """An episode. `ids`, `mask` and `logprobs` have one entry per token, prompt included.

    `mask` is true where the agent wrote the token, `logprobs` are the behaviour policy's at the sampling
    temperature (0 elsewhere). Rewards are stored by component, never only as a sum.
    """

    prompt: Prompt
    sample: int  # index within the group
    ids: np.ndarray  # int32 (T,)
    mask: np.ndarray  # bool (T,)
    logprobs: np.ndarray  # float32 (T,)
    pictures: tuple[Picture, ...]
    steps: tuple[Step, ...]
    stop_reason: StopReason
    policy_version: int
    temperature: float
    seed: int
    seconds: float
    components: dict[str, float] = field(default_factory=dict)
    potentials: tuple[float, ...] = ()  # of the state after each of the agent's turns
    reference: np.ndarray | None = None  # float32 (agent tokens,), log-probs of the SFT policy, once known
    joined_from: int = NEVER  # first token of the first turn that has seen results of two tools

    @property
    def turn_ends(self) -> np.ndarray:
        """Index of the last token of each of the agent's turns, int (turns,)."""
        following = np.append(self.mask[1:], False)
        return np.flatnonzero(self.mask & ~following)

    @property
    def turn_starts(self) -> np.ndarray:
        """Index of the first token of each of the agent's turns, int (turns,)."""
        before = np.concatenate([[False], self.mask[:-1]])
        return np.flatnonzero(self.mask & ~before)

    @property
    def response(self) -> str | None:
        """The answer, if the episode gave one."""
        return self.steps[-1].response if self.steps and self.stop_reason is StopReason.ANSWERED else None

    @property
    def calls(self) -> int:
        """Tool calls made, failed ones included."""
        return sum(step.call is not None for step in self.steps)

    @property
    def sampled_tokens(self) -> int:
        return int(self.mask.sum())


def joined_from(trajectory: Trajectory) -> int:
    """The first token of the first turn that was written when results of two different tools were in view."""
    tools: set[str] = set()
    own = 0
    for step in trajectory.steps:
        own += not step.forced
        if step.call is not None and step.observation is not None and step.observation.ok:
            tools.add(step.call.name)
        if len(tools) > 1:
            starts = trajectory.turn_starts
            return int(starts[own]) if own < len(starts) else NEVER
    return NEVER
