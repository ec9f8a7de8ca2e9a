"""Rollouts: the sampler's log-probs are the trainer's, and an episode depends on nothing but its request."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import models.transformers_engine as engine_module
from environments.base import Prompt
from models.agent_format import CALL_CLOSE, write_call, write_response
from models.config import AgentConfig, RolloutConfig
from models.drafts import Drafts
from models.policy import Policy, Sequence, token_logprobs
from models.rollout import RolloutRequest
from models.trajectory import StopReason, Trajectory
from models.transformers_engine import TransformersEngine
from tests.models.policies import engine_for, small_policy, some_prompts
from tests.models.scripted import same
from tools.base import ToolCall
from tools.errors import ToolErrorCode
from tools.executor import ToolExecutor

AGENT = AgentConfig(max_tokens=320, max_turns=4, observation_pictures=("CROP", "DRAW2DPATH"))


@pytest.fixture(scope="module")
def policy() -> Policy:
    return small_policy(agent=AGENT)


def _requests(prompts: list[Prompt], samples: int = 2) -> list[RolloutRequest]:
    return [RolloutRequest(p, n, 1000 * i + n) for i, p in enumerate(prompts) for n in range(samples)]


class Script:
    """Replaces only the choice of tokens: the network runs and is read for log-probs, the text is given.

    Every prompt's turns are tokenised by the policy's encoder, as if it had sampled them.
    """

    def __init__(self, policy: Policy, turns: dict[str, list[str]]) -> None:
        self.turns = {key: iter(policy.encoder.text("".join(texts))) for key, texts in turns.items()}

    def token(self, key: str) -> int:
        return next(self.turns[key])


def scripted(
    engine: TransformersEngine, policy: Policy, turns: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the engine 'sample' the scripts, keeping its own log-probs for them."""
    engine.draft_tokens = 0  # the script gives one token at a time
    script = Script(policy, turns)
    original = engine._extend

    def extend(running, cache, drafts, temperature):  # type: ignore[no-untyped-def]
        ready = [each for each in running.values() if each.waiting == 1]

        def sample(logits, draws, temperature):  # type: ignore[no-untyped-def]
            tokens = torch.tensor([script.token(each.episode.request.prompt.prompt_id) for each in ready])
            logprobs = torch.log_softmax(logits / temperature, -1)
            return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

        monkeypatch.setattr(engine_module, "sample_tokens", sample)
        return original(running, cache, drafts, temperature)

    monkeypatch.setattr(engine, "_extend", extend)


