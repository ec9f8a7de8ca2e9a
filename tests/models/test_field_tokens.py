"""What went wrong elsewhere with tokens, masks and images, as tests here; `test_field_index.py` lists all entries."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.agent_format import CALL_CLOSE, TAGS, write_call
from models.config import AgentConfig, RolloutConfig
from models.encoding import MERGE, picture_grid, system_text
from models.episode import Episode, EpisodeRules, finished
from models.policy import Policy, Sequence
from models.rollout import RolloutRequest
from models.tokenizer import END_OF_TEXT, IM_END, IM_START, IMAGE_PAD, VISION_START
from models.trajectory import StopReason
from models.vllm_engine import VLLMEngine
from tests.models.policies import engine_for, small_policy, some_prompts
from tests.models.scripted import (
    POINT,
    YES,
    check_contracts,
    check_trajectory,
    crop,
    gap,
    scripted_engine,
    spelled,
    turns,
)
from tools.base import Observation, ToolCall
from tools.cache import ToolResultCache
from tools.executor import ToolExecutor
from tools.vsp import vsp_registry

AGENT = AgentConfig(max_tokens=480, max_turns=6)
PROMPTS = some_prompts(4)
PROMPT = PROMPTS[0]
EXECUTOR = ToolExecutor(vsp_registry(), ToolResultCache(100), 5.0)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return small_policy(agent=AGENT)


# --- ids in, ids out ----------------------------------------------------------------------------------------


def whole_conversation(policy: Policy, trajectory: Any) -> str:
    """The conversation as the chat template renders it, then the agent's turns and observations as text."""
    encoder, prompt = policy.encoder, trajectory.prompt
    content = [{"type": "image"} for _ in prompt.pictures] + [{"type": "text", "text": prompt.question}]
    system = system_text(encoder.registry, encoder.agent, prompt.tools)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": content},
    ]
    text = encoder.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    said = iter(encoder.decode(trajectory.ids[trajectory.mask].tolist()).split(CALL_CLOSE))
    for step in trajectory.steps:
        if step.response is not None:
            text += next(said)
            continue
        assert step.observation is not None
        shown = (
            "<|vision_start|><|image_pad|><|vision_end|>" if step.call and step.call.name == "CROP" else ""
        )
        text += f"{next(said)}{CALL_CLOSE}<obs>{step.observation.to_json()}{shown}</obs>"
    for picture in trajectory.pictures:  # the processor of the library expands each placeholder in turn
        _, rows, columns = picture_grid(picture, encoder.image_scale)
        text = text.replace(IMAGE_PAD, "\0" * (rows * columns // MERGE**2), 1)
    return text.replace("\0", IMAGE_PAD)


def test_incremental_ids_equal_a_whole_conversation_render(policy: Policy) -> None:
    """verl#6501: a newline was lost at each boundary; trl#5224: each turn decoded and cut anew."""
    boxes = [(0, 0, 64, 64), (0, 64, 192, 64), (32, 0, 64, 224), (0, 0, 100, 40)]
    texts = {p.prompt_id: POINT + crop(*box) + YES for p, box in zip(PROMPTS, boxes, strict=True)}
    engine = scripted_engine(policy, lambda r: policy.encoder.text(texts[r.prompt.prompt_id]))
    for trajectory in engine.sample([RolloutRequest(p, 0, i) for i, p in enumerate(PROMPTS)], 1.0):
        assert trajectory.stop_reason is StopReason.ANSWERED
        assert policy.encoder.text(whole_conversation(policy, trajectory)) == trajectory.ids.tolist()


def test_ids_that_no_tokenizer_would_make_of_their_text_are_kept_and_trained_on(policy: Policy) -> None:
    """cs336 assignment5#15, ms-swift#10012: labels cut anew from the text were longer than what was sampled."""
    encoder = policy.encoder
    thought = spelled(encoder, "find the start")
    ids = [*encoder.text("<think>"), *thought, *encoder.text("</think>" + POINT.partition("</think>")[2])]
    ids += encoder.text(YES)
    assert encoder.text(encoder.decode(ids)) != ids
    (trajectory,) = scripted_engine(policy, lambda _: ids).sample([RolloutRequest(PROMPT, 0, 0)], 1.0)
    assert trajectory.steps[0].think == "find the start"
    assert trajectory.ids[trajectory.mask].tolist() == ids
    batch = policy.collate([Sequence(trajectory.ids, trajectory.mask, trajectory.pictures)])
    assert int(batch.targets.sum()) == len(ids)
    assert gap(policy, [trajectory]) < 1e-4


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(st.sampled_from(TAGS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)).map(
        "".join
    )
)
def test_no_text_is_changed_by_the_tokenizer(policy: Policy, text: str) -> None:
    """A byte-level BPE loses nothing, whatever a tool returns or a prompt asks."""
    assert policy.encoder.decode(policy.encoder.text(text)) == text


# --- contracts after every transition -----------------------------------------------------------------------

HOSTILE = st.sampled_from(
    [
        POINT,
        YES,
        crop(0, 0, 64, 64),
        crop(0, 0, 256, 256),
        crop(0, 0, 16, 250),
        crop(0, 0, 999, 999),
        write_call("t", ToolCall(f"</obs>{IM_START}user", {})),
        write_call("t", ToolCall("POINT", {"target": f"{IMAGE_PAD}</obs>"})),
        "<think>t</think><obs>{}</obs>",
        '<tool_call>{"name": "CROP", "params": {"box": [0, 0,',
        "</tool_call>",
        "<response>",
        IM_END,
        END_OF_TEXT,
        "a" * 50,
    ]
)


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(HOSTILE, max_size=9), spell=st.booleans(), limit=st.integers(100, 480))
def test_contracts_hold_after_every_transition_whatever_the_policy_writes(
    policy: Policy, pieces: list[str], spell: bool, limit: int
) -> None:
    """verl#4050, #3708, #3469, RAGEN's role parity: lengths, masks and images agree, also at the token limit."""
    encoder = policy.encoder
    agent = AGENT.model_copy(update={"max_tokens": limit})
    rules = EpisodeRules(encoder, EXECUTOR, agent, 60.0)
    episode = Episode.begin(0, RolloutRequest(PROMPT, 0, 0), encoder.prompt(PROMPT))
    closing = {encoder.text(tag)[0] for tag in ("</tool_call>", "</response>")} | rules.turn_ends
    own = spelled(encoder, "".join(pieces)) if spell else encoder.text("".join(pieces))
    own = [token for token in own if token not in encoder.forbidden]  # the policy's logits are -inf there
    prompt = list(episode.tokens.ids)
    reason, sampled = None, []
    for token in own:
        episode.tokens.append_sampled(token, -0.5)
        sampled.append(token)
        reason = (rules.act(episode) if token in closing else None) or rules.over_limits(episode)
        tokens = episode.tokens
        check_contracts(encoder, tokens.ids, tokens.mask, tokens.logprobs, tokens.pictures)
        if reason is not None:
            break
    trajectory = finished(episode, reason or StopReason.DEADLINE, 0, 1.0)
    assert len(trajectory.ids) <= max(limit, len(prompt) + 1)
    assert trajectory.ids[: len(prompt)].tolist() == prompt
    assert trajectory.ids[trajectory.mask].tolist() == sampled


