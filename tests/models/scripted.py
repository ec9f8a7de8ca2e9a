"""Policies that misbehave on command: the network runs, but the next token is given where a script gives one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from environments.base import Prompt
from models.agent_format import write_call, write_response
from models.config import AgentConfig, RolloutConfig
from models.encoding import Encoder, picture_grid
from models.episode import Hopeless
from models.policy import Policy, Sequence, token_logprobs
from models.rollout import RolloutRequest
from models.trajectory import Trajectory
from models.transformers_engine import TransformersEngine
from tools.base import Picture, Purity, Tool, ToolCall, ToolOutput, ToolParams
from tools.cache import ToolResultCache
from tools.executor import ToolExecutor
from tools.registry import ToolRegistry
from tools.vsp import VSP_TOOLS, vsp_registry

POINT = write_call("find the start", ToolCall("POINT", {"target": "start"}))
YES = write_response("the path is safe", "Yes")

Script = Callable[[RolloutRequest], Iterable[int | None]]
"""The tokens of one episode in order; None leaves the choice to the policy, as does the end of the script."""


def crop(x: int, y: int, width: int, height: int) -> str:
    """A turn that cuts this box out of the picture."""
    return write_call("look", ToolCall("CROP", {"box": [x, y, x + width, y + height]}))


def spelled(encoder: Encoder, text: str) -> list[int]:
    """Ids of a text letter by letter: markers in it become ordinary tokens."""
    return [token for letter in text for token in encoder.text(letter)]


class ScriptedEngine(TransformersEngine):
    """Samples as ever, except that the script decides where it says something."""

    script: Script

    def _choose(self, ready: list[Any], logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        tokens, _ = super()._choose(ready, logits, temperature)
        for line, each in enumerate(ready):
            if not isinstance(each.draws, _Scripted):
                each.draws = _Scripted(each.draws, iter(self.script(each.episode.request)))
            given = next(each.draws.script, None)
            if given is not None:
                tokens[line] = given
            elif int(tokens[line]) in self._ends:  # the policy's own tokens are thoughts, they end nothing
                tokens[line] = self.policy.encoder.text("a")[0]
        logprobs = torch.log_softmax(logits / temperature, -1)
        return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    @property
    def _ends(self) -> set[int]:
        return {*(self._closing or ()), *self.rules.turn_ends}


class _Scripted:
    """An episode's random numbers with its script beside them."""

    def __init__(self, draws: Any, script: Iterator[int | None]) -> None:
        self.draws, self.script = draws, script

    def __getitem__(self, index: int) -> float:
        return float(self.draws[index])


def scripted_engine(
    policy: Policy,
    script: Script,
    cached: bool = True,
    call_deadline_s: float = 5.0,
    hopeless: Hopeless | None = None,
    **settings: object,
) -> ScriptedEngine:
    """An engine over `policy` and its registry's tools that follows the script."""
    registry = policy.encoder.registry
    executor = ToolExecutor(registry, ToolResultCache(1000) if cached else None, call_deadline_s)
    rollout = RolloutConfig.model_validate({"slots": 16, "draft_tokens": 0, **settings})
    engine = ScriptedEngine(policy, executor, policy.encoder.agent, rollout, hopeless)
    engine.script = script
    return engine


def turns(policy: Policy, *texts: str) -> Script:
    """The same turns for every episode, tokenised by the policy's encoder."""
    ids = policy.encoder.text("".join(texts))
    return lambda request: ids


def same(one: list[Trajectory], other: list[Trajectory]) -> None:
    """Two samplings gave the same episodes; log-probs may differ by rounding."""
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.mask, b.mask)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
        assert a.pictures == b.pictures
        assert a.stop_reason is b.stop_reason
        assert [s.call for s in a.steps] == [s.call for s in b.steps]
        assert [s.observation and s.observation.payload for s in a.steps] == [
            s.observation and s.observation.payload for s in b.steps
        ]


class Probe:
    """A tool without required parameters that counts its runs and waits `seconds` in each."""

    class Params(ToolParams):
        n: int = 0

    def __init__(self, seconds: float = 0.0, output: ToolOutput | None = None) -> None:
        self.runs = 0
        self.seconds = seconds
        self.output = output
        self.release = threading.Event()
        self.tool = Tool("PROBE", "1", "Counts.", self.Params, Purity.STATEFUL, (), self.run)

    def run(self, picture: Picture, params: Params) -> ToolOutput:
        self.runs += 1
        self.release.wait(self.seconds)
        return self.output or ToolOutput({"n": params.n})


def with_tool(policy: Policy, tool: Tool, agent: AgentConfig) -> Policy:
    """The same weights with one more tool."""
    registry = ToolRegistry([*(vsp_registry().get(name) for name in VSP_TOOLS), tool])
    encoder = Encoder(policy.encoder.tokenizer, registry, agent, policy.encoder.image_scale)
    return Policy(policy.model, encoder)


def offering(prompt: Prompt, tool: Tool) -> Prompt:
    """The prompt with one more tool offered."""
    return replace(prompt, tools=(*prompt.tools, tool.name))


def check_contracts(encoder: Encoder, ids: Any, mask: Any, logprobs: Any, pictures: Any) -> None:
    """Lengths agree; placeholders, pictures and rows of the grid agree; no placeholder is the agent's."""
    assert len(ids) == len(mask) == len(logprobs)
    runs, inside = [], 0
    for token, own in zip(ids, mask, strict=True):
        if token == encoder.image_pad:
            assert not own
            inside += 1
        elif inside:
            assert token == encoder.vision_end  # no picture is cut
            runs.append(inside)
            inside = 0
    assert not inside
    grids = [picture_grid(picture, encoder.image_scale) for picture in pictures]
    assert runs == [rows * columns // 4 for _, rows, columns in grids]
    assert list(ids).count(encoder.vision_start) == list(ids).count(encoder.vision_end) == len(runs)


def check_trajectory(policy: Policy, trajectory: Trajectory) -> None:
    """`check_contracts`, and the mask covers the sampled tokens only: log-probs are those of the trainer."""
    t = trajectory
    check_contracts(policy.encoder, t.ids.tolist(), t.mask.tolist(), t.logprobs.tolist(), t.pictures)
    assert not t.logprobs[~t.mask].any()


def gap(policy: Policy, trajectories: list[Trajectory]) -> float:
    """The largest difference between the sampler's and the trainer's log-probs."""
    sequences = [Sequence(t.ids, t.mask, t.pictures) for t in trajectories]
    trained = token_logprobs(policy, sequences, trajectories[0].temperature, 4096)
    return max(
        float((torch.from_numpy(t.logprobs[1:][t.mask[1:]]) - own).abs().max())
        for t, own in zip(trajectories, trained, strict=True)
    )
