"""What went wrong elsewhere in rollouts with tools, as tests here; `test_field_index.py` lists all entries."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from environments.vsp.pruning import hopeless
from models.agent_format import CALL_CLOSE, CALL_OPEN, parse_call, write_call, write_response
from models.config import AgentConfig, RewardConfig, RolloutConfig
from models.policy import Policy, Sequence
from models.rewards import components, total
from models.rollout import RolloutRequest
from models.tokenizer import END_OF_TEXT, IM_END
from models.trajectory import Step, StopReason, Trajectory
from models.vllm_engine import VLLMEngine
from tests.models.policies import small_policy, some_prompts
from tests.models.scripted import (
    POINT,
    YES,
    Probe,
    check_trajectory,
    crop,
    gap,
    offering,
    same,
    scripted_engine,
    spelled,
    turns,
    with_tool,
)
from tools.base import Observation, Picture, ToolCall, ToolOutput
from tools.errors import ToolErrorCode
from tools.executor import ToolExecutor

AGENT = AgentConfig(max_tokens=320, max_turns=6)
PROMPT, OTHER, THIRD, FOURTH = some_prompts(4)
PROBE = write_call("t", ToolCall("PROBE"))


@pytest.fixture(scope="module")
def policy() -> Policy:
    return small_policy(agent=AGENT)


def requests(count: int, prompt: Any = PROMPT) -> list[RolloutRequest]:
    return [RolloutRequest(prompt, n, n) for n in range(count)]


def play(policy: Policy, *texts: str, prompt: Any = PROMPT, **settings: Any) -> Trajectory:
    """One episode whose turns are given."""
    engine = scripted_engine(policy, turns(policy, *texts), **settings)
    (trajectory,) = engine.sample(requests(1, prompt), 1.0)
    check_trajectory(policy, trajectory)
    return trajectory


def probing(
    policy: Policy, *texts: str, probe: Probe, agent: AgentConfig = AGENT, **settings: Any
) -> Trajectory:
    """One episode with the probe among the tools offered."""
    return play(with_tool(policy, probe.tool, agent), *texts, prompt=offering(PROMPT, probe.tool), **settings)


# --- whose tokens -------------------------------------------------------------------------------------------


def test_each_continuation_belongs_to_its_own_prefix(policy: Policy) -> None:
    """trl#6673: after the first tool results the rollouts of a prompt differ; `prompts[::n]` mixed them up."""
    boxes = [(0, 0, 64, 64), (64, 64, 128, 64), (0, 128, 64, 128), (32, 32, 192, 192)]

    def script(request: RolloutRequest) -> list[int]:
        return policy.encoder.text(crop(*boxes[request.sample]) + POINT + YES)

    trajectories = scripted_engine(policy, script, slots=3).sample(requests(4), 1.0)
    for trajectory, (_, _, width, height) in zip(trajectories, boxes, strict=True):
        check_trajectory(policy, trajectory)
        assert trajectory.stop_reason is StopReason.ANSWERED
        assert f'{{"size": [{width}, {height}]}}' in policy.encoder.decode(trajectory.ids.tolist())
        assert trajectory.pictures[1].size == (width, height)
    assert gap(policy, trajectories) < 1e-4  # a foreign prefix would give other log-probs


# --- calls that must not run --------------------------------------------------------------------------------


def test_truncated_call_is_never_executed(policy: Policy) -> None:
    """hud-python#480, hermes-agent#7680: a call cut by the token limit or by the end of the turn."""
    probe = Probe()
    length = len(with_tool(policy, probe.tool, AGENT).encoder.prompt(offering(PROMPT, probe.tool)).ids)
    for kept in range(1, len(policy.encoder.text(PROBE))):
        limited = AGENT.model_copy(update={"max_tokens": length + kept})
        trajectory = probing(policy, PROBE, probe=probe, agent=limited)
        assert trajectory.stop_reason is StopReason.MAX_TOKENS
    whole = f'<think>t</think>{CALL_OPEN}{{"name": "PROBE", "params": {{"n": 1}}}}'
    for cut in range(len("<think>t</think><tool_call>"), len(whole) + 1, 7):
        trajectory = probing(policy, whole[:cut] + IM_END, YES, probe=probe)
        assert trajectory.steps[0].observation is not None
        assert trajectory.steps[0].observation.error is ToolErrorCode.MALFORMED_CALL
    assert probe.runs == 0


@pytest.mark.parametrize(
    "arguments", ['{"n": 1', '""', '"{}"', "null", "[]", "0", "{n: 1}", "", '{"n": 1e999}']
)
@pytest.mark.parametrize("key", ["params", "arguments"])
def test_malformed_arguments_never_run_a_tool_that_needs_none(
    policy: Policy, key: str, arguments: str
) -> None:
    """hermes-agent#1796: replaced by `{}` and run anyway. vllm#19419: an empty string is no object either."""
    probe = Probe()
    call = f'<think>t</think>{CALL_OPEN}{{"name": "PROBE", "{key}": {arguments}}}{CALL_CLOSE}'
    trajectory = probing(policy, call, YES, probe=probe)
    assert probe.runs == 0
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.steps[0].observation is not None
    assert not trajectory.steps[0].observation.ok