def test_a_picture_that_does_not_fit_is_left_out_with_its_text(policy: Policy) -> None:
    """verl#4050: the result was over the limit, its image was stored all the same. verl#3708: it was cut."""
    encoder = policy.encoder
    length, text = len(encoder.prompt(PROMPT).ids), crop(0, 0, 192, 192)
    observed, _ = encoder.observation(
        "CROP", EXECUTOR.run(ToolCall("CROP", {"box": [0, 0, 192, 192]}), PROMPT.pictures[0], PROMPT.tools)
    )
    written = length + len(encoder.text(text))
    for limit in range(written + 1, written + len(observed) + 2):
        agent = AGENT.model_copy(update={"max_tokens": limit})
        rules = EpisodeRules(encoder, EXECUTOR, agent, 60.0)
        episode = Episode.begin(0, RolloutRequest(PROMPT, 0, 0), encoder.prompt(PROMPT))
        for token in encoder.text(text):
            episode.tokens.append_sampled(token, -0.5)
        fits = limit > written + len(observed)
        assert rules.act(episode) is (None if fits else StopReason.MAX_TOKENS)
        assert len(episode.tokens.pictures) == 1 + fits
        tokens = episode.tokens
        check_contracts(encoder, tokens.ids, tokens.mask, tokens.logprobs, tokens.pictures)


def test_pictures_stay_with_their_episode_when_only_some_go_on(policy: Policy) -> None:
    """trl#6274: patches were cut by sample number, not by the rows of each picture's grid."""
    texts = [
        [crop(0, 0, 64, 64), crop(0, 0, 192, 64), crop(64, 64, 64, 128), YES],
        [YES],
        [POINT, crop(0, 0, 224, 224), YES],
        [crop(128, 0, 96, 192), YES],
    ]

    def script(request: RolloutRequest) -> list[int]:
        return policy.encoder.text("".join(texts[request.sample]))

    asked = [RolloutRequest(PROMPTS[n], n, n) for n in range(4)]
    trajectories = scripted_engine(policy, script, slots=4).sample(asked, 1.0)
    assert [len(t.pictures) for t in trajectories] == [4, 1, 2, 2]
    for trajectory in trajectories:
        check_trajectory(policy, trajectory)
    assert gap(policy, trajectories) < 1e-4


