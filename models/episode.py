"""A running episode: what every rollout engine does between sampling one turn and the next."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from environments.base import Prompt
from models.agent_format import ParsedTurn, parse_turn, write_call
from models.config import AgentConfig
from models.encoding import Encoder, Tokens, token_id
from models.rollout import RolloutRequest
from models.tokenizer import END_OF_TEXT
from models.trajectory import Step, StopReason, Trajectory
from tools.base import Observation, ToolCall
from tools.errors import ToolError, ToolErrorCode
from tools.executor import ToolExecutor
from tools.grading import call_level

Hopeless = Callable[[Prompt, Sequence[Step], Literal["never", "fatal", "strict"]], bool]
"""An environment's rule for ending an episode early: (prompt, steps so far, `agent.prune`)."""

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
    turn_written: float = 0.0  # when its last token was sampled
    parse_errors: int = 0
    failed_calls: int = 0
    steps: list[Step] = field(default_factory=list)
    calling: tuple[ParsedTurn, Future[Observation]] | None = None  # a call that runs beside the sampling

    @classmethod
    def begin(cls, index: int, request: RolloutRequest, prompt: Tokens) -> Episode:
        """Start from a copy of the encoded prompt, which the group shares."""
        tokens = Tokens(list(prompt.ids), list(prompt.mask), list(prompt.logprobs), list(prompt.pictures))
        return cls(index, request, tokens, turn_start=len(tokens.ids))