@pytest.mark.parametrize("value", ['"\\ud800"', "1e999", "[-1e999]", '{"\\udfff": 1}'])
def test_a_call_that_cannot_be_written_down_is_an_error_not_a_crash_of_the_report(
    policy: Policy, value: str
) -> None:
    """verifiers#1763: `json.loads` takes half a character and an endless number, UTF-8 and JSON do not."""
    call = f'<think>t</think>{CALL_OPEN}{{"name": "POINT", "params": {{"target": {value}}}}}{CALL_CLOSE}'
    trajectory = play(policy, call, YES)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.steps[0].call is None
    assert trajectory.steps[0].observation is not None
    trajectory.steps[0].observation.to_json().encode()


@pytest.mark.parametrize(
    "tail", ['{"n": 1', '{"n": 1}', '{"n": 1}}}', '"{\\"n\\": 1}"', "[1]", "null", "", "1}"]
)
def test_text_around_or_instead_of_the_arguments_is_no_call(tail: str) -> None:
    """verifiers#1763, headroom#2071: cut, doubled or foreign JSON is told to the agent, never repaired."""
    whole = '{"name": "LATE", "params": ' + tail
    call, defect = parse_call(whole)
    assert call is None
    assert defect


# --- policies that misbehave --------------------------------------------------------------------------------

