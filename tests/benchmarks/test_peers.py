"""The comparisons are only worth something if both sides do the same work on the same tokens."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.peers.generate_engine import GenerateEngine, cut_turn
from benchmarks.peers.measure import ratio
from benchmarks.peers.trl_format import messages, processor, scaled
from benchmarks.tool_cache import counting
from models.config import AgentConfig
from models.policy import Policy
from models.rollout import RolloutRequest
from tests.models.policies import engine_for, small_policy, some_prompts
from tools.base import ToolCall
from tools.cache import ToolResultCache
from tools.executor import ToolExecutor

AGENT = AgentConfig(max_tokens=160, max_turns=3)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return small_policy(agent=AGENT)


def test_the_slow_engine_gives_the_same_greedy_episodes(policy: Policy) -> None:
    requests = [RolloutRequest(prompt, 0, 0) for prompt in some_prompts(3)]
    executor = ToolExecutor(policy.encoder.registry, None, 5.0)
    theirs = GenerateEngine(policy, executor, AGENT, batch=3).sample(requests, 0.0)
    own = engine_for(policy).sample(requests, 0.0)
    assert [t.ids.tolist() for t in theirs] == [t.ids.tolist() for t in own]
    assert [t.stop_reason for t in theirs] == [t.stop_reason for t in own]


def test_a_turn_ends_at_its_first_closing_tag_or_where_the_room_ends() -> None:
    assert cut_turn([5, 9, 0, 0], [9], 10) == [5, 9]
    assert cut_turn([5, 6, 7], [9], 10) == [5, 6, 7]
    assert cut_turn([5, 6, 7, 9], [9], 2) == [5, 6]


def test_trl_reads_the_ids_of_our_encoder(policy: Policy) -> None:
    theirs = processor(policy.encoder)
    for prompt in some_prompts(4):
        system, user = messages(policy.encoder, prompt)
        picture = scaled(prompt.pictures[0], policy.encoder.image_scale)
        content = [{"type": "image", "image": picture}, {"type": "text", "text": user["content"]}]
        output = theirs.apply_chat_template(
            [
                [
                    {**system, "content": [{"type": "text", "text": system["content"]}]},
                    {**user, "content": content},
                ]
            ],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )
        assert output["input_ids"][0] == policy.encoder.prompt(prompt).ids


def test_trl_reads_one_call_per_turn_however_many_came_before(policy: Policy) -> None:
    """Read from the prompt on, the calls of earlier turns ran again in every turn, 30 an episode."""
    encoder, tokenizer = policy.encoder, processor(policy.encoder).tokenizer
    call = encoder.call("look", ToolCall("POINT", {"target": "start"}))
    before = [
        *encoder.prompt(some_prompts(1)[0]).ids,
        *call,
        *encoder.text('<obs>{"coordinates": [32, 32]}</obs>'),
    ]
    said = tokenizer.parse_response(call, prefix=before)
    assert [each["function"]["arguments"] for each in said["tool_calls"]] == [{"target": "start"}]
    answer = encoder.response("done", "RRDD")[:-1]
    assert tokenizer.parse_response(answer, prefix=before)["content"] == "RRDD"


def test_only_calls_that_ran_are_counted(policy: Policy) -> None:
    registry, ran = counting(policy.encoder.registry)
    executor = ToolExecutor(registry, ToolResultCache(10), 5.0)
    prompt = some_prompts(1)[0]
    for _ in range(3):
        executor.run(ToolCall("POINT", {"target": "goal"}), prompt.pictures[0], prompt.tools)
    executor.run(ToolCall("POINT", {"target": "moon"}), prompt.pictures[0], prompt.tools)
    assert dict(ran) == {"POINT": 1}


def test_ratios_compare_the_two_sides_of_a_round() -> None:
    assert ratio([2.0, 4.0, 30.0], [1.0, 1.0, 10.0]) == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert np.isnan(ratio([float("nan")], [1.0])["median"])
