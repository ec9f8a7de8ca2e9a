"""Reward components reach their bounds and cannot be farmed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.config import RewardConfig
from models.rewards import BOUNDS, components, largest_rise, total, turn_rewards
from models.trajectory import Step, StopReason
from tools.base import Observation, ToolCall
from tools.errors import ToolErrorCode

CONFIG = RewardConfig(lambda_tool=2.0, lambda_acc=1.0)
HYBRID = RewardConfig(utilisation=0.1, turning_points=0.1, exploration=0.1, repeats=0.2, step_cost=0.02)
OFFERED = ("POINT", "DRAW2DPATH", "CROP")


def _call(level: int = 4, well_formed: bool = True, name: str = "POINT", **params: object) -> Step:
    return Step("t", ToolCall(name, params), Observation({"coordinates": [32, 96]}), None, well_formed, level)


def _answer(text: str = "Yes", well_formed: bool = True) -> Step:
    return Step("t", None, None, text, well_formed)


def _scored(
    steps: Sequence[Step], correct: bool = True, potentials: Sequence[float] = ()
) -> dict[str, float]:
    return components(steps, StopReason.ANSWERED, correct, OFFERED, potentials)


def test_every_component_reaches_both_of_its_bounds() -> None:
    """VisTA#3: a format reward that was 0 for ever because its valid branch was never reached."""
    start = _call(name="POINT", target="start")
    drawn = _call(name="DRAW2DPATH", start=[32, 96], directions="RR")
    cropped = _call(name="CROP", box=[32, 96, 64, 128])
    spam = [_call(0, False)] * 25
    cases = [
        _scored([start, cropped, drawn, _answer()], potentials=[0.25, 1.0, 1.0, 1.0]),
        _scored([*spam, _answer(well_formed=False)], correct=False),
        components([], StopReason.MAX_TOKENS, False),
    ]
    for name, (lowest, highest) in BOUNDS.items():
        values = [case[name] for case in cases]
        assert (min(values), max(values)) == (lowest, highest), name
    assert total(cases[0], CONFIG) == 1.0
    assert total(cases[1], CONFIG) == 0.0


@given(st.lists(st.sampled_from("pdxa"), max_size=30), st.booleans(), st.sampled_from(list(StopReason)))
def test_components_never_leave_their_bounds(turns: list[str], correct: bool, reason: StopReason) -> None:
    """AgenticArXiv-RL#76: a cap belongs into the component; S2 §5.1: extreme values are gradient explosions."""
    kinds = {
        "p": _call(target="start"),
        "d": _call(name="DRAW2DPATH", start=[32, 96], directions="R"),
        "x": Step("", None, Observation.failure(ToolErrorCode.MALFORMED_CALL, "?"), None, False, 0),
        "a": _answer(),
    }
    values = components([kinds[t] for t in turns], reason, correct, OFFERED, [0.5] * len(turns))
    assert values.keys() == BOUNDS.keys()
    for name, (lowest, highest) in BOUNDS.items():
        assert lowest <= values[name] <= highest


def test_a_format_error_gates_everything() -> None:
    values = _scored([_call(), _answer(well_formed=False)])
    assert total(values, CONFIG) == 0.0
    assert total(values, HYBRID) <= 0.0


@pytest.mark.parametrize("calls", [1, 5, 50])
def test_more_calls_do_not_earn_more(calls: int) -> None:
    """DeepEyes#83: 0.5 per call, whatever the answer, made the policy spam calls."""
    for correct in (False, True):
        one = _scored([_call(target="start"), _answer()], correct)
        many = _scored([_call(target="start")] * calls + [_answer()], correct)
        assert total(many, CONFIG) == total(one, CONFIG)
        assert total(many, HYBRID) <= total(one, HYBRID)


def test_bonuses_are_paid_for_right_answers_only() -> None:
    steps = [_call(name=name, box=[32, 96]) for name in OFFERED]
    wrong = _scored([*steps, _answer()], correct=False, potentials=[1.0])
    assert wrong["utilisation"] == wrong["turning_points"] == wrong["exploration"] == 0.0