MISBEHAVIOUR: dict[str, tuple[list[str], StopReason]] = {
    "never ends a turn": (["a" * 700], StopReason.MAX_TOKENS),
    "calls for ever": ([POINT] * 20, StopReason.MAX_TURNS),
    "says nothing": ([IM_END] * 20, StopReason.PARSE_ERROR),
    "answers twice in one turn": (
        ["<think>t</think><response>Yes<response>No</response>", YES],
        StopReason.ANSWERED,
    ),
    "closes before it opens": (["</response>", "</tool_call>"], StopReason.PARSE_ERROR),
    "hides an answer in a JSON string": (
        [f'<think>t</think>{CALL_OPEN}{{"name": "POINT", "params": {{"target": "</response>', YES],
        StopReason.ANSWERED,
    ),
    "forges an observation": (
        ['<think>t</think><obs>{"coordinates": [1, 1]}</obs>' + POINT, YES],
        StopReason.ANSWERED,
    ),
    "nests calls": (
        [f"<think>t</think>{CALL_OPEN}{CALL_OPEN}{CALL_CLOSE}", POINT, YES],
        StopReason.ANSWERED,
    ),
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_misbehaviour_ends_with_a_reason_and_earns_no_format_reward(policy: Policy, name: str) -> None:
    """trl#4751, open-r1#418, verl's ToolAgentLoop: no crash, no endless loop, no silent end, no reward."""
    texts, reason = MISBEHAVIOUR[name]
    trajectory = play(policy, *texts)
    assert trajectory.stop_reason is reason
    assert components(trajectory.steps, trajectory.stop_reason, True)["format"] == 0
    asked = [step for step in trajectory.steps if step.response is None]
    assert all(step.observation is not None for step in asked)  # the agent is told what was wrong


def test_the_document_terminator_ends_a_turn_too(policy: Policy) -> None:
    """unsloth#6804: past it a base model invents the user's next turn, and all of that was trained on."""
    trajectory = play(policy, "<think>t</think>" + END_OF_TEXT, YES)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert len(trajectory.steps) == 2
    assert not trajectory.steps[0].well_formed


@pytest.mark.parametrize("cost_on_failures", [False, True])
def test_no_cap_flattens_the_rewards_of_a_group(cost_on_failures: bool) -> None:
    """AgenticArXiv-RL#76: a cap on the total gave all trajectories of a group 0.25, and there was nothing to learn."""
    config = RewardConfig(step_cost=0.05, repeats=0.5, cost_on_failures=cost_on_failures)

    def rewarded(level: int, correct: bool) -> float:
        call = Step("t", ToolCall("POINT", {"target": "start"}), Observation({}), None, True, level)
        steps = [*[call] * 25, Step("t", None, None, "Yes", True)]  # above every limit of the components
        return total(components(steps, StopReason.ANSWERED, correct), config)

    for correct in (False, True):
        rewards = [rewarded(level, correct) for level in range(5)]
        assert rewards == sorted(set(rewards))


# --- prompts and tools that misbehave -----------------------------------------------------------------------


def too_long() -> Any:
    return replace(PROMPT, prompt_id="long", question="is it safe? " * 300)


def test_a_prompt_that_fills_the_context_ends_alone_and_trains_no_token(policy: Policy) -> None:
    """verl's `ids[-len(mask):]` with an empty mask made the whole prompt the response; tinker-cookbook: one bad
    prompt must not sink the others."""
    engine = scripted_engine(policy, turns(policy, POINT, YES), slots=2)
    wanted = engine.sample([RolloutRequest(OTHER, 0, 5)], 1.0)
    lost, kept, lost_too = engine.sample(
        [RolloutRequest(too_long(), 0, 1), RolloutRequest(OTHER, 0, 5), RolloutRequest(too_long(), 1, 2)], 1.0
    )
    for trajectory in (lost, lost_too):
        assert trajectory.stop_reason is StopReason.MAX_TOKENS
        assert trajectory.sampled_tokens == 0
        batch = policy.collate([Sequence(trajectory.ids, trajectory.mask, trajectory.pictures)])
        assert not batch.targets.any()
    np.testing.assert_array_equal(kept.ids, wanted[0].ids)


def test_vllm_is_never_asked_to_continue_a_prompt_that_fills_the_context(policy: Policy) -> None:
    """`max_tokens` would be negative, which vLLM answers with an exception for the whole batch."""
    llm = SimpleNamespace(generate=lambda *_, **__: pytest.fail("there is nothing to sample"))
    executor = ToolExecutor(policy.encoder.registry, None, 5.0)
    engine = VLLMEngine(llm, policy.encoder, executor, AGENT, RolloutConfig(), pytest.fail)  # type: ignore[arg-type]
    (trajectory,) = engine.sample([RolloutRequest(too_long(), 0, 1)], 1.0)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS


@pytest.mark.parametrize(
    "output",
    [
        ToolOutput({"text": "\ud800"}),
        ToolOutput({}, Picture(b"no picture")),
        ToolOutput({}, Picture(PROMPT.pictures[0].png[:60])),
    ],
    ids=["half a character", "no picture", "half a picture"],
)
def test_a_tool_that_returns_rubbish_costs_a_call_not_the_batch(policy: Policy, output: ToolOutput) -> None:
    agent = AGENT.model_copy(update={"observation_pictures": ("PROBE",)})
    trajectory = probing(policy, PROBE, YES, probe=Probe(output=output), agent=agent)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.steps[0].observation is not None
    assert trajectory.steps[0].observation.error is ToolErrorCode.TOOL_CRASHED


# --- time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_hanging_call_ends_at_its_deadline(policy: Policy, overlap: bool) -> None:
    """verl#1948, ROLL#215: a tool that hangs stopped everything; here it is an observation."""
    probe = Probe(seconds=20)
    began = time.monotonic()
    trajectory = probing(policy, PROBE, YES, probe=probe, call_deadline_s=0.1, overlap_tools=overlap)
    assert time.monotonic() - began < 5
    probe.release.set()
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.steps[0].observation is not None
    assert trajectory.steps[0].observation.error is ToolErrorCode.DEADLINE


@pytest.mark.parametrize("overlap", [False, True])
def test_time_spent_in_tools_counts_towards_the_one_deadline_of_the_episode(
    policy: Policy, overlap: bool
) -> None:
    """hud-python#426, prime-rl#2360: a limit that starts anew in each phase is none."""
    probe = Probe(seconds=0.15)
    trajectory = probing(policy, *[PROBE] * 6, probe=probe, episode_deadline_s=0.2, overlap_tools=overlap)
    assert trajectory.stop_reason is StopReason.DEADLINE
    assert probe.runs <= 2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_straggler_does_not_hold_its_group(policy: Policy, overlap: bool) -> None:
    """NeMo-RL#3238, agent-lightning#218: the group comes back whole and in order, the late one with its reason."""
    probe = Probe(seconds=20)
    armed = with_tool(policy, probe.tool, AGENT)

    def script(request: RolloutRequest) -> list[int]:
        return armed.encoder.text((PROBE * 4 if request.sample == 1 else POINT) + YES)

    engine = scripted_engine(
        armed, script, call_deadline_s=0.1, episode_deadline_s=2.0, overlap_tools=overlap
    )
    trajectories = engine.sample(requests(4, offering(PROMPT, probe.tool)), 1.0)
    probe.release.set()
    assert [t.sample for t in trajectories] == [0, 1, 2, 3]
    reasons = [t.stop_reason for t in trajectories]
    assert reasons == [StopReason.ANSWERED, StopReason.TOOL_ERROR, StopReason.ANSWERED, StopReason.ANSWERED]


# --- tool calls beside the sampling -------------------------------------------------------------------------


def thoughtful(policy: Policy, calls: list[list[str]]) -> Any:
    """Each turn: three tokens of the policy's own choice in the thought, then one of its sample's calls."""

    def script(request: RolloutRequest) -> list[int | None]:
        rng, tokens = np.random.default_rng(request.seed), []
        for choices in calls:
            text = choices[int(rng.integers(len(choices)))]
            head, _, tail = text.partition("<think>")
            tokens += [*policy.encoder.text(f"{head}<think>"), None, None, None, *policy.encoder.text(tail)]
        return tokens

    return script


def many(prompts: list[Any], samples: int) -> list[RolloutRequest]:
    return [RolloutRequest(p, n, 100 * i + n) for i, p in enumerate(prompts) for n in range(samples)]


CALLS = [
    [POINT, crop(0, 0, 64, 64), crop(0, 0, 128, 64), write_call("t", ToolCall("NOPE"))],
    [
        POINT,
        crop(64, 0, 64, 128),
        write_call("t", ToolCall("DRAW2DPATH", {"start": [32, 32], "directions": "R"})),
    ],
    [YES, write_response("it meets a hole", "No")],
]


def test_trajectories_are_the_same_with_and_without_the_tool_cache_and_beside_the_sampling(
    policy: Policy,
) -> None:
    script = thoughtful(policy, CALLS)
    asked = many([PROMPT, OTHER, THIRD], 4)
    wanted = scripted_engine(policy, script, cached=False).sample(asked, 1.0)
    assert {t.stop_reason for t in wanted} == {StopReason.ANSWERED}
    assert len({t.ids.tobytes() for t in wanted}) == len(asked)
    for settings in ({"cached": True}, {"overlap_tools": True}, {"overlap_tools": True, "slots": 3}):
        engine = scripted_engine(policy, script, **settings)  # type: ignore[arg-type]
        trajectories = engine.sample(asked, 1.0)
        same(trajectories, wanted)
    assert gap(policy, trajectories) < 1e-4


def test_slow_tools_beside_the_sampling_take_half_the_time_or_less(policy: Policy) -> None:
    """Sixteen episodes with three calls of 50 ms each: 2.4 s one after the other."""
    probe = Probe(seconds=0.05)
    armed = with_tool(policy, probe.tool, AGENT)
    asked = requests(16, offering(PROMPT, probe.tool))
    seconds = {}
    for overlap in (False, True):
        engine = scripted_engine(armed, turns(armed, PROBE, PROBE, PROBE, YES), overlap_tools=overlap)
        began = time.monotonic()
        trajectories = engine.sample(asked, 1.0)
        seconds[overlap] = time.monotonic() - began
        assert {t.stop_reason for t in trajectories} == {StopReason.ANSWERED}
    assert seconds[False] >= 2 * seconds[True]


# --- pruning ------------------------------------------------------------------------------------------------


def pruning(policy: Policy, prune: str, *texts: str, overlap: bool = False) -> Trajectory:
    agent = AgentConfig.model_validate({**AGENT.model_dump(), "prune": prune})
    registry = policy.encoder.registry
    strict = with_tool(policy, Probe().tool, agent)
    assert registry.names == strict.encoder.registry.names[:-1]
    return play(strict, *texts, hopeless=hopeless, overlap_tools=overlap)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pruned_trajectory_earns_no_format_reward_and_keeps_its_masks(
    policy: Policy, overlap: bool
) -> None:
    wrong = write_call("t", ToolCall("POINT", {"target": "moon"}))
    assert pruning(policy, "never", wrong, wrong, YES).stop_reason is StopReason.ANSWERED
    trajectory = pruning(policy, "fatal", wrong, wrong, YES, overlap=overlap)
    assert trajectory.stop_reason is StopReason.PRUNED
    assert len(trajectory.steps) == 2
    assert policy.encoder.decode(trajectory.ids[trajectory.mask].tolist()) == wrong + wrong
    values = components(trajectory.steps, trajectory.stop_reason, True)
    assert values["format"] == 0
    assert values["accuracy"] == 0
    assert total(values, RewardConfig()) == 0


def test_a_rule_that_is_asked_for_and_missing_is_refused_before_anything_is_sampled(policy: Policy) -> None:
    agent = AgentConfig.model_validate({**AGENT.model_dump(), "prune": "fatal"})
    with pytest.raises(ValueError, match=r"agent\.prune"):
        scripted_engine(with_tool(policy, Probe().tool, agent), turns(policy, YES))


def test_markers_that_are_only_spelled_end_no_turn(policy: Policy) -> None:
    """The end of a turn is a token, not a text, where the tokenizer has one for it."""
    ids = [
        *policy.encoder.text("<think>"),
        *spelled(policy.encoder, CALL_CLOSE),
        *policy.encoder.text(YES[7:]),
    ]
    (trajectory,) = scripted_engine(policy, lambda request: ids).sample(requests(1), 1.0)
    assert len(trajectory.steps) == 1
    assert not trajectory.steps[0].well_formed
