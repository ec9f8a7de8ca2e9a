"""What went wrong elsewhere with tools, as tests here; `tests/models/test_field_index.py` lists all entries."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.tools.worlds import random_map, render
from tools.base import Picture, Purity, Tool, ToolCall, ToolOutput, ToolParams
from tools.cache import ToolResultCache
from tools.errors import ToolErrorCode
from tools.executor import ToolExecutor
from tools.registry import ToolRegistry

PICTURE = render(random_map(4, 1))


class Params(ToolParams):
    n: int = 0


class Late:
    """A tool that answers with its `n`, but waits for `release` first where n is 0."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.ended = threading.Event()
        self.runs = 0
        self.tool = Tool("LATE", "1", "Waits.", Params, Purity.PURE, (), self.run)

    def run(self, picture: Picture, params: Params) -> ToolOutput:
        self.runs += 1
        if params.n == 0:
            self.release.wait(20)
            self.ended.set()
        return ToolOutput({"n": params.n})


def test_the_late_result_of_a_call_given_up_reaches_no_one() -> None:
    """agent-lightning#218: a timed-out rollout was asked again, and the late answer came as a second one."""
    late, cache = Late(), ToolResultCache(10)
    executor = ToolExecutor(ToolRegistry([late.tool]), cache, 0.05)
    given_up = executor.run(ToolCall("LATE", {"n": 0}), PICTURE, ["LATE"])
    before = dict(given_up.payload)
    late.release.set()
    assert late.ended.wait(5)
    time.sleep(0.02)
    assert given_up.payload == before
    assert given_up.error is ToolErrorCode.DEADLINE
    assert len(cache) == 0
    for n in (1, 2, 3):  # the thread that was late serves again: its old job must not answer for the new one
        assert executor.run(ToolCall("LATE", {"n": n}), PICTURE, ["LATE"]).payload == {"n": n}


def test_the_watchdog_names_the_tool_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    """ROLL#215, verl#1696: hours of silence, and nothing said which tool it was."""
    late = Late()
    observation = ToolExecutor(ToolRegistry([late.tool]), None, 0.05).run(ToolCall("LATE"), PICTURE, ["LATE"])
    late.release.set()
    assert observation.error is ToolErrorCode.DEADLINE
    assert "LATE was still running" in caplog.text


@pytest.mark.parametrize(
    "params",
    [None, "", "{}", [], ["n"], 0, True, {"n": "1"}, {"n": True}, {"n": 1.0}, {"n": None}, {"m": 1}, {1: 2}],
)
def test_no_argument_is_guessed_for_a_tool_that_needs_none(params: Any) -> None:
    """hermes-agent#1796: unreadable arguments became `{}` and the tool ran. vllm#19419: so did an empty string."""
    late = Late()
    call = ToolCall("LATE", params)
    observation = ToolExecutor(ToolRegistry([late.tool]), None, 5.0).run(call, PICTURE, ["LATE"])
    assert observation.error is not None
    assert late.runs == 0


def test_sixty_four_calls_at_once_hang_no_longer_than_one() -> None:
    """verl#1948: one slow tool made every other episode wait behind it."""
    late = Late()
    executor = ToolExecutor(ToolRegistry([late.tool]), None, 0.2)
    began = time.monotonic()
    threads = [
        threading.Thread(target=executor.run, args=(ToolCall("LATE"), PICTURE, ["LATE"])) for _ in range(64)
    ]
    for thread in threads:
        thread.start()
    assert executor.run(ToolCall("LATE", {"n": 7}), PICTURE, ["LATE"]).payload == {"n": 7}
    for thread in threads:
        thread.join()
    late.release.set()
    assert time.monotonic() - began < 4
