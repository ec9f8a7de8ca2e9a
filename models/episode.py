"""A running episode: what every rollout engine does between sampling one turn and the next."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from environments.base import Prompt
from models.agent_format import ParsedTurn, parse_turn
from models.config import AgentConfig
from models.encoding import Encoder, Tokens
from models.rollout import RolloutRequest
from models.trajectory import Step, StopReason, Trajectory
from tools.base import Observation
from tools.errors import ToolErrorCode
from tools.executor import ToolExecutor
from tools.grading import call_level

MAX_PARSE_ERRORS = 2  # a turn without a readable call or answer may be corrected once
MAX_FAILED_CALLS = 4  # in a row: a policy that only produces errors learns nothing more


@dataclass
class Episode:
    """A request under way: its tokens and what has happened so far."""

    index: int
    request: RolloutRequest
    tokens: Tokens
    started: float = field(default_factory=time.monotonic)
    turn_start: int = 0  # index of the turn's first token
    turn_began: float = field(default_factory=time.time)
    parse_errors: int = 0
    failed_calls: int = 0
    steps: list[Step] = field(default_factory=list)

    @classmethod
    def begin(cls, index: int, request: RolloutRequest, prompt: Tokens) -> Episode:
        """Start from a copy of the encoded prompt, which the group shares."""
        tokens = Tokens(list(prompt.ids), list(prompt.mask), list(prompt.logprobs), list(prompt.pictures))
        return cls(index, request, tokens, turn_start=len(tokens.ids))


@dataclass(frozen=True)
class EpisodeRules:
    """Turns into steps: parses, runs the call, appends the observation, decides when an episode is over."""

    encoder: Encoder
    executor: ToolExecutor
    agent: AgentConfig
    deadline_s: float

    def over_limits(self, episode: Episode) -> StopReason | None:
        """Limits that hold after any token."""
        if len(episode.tokens.ids) >= self.agent.max_tokens:
            return StopReason.MAX_TOKENS
        if time.monotonic() - episode.started > self.deadline_s:
            return StopReason.DEADLINE
        return None

    def act(self, episode: Episode) -> StopReason | None:
        """Read the finished turn, run its call, append the observation. Returns why the episode is over, or None."""
        ids = [i for i in episode.tokens.ids[episode.turn_start :] if i != self.encoder.im_end]
        turn = parse_turn(self.encoder.decode(ids))
        written = time.time()
        if turn.response is not None:
            times = episode.turn_began, written, written
            episode.steps.append(Step(turn.think, None, None, turn.response, turn.well_formed, 0, *times))
            return StopReason.ANSWERED
        observation, level = self._observe(turn, episode.request.prompt)
        times = episode.turn_began, written, time.time()
        episode.steps.append(Step(turn.think, turn.call, observation, None, turn.well_formed, level, *times))
        episode.parse_errors = episode.parse_errors + 1 if turn.call is None else 0
        episode.failed_calls = 0 if observation.ok else episode.failed_calls + 1
        if episode.parse_errors >= MAX_PARSE_ERRORS:
            return StopReason.PARSE_ERROR
        if episode.failed_calls >= MAX_FAILED_CALLS:
            return StopReason.TOOL_ERROR
        if len(episode.steps) >= self.agent.max_turns:
            return StopReason.MAX_TURNS
        obs_ids, pictures = self.encoder.observation(turn.call.name if turn.call else "", observation)
        if len(episode.tokens.ids) + len(obs_ids) >= self.agent.max_tokens:
            return StopReason.MAX_TOKENS  # text and pictures are committed together or not at all (verl#4050)
        episode.tokens.append(obs_ids, agent=False, pictures=pictures)
        episode.turn_start, episode.turn_began = len(episode.tokens.ids), times[-1]
        return None

    def _observe(self, turn: ParsedTurn, prompt: Prompt) -> tuple[Observation, int]:
        if turn.call is None:
            return Observation.failure(ToolErrorCode.MALFORMED_CALL, turn.defect or "unreadable turn"), 0
        picture = prompt.pictures[0]
        level = call_level(turn.call, self.encoder.registry, prompt.tools, picture.size)
        return self.executor.run(turn.call, picture, prompt.tools), level


def finished(episode: Episode, reason: StopReason, version: int, temperature: float) -> Trajectory:
    """The trajectory of an ended episode."""
    tokens = episode.tokens
    return Trajectory(
        prompt=episode.request.prompt,
        sample=episode.request.sample,
        ids=np.array(tokens.ids, dtype=np.int32),
        mask=np.array(tokens.mask, dtype=bool),
        logprobs=np.array(tokens.logprobs, dtype=np.float32),
        pictures=tuple(tokens.pictures),
        steps=tuple(episode.steps),
        stop_reason=reason,
        policy_version=version,
        temperature=temperature,
        seed=episode.request.seed,
        seconds=time.monotonic() - episode.started,
    )
