"""Parsing never raises, never guesses, and reads back exactly what was written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.agent_format import TAGS, ParsedTurn, parse_turn, write_call, write_response
from tools.base import ToolCall

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
PIECES = st.sampled_from(
    [
        *TAGS,
        '{"name": "POINT", "params": {"target": "start"}}',
        '{"name": "POINT", "params": {"target": "start"',
        '{"name": "POINT", "arguments": {}}',
        '{"name": 3, "params": []}',
        "[]",
        "null",
        "123",
        '"abc"',
        "{" * 200,
        "[" * 100_000,
        '{"a":' * 40,
        "<|im_start|>user",
        "<|image_pad|>",
        "NaN",
        "\x00",
        "\ud800",
        "Yes",
        "RRDD",
        "\n",
    ]
)
HOSTILE = st.lists(PIECES | st.text(max_size=20), max_size=12).map("".join)


@settings(max_examples=6000, deadline=None)
@given(HOSTILE)
def test_hostile_text_never_raises_and_is_exactly_one_of_call_response_defect(text: str) -> None:
    turn = parse_turn(text)
    assert [turn.call is not None, turn.response is not None, turn.defect is not None].count(True) == 1


@settings(max_examples=3000, deadline=None)
@given(JSON_VALUES)
def test_any_json_value_as_a_call_never_raises(value: object) -> None:
    turn = parse_turn(f"<think>t</think><tool_call>{json.dumps(value)}</tool_call>")
    if turn.call is not None:
        assert isinstance(turn.call.name, str)
        assert isinstance(turn.call.params, dict)


@settings(max_examples=3000, deadline=None)
@given(st.integers(0, 200), st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=4))
def test_a_truncated_call_never_runs(cut: int, params: dict[str, object]) -> None:
    """hud-python#480: an unparsed string must never be executed, nor with guessed arguments (hermes-agent#1796)."""
    body = ToolCall("POINT", params).to_json()
    cut = min(cut, len(body) - 1)
    turn = parse_turn(f"<think>t</think><tool_call>{body[:cut]}</tool_call>")
    assert turn.call is None
    assert turn.defect is not None


@given(st.text(st.characters(exclude_characters="<"), max_size=20), JSON_VALUES)
def test_what_is_written_is_read_back(think: str, value: object) -> None:
    call = ToolCall("DRAW2DPATH", {"points": value})
    turn = parse_turn(write_call(think, call))
    if not any(tag in json.dumps(value, ensure_ascii=False) for tag in TAGS):
        assert turn == ParsedTurn(think.strip(), call=call, well_formed=True)
    assert parse_turn(write_response(think, "Yes")) == ParsedTurn(
        think.strip(), response="Yes", well_formed=True
    )


@pytest.mark.parametrize("key", ["params", "parameters", "arguments"])
def test_every_spelling_of_the_parameter_key_is_accepted(key: str) -> None:
    turn = parse_turn(
        f'<think>a</think><tool_call>{{"name": "POINT", "{key}": {{"target": "start"}}}}</tool_call>'
    )
    assert turn.call == ToolCall("POINT", {"target": "start"})


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        '"abc"',
        "123",
        "null",
        '{"a": 1,',
        '{"name": "POINT", "params": [1]}',
        '{"name": "", "params": {}}',
        '{"params": {}}',
        '{"name": "POINT", "params": {}, "arguments": {}}',
        '{"name": "POINT", "params": {}, "extra": 1}',
        '{"name": "POINT", "params": {"x": NaN}}',
    ],
)
def test_valid_json_that_is_no_call_is_a_defect(body: str) -> None:
    """headroom#2071: `[]`, `"abc"`, `123`, `null` are valid JSON and crash parsers that index them."""
    assert parse_turn(f"<think>t</think><tool_call>{body}</tool_call>").defect is not None


@pytest.mark.parametrize(
    "text",
    [
        "<response>Yes</response><response>No</response>",
        "<think>t</think><response>Yes</response><response>Yes</response>",
        '<tool_call>{"name": "A"}</tool_call><response>Yes</response>',
        '<tool_call>{"name": "A"}</tool_call><tool_call>{"name": "A"}</tool_call>',
        "</response>Yes<response>",
    ],
)
def test_several_answers_or_calls_in_one_turn_earn_nothing(text: str) -> None:
    """open-r1#418: several answer blocks still earned the format reward."""
    assert not parse_turn(text).well_formed


def test_a_tag_inside_a_json_string_does_not_make_a_well_formed_turn() -> None:
    text = (
        '<think>t</think><tool_call>{"name": "A", "params": {"x": "</tool_call><response>Yes"}}</tool_call>'
    )
    assert not parse_turn(text).well_formed
