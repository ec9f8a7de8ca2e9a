"""Demonstrations as training sequences: the same encoder that rollouts use, loss on the agent's tokens only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from environments.vsp.expert import Demonstration
from models.agent_format import OBS_CLOSE, OBS_OPEN, write_call, write_response
from models.config import AgentConfig
from models.encoding import Encoder, Tokens, system_text
from models.policy import Sequence
from models.tokenizer import IM_END, IM_START, VISION_END
from tools.registry import ToolRegistry

DIRECT_THOUGHT = "answer at once"


def encode_demonstration(
    encoder: Encoder, demonstration: Demonstration, train_on_mistakes: bool = False
) -> Sequence:
    """Ids, loss mask and pictures of one expert trajectory.

    A step that the expert later corrects is context, not a target, unless `train_on_mistakes`: the policy learns
    to recover from it without learning to make it.
    """
    tokens = encoder.prompt(demonstration.prompt)
    for step in demonstration.steps:
        turn = step.turn
        trained = train_on_mistakes or not turn.mistake
        if turn.call is not None:
            assert step.observation is not None
            tokens.append(encoder.call(turn.think, turn.call), agent=trained)
            ids, pictures = encoder.observation(turn.call.name, step.observation)
            tokens.append(ids, agent=False, pictures=pictures)
        else:
            tokens.append(encoder.response(turn.think, turn.response or ""), agent=trained)
    return as_sequence(tokens)


def encode_direct(encoder: Encoder, demonstration: Demonstration) -> Sequence:
    """The no-tool baseline: the same question with no tools offered, answered in the first turn."""
    prompt = replace(demonstration.prompt, tools=())
    tokens = encoder.prompt(prompt)
    answer = demonstration.steps[-1].turn.response or ""
    tokens.append(encoder.response(DIRECT_THOUGHT, answer), agent=True)
    return as_sequence(tokens)


def demonstration_text(demonstration: Demonstration, registry: ToolRegistry, agent: AgentConfig) -> str:
    """One trajectory as text with the markers between its pieces, for training the tokenizer."""
    prompt = demonstration.prompt
    system = system_text(registry, agent, prompt.tools)
    parts = [
        f"{IM_START}system\n{system}{IM_END}\n{IM_START}user\n{VISION_END}{prompt.question}{IM_END}\n",
        f"{IM_START}assistant\n",
    ]
    for step in demonstration.steps:
        turn = step.turn
        if turn.call is not None and step.observation is not None:
            parts += [write_call(turn.think, turn.call), f"{OBS_OPEN}{step.observation.to_json()}{OBS_CLOSE}"]
        else:
            parts.append(write_response(turn.think, turn.response or ""))
    return "".join(parts)


def as_sequence(tokens: Tokens) -> Sequence:
    """Freeze a growing sequence into arrays."""
    return Sequence(
        np.array(tokens.ids, dtype=np.int32), np.array(tokens.mask, dtype=bool), tuple(tokens.pictures)
    )