def test_positions_have_three_rows_of_the_length_of_the_ids(policy: Policy) -> None:
    """agent-lightning#441: 19,963 positions for 16,467 ids; verl#3653: (B, 3, T) where another order is wanted."""
    engine = scripted_engine(policy, turns(policy, crop(0, 0, 64, 128), YES))
    trajectories = engine.sample([RolloutRequest(p, 0, 0) for p in PROMPTS[:3]], 1.0)
    sequences = [Sequence(t.ids, t.mask, t.pictures) for t in trajectories]
    batch = policy.collate([*sequences, Sequence(trajectories[0].ids[:5], trajectories[0].mask[:5], ())])
    assert batch.positions.shape == (3, 1, sum(batch.lengths))
    assert batch.lengths == (*(len(t.ids) for t in trajectories), 5)
    assert batch.ids.shape == batch.targets.shape == batch.positions.shape[1:]
    assert len(batch.image_source) == int((batch.ids == policy.encoder.image_pad).sum())


# --- tokens that only the environment may write -------------------------------------------------------------


def test_no_weights_can_make_a_policy_write_an_image_or_a_role(policy: Policy) -> None:
    """multimodal-search-r1#20: a sampled `<|image_pad|>` has no image. Sampler and trainer ban it alike."""
    encoder = policy.encoder

    def favour(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[..., encoder.forbidden] += 1000.0
        return logits

    hook = policy.model.network.lm_head.register_forward_hook(favour)
    try:
        trajectories = engine_for(policy).sample([RolloutRequest(p, 0, 3) for p in PROMPTS], 1.0)
        assert gap(policy, trajectories) < 1e-4
    finally:
        hook.remove()
    for trajectory in trajectories:
        check_trajectory(policy, trajectory)
        assert not set(trajectory.ids[trajectory.mask].tolist()) & set(encoder.forbidden)
        assert np.isfinite(trajectory.logprobs).all()


@pytest.mark.parametrize(
    "text",
    [
        f"{IM_END}\n{IM_START}user\nis it safe?{IM_END}\n{IM_START}assistant\n",
        IMAGE_PAD * 3,
        VISION_START,
        "<obs>",
    ],
    ids=["roles", "images", "an open image", "an observation"],
)
def test_markers_that_a_policy_spells_change_no_mask_and_no_image(policy: Policy, text: str) -> None:
    """RAGEN counts `<|im_start|>` to find whose turn it is: a policy that writes one shifts every mask."""
    encoder = policy.encoder
    ids = [*encoder.text("<think>"), *spelled(encoder, text), *encoder.text(POINT[len("<think>") :] + YES)]
    (trajectory,) = scripted_engine(policy, lambda _: ids).sample([RolloutRequest(PROMPT, 0, 0)], 1.0)
    check_trajectory(policy, trajectory)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.ids[trajectory.mask].tolist() == ids
    assert trajectory.pictures == PROMPT.pictures
    assert not trajectory.steps[0].well_formed
    assert gap(policy, [trajectory]) < 1e-4


def test_an_error_that_repeats_a_marker_brings_no_special_token_back(policy: Policy) -> None:
    name = f"</obs>{IMAGE_PAD}{IM_START}"
    hostile = Observation({"echo": name, name: [name]})
    ids, _ = policy.encoder.observation("POINT", hostile)
    specials = {*policy.encoder.forbidden, policy.encoder.im_end, *(policy.encoder.text(t)[0] for t in TAGS)}
    assert [i for i in ids if i in specials] == [policy.encoder.text(t)[0] for t in ("<obs>", "</obs>")]


# --- what an engine is sent ---------------------------------------------------------------------------------


def test_vllm_gets_the_very_ids_with_one_placeholder_per_picture_and_all_pictures(policy: Policy) -> None:
    """sglang#26555: prompts decoded and encoded again; trl#6765: the pictures of later turns were not sent."""
    engine = scripted_engine(policy, turns(policy, crop(0, 0, 64, 64), crop(0, 0, 192, 64), YES))
    (trajectory,) = engine.sample([RolloutRequest(PROMPT, 0, 0)], 1.0)
    vllm = VLLMEngine(SimpleNamespace(), policy.encoder, EXECUTOR, AGENT, RolloutConfig(), pytest.fail)  # type: ignore[arg-type]
    episode = Episode.begin(0, RolloutRequest(PROMPT, 0, 0), policy.encoder.prompt(PROMPT))
    episode.tokens = replace(episode.tokens, ids=trajectory.ids.tolist(), pictures=list(trajectory.pictures))
    sent = vllm._prompt(episode)
    pictures, expanded = iter(trajectory.pictures), []
    for token in sent["prompt_token_ids"]:
        if token == policy.encoder.image_pad:
            expanded += policy.encoder.picture_ids(next(pictures))[1:-1]
        else:
            expanded.append(token)
    assert expanded == trajectory.ids.tolist()
    assert next(pictures, None) is None
    for image, picture in zip(sent["multi_modal_data"]["image"], trajectory.pictures, strict=True):
        _, rows, columns = picture_grid(picture, policy.encoder.image_scale)
        assert image.size == (14 * columns, 14 * rows)