@pytest.mark.parametrize("answer", ["", " ", "x", "</response>", '<tool_call>{"name": "POINT"}</tool_call>'])
def test_an_answer_that_is_wrong_earns_no_bonus_whatever_it_holds(answer: str) -> None:
    """Visual-RFT#176: an empty answer was "in" the truth and the policy answered nothing."""
    values = _scored([_call(), _answer(answer)], correct=False, potentials=[1.0, 1.0])
    assert total(values, HYBRID) <= total(_scored([_call(), _answer("no")], False), HYBRID)


def test_a_malformed_call_lowers_the_mean_instead_of_being_left_out() -> None:
    unreadable = Step("", None, Observation({}), None, False, 0)
    assert _scored([_call(4), unreadable, _answer()])["tool"] == 2.0


def test_an_episode_without_an_answer_is_never_accurate() -> None:
    assert components([_call(4)], StopReason.MAX_TURNS, True)["accuracy"] == 0.0


def test_the_weights_change_the_sum_not_the_components() -> None:
    values = _scored([_call(3), _answer()])
    assert total(values, RewardConfig(lambda_tool=0.0, lambda_acc=1.0)) == 1.0
    assert total(values, RewardConfig(lambda_tool=1.0, lambda_acc=0.0)) == 0.75


def test_giving_up_is_never_cheaper_than_trying() -> None:
    """The probe that lost its tools: with a cost on failures too, calls fell from 4.2 to 3.0 an episode."""
    tried = _scored([_call(target=str(n)) for n in range(12)] + [_answer()], correct=False)
    gave_up = _scored([_call(), _answer()], correct=False)
    harsh = RewardConfig(step_cost=0.05, repeats=0.5)
    assert total(tried, harsh) >= total(gave_up, harsh)
    probe = harsh.model_copy(update={"cost_on_failures": True})
    assert total(tried, probe) < total(gave_up, probe)


def test_costs_never_make_a_success_worse_than_a_failure() -> None:
    worst = RewardConfig(lambda_tool=0.0, step_cost=0.02, repeats=0.5)
    slow = _scored([_call(target="start")] * 20 + [_answer()])
    assert total(slow, worst) > total(_scored([_answer()], correct=False), worst)


def test_repeating_a_call_costs_more_each_time() -> None:
    """S1 §5.3: a linearly growing penalty."""
    costs = [
        components([_call(target="start")] * n, StopReason.MAX_TURNS, False)["repeats"] for n in range(1, 6)
    ]
    assert costs == [0.0, 0.25, 0.75, 1.0, 1.0]
    different = [_call(target="start"), _call(target="goal")]
    assert components(different, StopReason.MAX_TURNS, False)["repeats"] == 0.0


def test_a_result_that_nobody_reads_is_not_used() -> None:
    read = [_call(target="start"), _call(name="DRAW2DPATH", start=[32, 96], directions="R"), _answer("R")]
    ignored = [_call(target="start"), _call(name="DRAW2DPATH", start=[1, 2], directions="R"), _answer("R")]
    assert _scored(read)["utilisation"] == 1.0
    assert _scored(ignored)["utilisation"] == 0.5


def test_failing_first_does_not_make_a_turning_point() -> None:
    assert largest_rise([0.25, 0.5, 1.0, 1.0]) == 0.5
    assert largest_rise([0.25, 0.5, 0.0, 0.5]) == 0.25  # back where it was


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.5, 1))
def test_shaping_changes_when_reward_is_paid_and_not_how_much(potentials: list[float], gamma: float) -> None:
    """Ng, Harada & Russell 1999: the discounted sum of the shaping terms does not depend on the path."""
    shaped = turn_rewards(1.0, potentials, 0.7, gamma)
    plain = turn_rewards(1.0, potentials, 0.0, gamma)
    difference = sum(gamma**t * (a - b) for t, (a, b) in enumerate(zip(shaped, plain, strict=True)))
    assert abs(difference) < 1e-9


def test_calls_that_the_loop_forced_count_nowhere() -> None:
    forced = Step("", ToolCall("CROP", {}), Observation({}), None, True, 0, forced=True)
    assert _scored([forced, _call(), _answer()]) == _scored([_call(), _answer()])
