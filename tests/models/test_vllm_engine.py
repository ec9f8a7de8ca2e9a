"""The vLLM engine without vLLM: what it sends, what it makes of the answers, and what a weight sync must reset.

vLLM itself needs a GPU (or its own build); the stand-in below has the four methods that the engine calls.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from models.agent_format import write_call, write_response
from models.config import AgentConfig, RolloutConfig
from models.policy import Policy
from models.rollout import RolloutRequest
from models.trajectory import StopReason
from models.vllm_engine import VLLMEngine
from tests.models.policies import small_policy, some_prompts
from tools.base import ToolCall
from tools.executor import ToolExecutor

AGENT = AgentConfig(max_tokens=400, observation_pictures=("DRAW2DPATH",))
DRAW = ToolCall("DRAW2DPATH", {"start": [32, 32], "directions": "R"})
TURNS = [
    write_call("find the start", ToolCall("POINT", {"target": "start"})),
    write_call("draw the path", DRAW),
    write_response("the path is safe", "Yes"),
]


class StandInLLM:
    """Answers every sequence with the next turn of the script and records what it was asked."""

    def __init__(self, policy: Policy, finish: str = "stop") -> None:
        self.policy, self.finish = policy, finish
        self.asked: list[list[dict[str, Any]]] = []
        self.calls: list[str] = []
        self.llm_engine = SimpleNamespace(reset_mm_cache=lambda: self.calls.append("reset_mm_cache"))

    def generate(self, prompts: list[dict[str, Any]], params: list[Any], use_tqdm: bool) -> list[Any]:
        turn = self.policy.encoder.text(TURNS[len(self.asked)])
        self.asked.append(prompts)
        logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in turn]
        answer = SimpleNamespace(token_ids=turn, logprobs=logprobs, finish_reason=self.finish)
        return [SimpleNamespace(outputs=[answer]) for _ in prompts]

    def collective_rpc(self, method: str, kwargs: dict[str, str]) -> None:
        self.calls.append(method)

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset_prefix_cache")


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    module = ModuleType("vllm")
    module.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return small_policy(agent=AGENT)


def _engine(policy: Policy, llm: StandInLLM, folder: Path) -> VLLMEngine:
    executor = ToolExecutor(policy.encoder.registry, None, 5.0)
    return VLLMEngine(llm, policy.encoder, executor, AGENT, RolloutConfig(), lambda: folder)


def test_episodes_keep_the_sampled_ids_and_send_every_picture_each_turn(
    policy: Policy, tmp_path: Path
) -> None:
    """trl#6765: first-turn pictures were sent again after a tool had returned new ones."""
    llm = StandInLLM(policy)
    prompts = some_prompts(3)
    trajectories = _engine(policy, llm, tmp_path).sample([RolloutRequest(p, 0, 7) for p in prompts], 1.0)
    assert {t.stop_reason for t in trajectories} == {StopReason.ANSWERED}
    assert {t.response for t in trajectories} == {"Yes"}
    for turn, wanted in zip(llm.asked, (1, 1, 2), strict=True):
        for sent in turn:
            assert len(sent["multi_modal_data"]["image"]) == wanted
            assert sent["prompt_token_ids"].count(policy.encoder.image_pad) == wanted
    for trajectory in trajectories:
        assert len(trajectory.ids) == len(trajectory.mask) == len(trajectory.logprobs)
        assert set(trajectory.logprobs[trajectory.mask].tolist()) == {-0.5}
        sampled = [i for text in TURNS for i in policy.encoder.text(text)]
        assert trajectory.ids[trajectory.mask].tolist() == sampled


def test_a_turn_cut_by_the_limit_never_runs_its_call(policy: Policy, tmp_path: Path) -> None:
    """hermes-agent#7680: finish_reason=length was ignored when a tool call was there."""
    llm = StandInLLM(policy, finish="length")
    (trajectory,) = _engine(policy, llm, tmp_path).sample([RolloutRequest(some_prompts(1)[0], 0, 7)], 1.0)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.steps == ()


def test_a_sync_loads_weights_and_then_resets_both_caches(policy: Policy, tmp_path: Path) -> None:
    """vllm#44910, verl#6523, trl#3024: prefix and encoder caches of the old weights were served on."""
    llm = StandInLLM(policy)
    engine = _engine(policy, llm, tmp_path)
    engine.sync(4)
    assert llm.calls == ["reload_weights", "reset_prefix_cache", "reset_mm_cache"]
    assert engine.version == 4