@dataclass(frozen=True)
class EpisodeRules:
    """Turns into steps: parses, runs the call, appends the observation, decides when an episode is over.

    Raises ValueError when `agent.prune` asks for a rule and the environment gave none.
    """

    encoder: Encoder
    executor: ToolExecutor
    agent: AgentConfig
    deadline_s: float
    hopeless: Hopeless | None = None

    def __post_init__(self) -> None:
        if self.agent.prune != "never" and self.hopeless is None:
            raise ValueError(f"agent.prune is {self.agent.prune}, but this environment has no rule for it")

    @cached_property
    def turn_ends(self) -> frozenset[int]:
        """Tokens that end a turn by themselves: base models write either of them (unsloth#6804)."""
        return frozenset((self.encoder.im_end, token_id(self.encoder.tokenizer, END_OF_TEXT)))

    def force(self, episode: Episode) -> None:
        """Begin an episode with its request's forced call, if any and if there is room for it and its result.

        Its tokens count as the environment's: the agent did not choose them, so they are not trained on.
        """
        call, tokens, before = episode.request.forced, episode.tokens, len(episode.tokens.ids)
        if call is None:
            return
        tokens.append(self.encoder.text(write_call("", call)), agent=False)
        episode.turn_written = time.time()
        turn = ParsedTurn("", call, well_formed=True)
        if self.take(episode, turn, self.run(call, episode.request.prompt)) is None:
            episode.steps[-1] = replace(episode.steps[-1], forced=True)
            return
        del tokens.ids[before:], tokens.mask[before:], tokens.logprobs[before:]
        episode.steps.clear()
        episode.parse_errors = episode.failed_calls = 0

    def over_limits(self, episode: Episode) -> StopReason | None:
        """Limits that hold after any token."""
        if len(episode.tokens.ids) >= self.agent.max_tokens:
            return StopReason.MAX_TOKENS
        if time.monotonic() - episode.started > self.deadline_s:
            return StopReason.DEADLINE
        return None

    def act(self, episode: Episode) -> StopReason | None:
        """Read the finished turn, run its call, append the observation. Returns why the episode is over, or None."""
        turn = self.read(episode)
        observation = None if turn.call is None else self.run(turn.call, episode.request.prompt)
        return self.take(episode, turn, observation)

    def begin(self, episode: Episode, pool: ThreadPoolExecutor) -> StopReason | None:
        """As `act`, but a call is only started: while `episode.calling` is set, the episode rests."""
        turn = self.read(episode)
        if turn.call is None:
            return self.take(episode, turn, None)
        episode.calling = turn, pool.submit(self.run, turn.call, episode.request.prompt)
        return None

    def resume(self, episode: Episode) -> StopReason | None:
        """What is left of `act` after `begin`; waits for the call. Returns why the episode is over, or None."""
        assert episode.calling is not None
        (turn, result), episode.calling = episode.calling, None
        return self.take(episode, turn, result.result()) or self.over_limits(episode)

    def read(self, episode: Episode) -> ParsedTurn:
        """The turn that the episode's last tokens say."""
        ids = [i for i in episode.tokens.ids[episode.turn_start :] if i not in self.turn_ends]
        turn = parse_turn(self.encoder.decode(ids))
        episode.turn_written = time.time()
        if turn.call is not None and not _is_json(turn.call):
            return ParsedTurn(turn.think, defect="the call holds broken characters or an endless number")
        return turn

    def run(self, call: ToolCall, prompt: Prompt) -> Observation:
        """The observation of a call. Changes nothing, so it may run beside the sampling. Never raises."""
        observation = self.executor.run(call, prompt.pictures[0], prompt.tools)
        shown = observation.picture if call.name in self.agent.observation_pictures else None
        try:
            observation.to_json().encode()  # a lone surrogate is JSON, but no tokenizer takes it
            if shown is not None:
                shown.decode()
        except (UnicodeEncodeError, ToolError):
            message = "the tool returned broken characters or a broken picture"
            return Observation.failure(ToolErrorCode.TOOL_CRASHED, message, observation.seconds)
        return observation

    def take(self, episode: Episode, turn: ParsedTurn, observation: Observation | None) -> StopReason | None:
        """Add the turn and the observation of its call, if any. Returns why the episode is over, or None."""
        prompt, written = episode.request.prompt, episode.turn_written
        if turn.response is not None:
            times = episode.turn_began, written, written
            episode.steps.append(Step(turn.think, None, None, turn.response, turn.well_formed, 0, *times))
            return StopReason.ANSWERED
        if observation is None:
            defect = turn.defect or "unreadable turn"
            observation = Observation.failure(ToolErrorCode.MALFORMED_CALL, defect)
        level = call_level(turn.call, self.encoder.registry, prompt.tools, prompt.pictures[0].size)
        times = episode.turn_began, written, time.time()
        episode.steps.append(Step(turn.think, turn.call, observation, None, turn.well_formed, level, *times))
        episode.parse_errors = episode.parse_errors + 1 if turn.call is None else 0
        episode.failed_calls = 0 if observation.ok else episode.failed_calls + 1
        if episode.parse_errors >= MAX_PARSE_ERRORS:
            return StopReason.PARSE_ERROR
        if episode.failed_calls >= MAX_FAILED_CALLS:
            return StopReason.TOOL_ERROR
        if self.hopeless is not None and self.hopeless(prompt, episode.steps, self.agent.prune):
            return StopReason.PRUNED
        if len(episode.steps) >= self.agent.max_turns:
            return StopReason.MAX_TURNS
        obs_ids, pictures = self.encoder.observation(turn.call.name if turn.call else "", observation)
        if len(episode.tokens.ids) + len(obs_ids) >= self.agent.max_tokens:
            return StopReason.MAX_TOKENS  # text and pictures are committed together or not at all (verl#4050)
        episode.tokens.append(obs_ids, agent=False, pictures=pictures)
        episode.turn_start, episode.turn_began = len(episode.tokens.ids), times[-1]
        return None


def returned(calling: Mapping[int, Episode], block: bool) -> list[int]:
    """The keys of the episodes whose call has ended; `block` waits for the first one if any is running."""
    results = {key: episode.calling[1] for key, episode in calling.items() if episode.calling}
    if results and block:
        wait(results.values(), return_when=FIRST_COMPLETED)
    return [key for key, result in results.items() if result.done()]


def _is_json(call: ToolCall) -> bool:
    """Whether the call can be written down again: `json.loads` takes 1e999 and half a character, UTF-8 does not."""
    try:
        json.dumps({call.name: call.params}, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


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
