"""Reward components reach their bounds and cannot be farmed."""

from __future__ import annotations

import pytest

from models.config import RewardConfig
from models.rewards import BOUNDS, components, total
from models.trajectory import Step, StopReason
from tools.base import Observation, ToolCall

CONFIG = RewardConfig(lambda_tool=2.0, lambda_acc=1.0)


def _call(level: int, well_formed: bool = True) -> Step:
    return Step("t", ToolCall("POINT", {}), Observation({}), None, well_formed, level)


def _answer(text: str = "Yes", well_formed: bool = True) -> Step:
    return Step("t", None, None, text, well_formed)


def test_every_component_reaches_both_of_its_bounds() -> None:
    """VisTA#3: a format reward that was 0 for ever because its valid branch was never reached."""
    best = components([_call(4), _answer()], StopReason.ANSWERED, True)
    worst = components([_call(0, False)], StopReason.MAX_TURNS, False)
    for name in ("format", "tool", "accuracy"):
        assert (worst[name], best[name]) == BOUNDS[name]
    assert total(best, CONFIG) == 1.0
    assert total(worst, CONFIG) == 0.0


def test_a_format_error_gates_everything() -> None:
    values = components([_call(4), _answer(well_formed=False)], StopReason.ANSWERED, True)
    assert total(values, CONFIG) == 0.0


@pytest.mark.parametrize("calls", [1, 5, 50])
def test_more_calls_do_not_earn_more(calls: int) -> None:
    """DeepEyes#83: 0.5 per call, whatever the answer, made the policy spam calls."""
    one = total(components([_call(4), _answer()], StopReason.ANSWERED, False), CONFIG)
    many = total(components([_call(4)] * calls + [_answer()], StopReason.ANSWERED, False), CONFIG)
    assert many == one


def test_a_malformed_call_lowers_the_mean_instead_of_being_left_out() -> None:
    unreadable = Step("", None, Observation({}), None, False, 0)
    values = components([_call(4), unreadable, _answer()], StopReason.ANSWERED, True)
    assert values["tool"] == 2.0


def test_an_episode_without_an_answer_is_never_accurate() -> None:
    assert components([_call(4)], StopReason.MAX_TURNS, True)["accuracy"] == 0.0


def test_the_weights_change_the_sum_not_the_components() -> None:
    values = components([_call(3), _answer()], StopReason.ANSWERED, True)
    assert total(values, RewardConfig(lambda_tool=0.0, lambda_acc=1.0)) == 1.0
    assert total(values, RewardConfig(lambda_tool=1.0, lambda_acc=0.0)) == 0.75