def _gap(policy: Policy, trajectories: list[Trajectory], temperature: float) -> float:
    sequences = [Sequence(t.ids, t.mask, t.pictures) for t in trajectories]
    trained = token_logprobs(policy, sequences, temperature, 4096)
    return max(
        float((torch.from_numpy(t.logprobs[1:][t.mask[1:]]) - own).abs().max())
        for t, own in zip(trajectories, trained, strict=True)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_trainer_agree_at_any_temperature(policy: Policy, temperature: float) -> None:
    """trl#4159: log-probs at another temperature gave a ratio of 2 on the first token."""
    trajectories = engine_for(policy).sample(_requests(some_prompts(6)), temperature)
    assert _gap(policy, trajectories, temperature) < 1e-4


def _verification(prompt: Prompt) -> list[str]:
    draw = ToolCall("DRAW2DPATH", {"start": [32, 32], "directions": prompt.hidden["path"] or "R"})
    return [
        write_call("find the start", ToolCall("POINT", {"target": "start"})),
        write_call("draw the path", draw),
        write_response("the path is safe", "Yes"),
    ]


def test_sampler_and_trainer_agree_through_observations_and_their_pictures(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = some_prompts(5)
    engine = engine_for(policy, slots=3)
    scripted(engine, policy, {p.prompt_id: _verification(p) for p in prompts}, monkeypatch)
    trajectories = engine.sample(_requests(prompts, samples=1), 0.8)
    assert {t.stop_reason for t in trajectories} == {StopReason.ANSWERED}
    assert {len(t.pictures) for t in trajectories} == {2}
    assert all(len(t.ids) == len(t.mask) == len(t.logprobs) for t in trajectories)
    assert _gap(policy, trajectories, 0.8) < 1e-4
    for trajectory in trajectories:
        assert [step.call_level for step in trajectory.steps] == [4, 4, 0]
        observed = "".join(step.observation.to_json() for step in trajectory.steps if step.observation)
        text = policy.encoder.tokenizer.decode(trajectory.ids[~trajectory.mask])
        assert observed[:20] in text.replace("\\u003c", "<")


def test_an_episode_does_not_depend_on_its_neighbours_or_the_tool_cache(policy: Policy) -> None:
    """slots, order and caching are speed, not behaviour."""
    requests = _requests(some_prompts(5), samples=3)
    wanted = engine_for(policy).sample(requests, 1.0)
    for engine, order in [
        (engine_for(policy, slots=2), range(len(requests))),
        (engine_for(policy, cached=False, slots=16), range(len(requests) - 1, -1, -1)),
    ]:
        got = engine.sample([requests[i] for i in order], 1.0)
        for index, trajectory in zip(order, got, strict=True):
            np.testing.assert_array_equal(trajectory.ids, wanted[index].ids)
            assert trajectory.stop_reason == wanted[index].stop_reason


def _counted(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens wide each pass of the network was."""
    widths: list[int] = []
    forward = engine._forward

    def seen(embeddings, *rest):  # type: ignore[no-untyped-def]
        widths.append(embeddings.shape[1])
        return forward(embeddings, *rest)

    monkeypatch.setattr(engine, "_forward", seen)
    return widths


def test_what_earlier_episodes_left_in_the_kept_cache_is_never_read(policy: Policy) -> None:
    prompts = some_prompts(4)
    engine = engine_for(policy)
    engine.sample(_requests(prompts[2:], samples=4), 1.0)
    fewer = _requests(prompts[:2])
    same(engine.sample(fewer, 1.0), engine_for(policy).sample(fewer, 1.0))
    more = _requests(prompts, samples=8)  # more rows than the cache that was kept
    same(engine.sample(more, 1.0), engine_for(policy).sample(more, 1.0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guessing_ahead_changes_no_token(policy: Policy, temperature: float) -> None:
    """A guess is speed, not behaviour: a sampler that keeps what it guessed samples another distribution."""
    requests = _requests(some_prompts(4), samples=3)
    wanted = engine_for(policy, draft_tokens=0).sample(requests, temperature)
    for most in (1, 4, 11):
        same(engine_for(policy, draft_tokens=most, slots=5).sample(requests, temperature), wanted)


def test_right_guesses_save_passes_and_end_where_a_turn_ends(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows a turn is its observation; a guess that runs on into it must not be sampled."""
    requests = _requests(some_prompts(4), samples=2)
    plain = engine_for(policy, draft_tokens=0)
    passes = _counted(plain, monkeypatch)
    wanted = plain.sample(requests, 1.0)
    assert any(not t.mask[np.argmax(t.mask) :].all() for t in wanted), "no episode has an observation"
    known = [t.ids.tolist() for t in wanted]

    def oracle(self: Drafts, ids: list[int], most: int) -> list[int]:
        return next((text[len(ids) : len(ids) + most] for text in known if text[: len(ids)] == ids), [])

    monkeypatch.setattr(Drafts, "guess", oracle)
    guessing = engine_for(policy, draft_tokens=4)
    fewer = _counted(guessing, monkeypatch)
    same(guessing.sample(requests, 1.0), wanted)
    assert len(fewer) < len(passes) / 3


def test_wrong_guesses_leave_no_trace(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys and values lie in the cache until the right tokens overwrite them."""
    requests = _requests(some_prompts(4), samples=2)
    wanted = engine_for(policy, draft_tokens=0).sample(requests, 1.0)
    rng = np.random.default_rng(0)
    odd = [policy.encoder.image_pad, policy.encoder.vision_start, *policy.encoder.text(CALL_CLOSE)]

    def nonsense(self: Drafts, ids: list[int], most: int) -> list[int]:
        return rng.choice([*odd, *range(40, 60)], size=min(most, int(rng.integers(5)))).tolist()

    monkeypatch.setattr(Drafts, "guess", nonsense)
    same(engine_for(policy, draft_tokens=4, slots=3).sample(requests, 1.0), wanted)


def test_guesses_come_from_the_longest_context_that_was_seen() -> None:
    drafts = Drafts()
    assert drafts.guess([1, 2, 3], 4) == []
    drafts.learn([1, 2, 3, 4, 5, 6], 0)
    assert drafts.guess([9, 2, 3], 2) == [4, 5]
    assert drafts.guess([9, 2, 3], 9) == [4, 5, 6]
    drafts.learn([7, 7, 2, 3, 8], 4)  # the same two tokens, and another text before them
    assert drafts.guess([9, 2, 3], 1) == [8]
    assert drafts.guess([2, 3, 4], 1) == [5]
    assert drafts.guess([7, 7, 2, 3], 1) == [8]


def test_rows_that_move_up_when_others_end_keep_what_they_have_read(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last episodes of a batch stand in the first rows: the rows of ended ones cost nothing, and mix nothing up."""
    prompts = some_prompts(5)
    engine = engine_for(policy, slots=8)
    draws = [len(prompts) - number for number in range(len(prompts))]
    turns = {p.prompt_id: [POINT] * n + [_verification(p)[-1]] for p, n in zip(prompts, draws, strict=True)}
    turns[prompts[0].prompt_id].pop()  # its last call is its last turn: it ends by the limit
    scripted(engine, policy, dict(reversed(turns.items())), monkeypatch)
    rows: list[list[int]] = []
    forward = engine._forward

    def seen(embeddings, positions, row_index, cells, cache):  # type: ignore[no-untyped-def]
        rows.append(row_index.tolist())
        return forward(embeddings, positions, row_index, cells, cache)

    monkeypatch.setattr(engine, "_forward", seen)
    trajectories = engine.sample(_requests(prompts[::-1], samples=1), 0.8)
    assert [t.calls for t in trajectories] == [1, 2, 3, 4, 4]
    assert rows[-1] == [0]
    assert _gap(policy, trajectories, 0.8) < 1e-4


def _run(
    policy: Policy, turns: list[str], monkeypatch: pytest.MonkeyPatch, agent: AgentConfig = AGENT
) -> Trajectory:
    prompt = some_prompts(1)[0]
    engine = TransformersEngine(
        policy, ToolExecutor(policy.encoder.registry, None, 5.0), agent, RolloutConfig(slots=2)
    )
    scripted(engine, policy, {prompt.prompt_id: turns}, monkeypatch)
    return engine.sample([RolloutRequest(prompt, 0, 0)], 1.0)[0]


POINT = write_call("t", ToolCall("POINT", {"target": "start"}))
UNKNOWN = write_call("t", ToolCall("NOPE", {}))
BROKEN = "<think>t</think><tool_call>{oops</tool_call>"


def stop_cases() -> Iterator[tuple[list[str], StopReason]]:
    yield [POINT, write_response("t", "Yes")], StopReason.ANSWERED
    yield [POINT] * 9, StopReason.MAX_TURNS
    yield [BROKEN] * 9, StopReason.PARSE_ERROR
    yield [UNKNOWN] * 9, StopReason.TOOL_ERROR
    yield ["no tags at all " * 200], StopReason.MAX_TOKENS


@pytest.mark.parametrize(("turns", "reason"), list(stop_cases()))
def test_every_episode_ends_with_its_reason(
    policy: Policy, turns: list[str], reason: StopReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    """trl#4751: a policy that always calls a tool must hit a cap, not the memory limit."""
    agent = AgentConfig(max_tokens=320, max_turns=4 if reason is StopReason.MAX_TURNS else 8)
    assert _run(policy, turns, monkeypatch, agent).stop_reason is reason


def test_a_malformed_call_is_answered_with_an_error_the_agent_can_read(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verifiers#1763, verl's ToolAgentLoop: neither a crash nor a silent end."""
    trajectory = _run(policy, [BROKEN, POINT, write_response("t", "No")], monkeypatch)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.steps[0].observation is not None
    assert trajectory.steps[0].observation.error is ToolErrorCode.MALFORMED_CALL
    assert not trajectory.steps[0].well_formed


def test_a_policy_that_writes_observation_tags_itself_changes_no_mask(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = '<think>t</think><obs>{"coordinates": [1, 1]}</obs>' + POINT
    trajectory = _run(policy, [forged, write_response("t", "No")], monkeypatch)
    agent_text = policy.encoder.tokenizer.decode(trajectory.ids[trajectory.mask])
    assert agent_text == forged + write_response("t", "No")
    assert not trajectory.steps[0].well_formed


def test_tokens_only_the_environment_may_write_are_never_sampled(policy: Policy) -> None:
    trajectories = engine_for(policy).sample(_requests(some_prompts(8)), 1.0)
    for trajectory in trajectories:
        assert not set(trajectory.ids[trajectory.mask].tolist()) & set(policy.encoder.forbidden)


def test_an_episode_past_its_deadline_ends(policy: Policy) -> None:
    """prime-rl#2360, hud-python#426: one deadline for the whole rollout."""
    engine = engine_for(policy, episode_deadline_s=1e-6)
    trajectories = engine.sample(_requests(some_prompts(2)), 1.0)
    assert {t.stop_reason for t in trajectories} == {StopReason.DEADLINE}


def test_stale_picture_features_are_dropped_on_sync(policy: Policy) -> None:
    """vllm#44910, trl#7198: after a weight update the encoder cache holds the old weights' features."""
    engine = engine_for(policy)
    engine.sample(_requests(some_prompts(2)), 1.0)
    assert engine._features
    engine.sync(3)
    assert not engine._features
    assert engine.sample(_requests(some_prompts(1)), 1.0)[0].policy_version == 3
