"""The engine must never change a result, lose a call to another one's fault, or cost more than the tools."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.tools.worlds import cells, centre, random_map, render
from tools.base import Picture, Purity, Tool, ToolCall, ToolOutput, ToolParams
from tools.cache import ToolResultCache
from tools.draw2dpath import Draw2DPathParams
from tools.errors import ToolError, ToolErrorCode
from tools.executor import ToolExecutor
from tools.registry import ToolRegistry
from tools.vsp import VSP_TOOLS, vsp_registry

MAP = random_map(6, 3)
PICTURE = render(MAP)


def calls(rows: tuple[str, ...]) -> list[ToolCall]:
    start, goal = centre(rows, cells(rows, "S")[0]), centre(rows, cells(rows, "G")[0])
    return [
        ToolCall("POINT", {"target": "start"}),
        ToolCall("POINT", {"target": "goal"}),
        ToolCall("POINT", {"target": "holes"}),
        ToolCall("POINT", {"target": "moon"}),
        ToolCall("DRAW2DPATH", {"points": [start, goal]}),
        ToolCall("DRAW2DPATH", {"start": start, "directions": "RRDDLU"}),
        ToolCall("DRAW2DPATH", {"points": [start, [900, 900]]}),
        ToolCall("CROP", {"box": [0, 0, 64, 100]}),
        ToolCall("CROP", {"box": [0, 0, 64, 1000]}),
        ToolCall("ASTAR", {"start": start, "goal": goal}),
        ToolCall("ASTAR", {"start": start, "goal": goal, "obstacles": [start]}),
    ]


class Counting:
    """A tool that counts its runs and does what `result` says."""

    class Params(ToolParams):
        n: int = 0

    def __init__(self, result: Any = None, purity: Purity = Purity.PURE, version: str = "1") -> None:
        self.runs = 0
        self.result = result
        self.tool = Tool("COUNT", version, "Counts.", self.Params, purity, (), self.run)

    def run(self, picture: Picture, params: ToolParams) -> ToolOutput:
        self.runs += 1
        if self.result is not None:
            raise self.result
        return ToolOutput({"list": [1]})


@pytest.mark.parametrize("call", calls(MAP), ids=lambda call: call.to_json()[:60])
def test_the_cache_changes_no_observation(call: ToolCall) -> None:
    live = ToolExecutor(vsp_registry(), None, 5.0).run(call, PICTURE, VSP_TOOLS)
    cache = ToolResultCache(10)
    caching = ToolExecutor(vsp_registry(), cache, 5.0)
    first, second = (caching.run(call, Picture(PICTURE.png), VSP_TOOLS) for _ in range(2))
    for observation in (first, second):
        assert observation.payload == live.payload
        assert observation.picture == live.picture
        assert observation.error is live.error
    assert (live.cached, first.cached) == (False, False)
    checked_only = call.params == {"target": "moon"}  # refused before the tool, so never looked up
    assert second.cached is not checked_only
    assert cache.stats() == ({} if checked_only else {call.name: {"hits": 1, "misses": 1}})


@pytest.mark.parametrize("call", calls(MAP), ids=lambda call: call.to_json()[:60])
def test_a_pure_tool_gives_the_same_bytes_again_and_leaves_its_input_alone(call: ToolCall) -> None:
    picture = Picture(PICTURE.png)
    before, params = picture.rgb.copy(), repr(call.params)
    first = ToolExecutor(vsp_registry(), None, 5.0).run(call, picture, VSP_TOOLS)
    second = ToolExecutor(vsp_registry(), None, 5.0).run(call, Picture(PICTURE.png), VSP_TOOLS)
    assert first.to_json() == second.to_json()
    assert first.picture == second.picture
    assert (picture.rgb == before).all()
    assert repr(call.params) == params


def test_a_cached_result_cannot_be_spoiled_by_who_received_it() -> None:
    executor = ToolExecutor(ToolRegistry([Counting().tool]), ToolResultCache(10), 5.0)
    for _ in range(3):
        observation = executor.run(ToolCall("COUNT"), PICTURE, ["COUNT"])
        assert observation.payload == {"list": [1]}
        observation.payload["list"].append(2)


@pytest.mark.parametrize(
    ("result", "purity", "runs"),
    [
        (None, Purity.PURE, 1),
        (ToolError(ToolErrorCode.NOT_FOUND), Purity.PURE, 1),
        (RuntimeError(), Purity.PURE, 2),  # another attempt may work
        (None, Purity.STATEFUL, 2),
        (None, Purity.STOCHASTIC, 2),
    ],
)
def test_only_results_that_the_inputs_determine_are_kept(result: Any, purity: Purity, runs: int) -> None:
    counting = Counting(result, purity)
    executor = ToolExecutor(ToolRegistry([counting.tool]), ToolResultCache(10), 5.0)
    for _ in range(2):
        executor.run(ToolCall("COUNT"), PICTURE, ["COUNT"])
    assert counting.runs == runs


def test_a_new_tool_version_other_parameters_or_another_picture_miss_the_cache() -> None:
    cache = ToolResultCache(10)
    old, new = Counting(version="1"), Counting(version="2")
    for counting, n, picture in [
        (old, 0, PICTURE),
        (new, 0, PICTURE),
        (old, 1, PICTURE),
        (old, 0, render(random_map(4, 0))),
    ]:
        ToolExecutor(ToolRegistry([counting.tool]), cache, 5.0).run(
            ToolCall("COUNT", {"n": n}), picture, ["COUNT"]
        )
    assert cache.stats() == {"COUNT": {"hits": 0, "misses": 4}}


def test_a_parameter_written_out_hits_the_entry_of_its_default() -> None:
    cache = ToolResultCache(10)
    executor = ToolExecutor(ToolRegistry([Counting().tool]), cache, 5.0)
    executor.run(ToolCall("COUNT"), PICTURE, ["COUNT"])
    assert executor.run(ToolCall("COUNT", {"n": 0}), PICTURE, ["COUNT"]).cached


def test_a_path_with_a_point_given_twice_hits_the_entry_of_the_same_path() -> None:
    executor = ToolExecutor(vsp_registry(), ToolResultCache(10), 5.0)
    repeated = [[32, 32], [32, 32], [96, 32], [96, 32]]
    once = executor.run(ToolCall("DRAW2DPATH", {"points": [[32, 32], [96, 32]]}), PICTURE, VSP_TOOLS)
    twice = executor.run(ToolCall("DRAW2DPATH", {"points": repeated}), PICTURE, VSP_TOOLS)
    assert twice.cached
    as_given = Draw2DPathParams.model_construct(points=repeated)
    drawn = vsp_registry().get("DRAW2DPATH").run(PICTURE, as_given)
    assert (drawn.payload, drawn.picture) == (once.payload, once.picture)
    back = ToolCall("DRAW2DPATH", {"points": [[32, 32], [96, 32], [32, 32]]})
    assert not executor.run(back, PICTURE, VSP_TOOLS).cached


def test_the_cache_drops_what_was_used_longest_ago() -> None:
    cache = ToolResultCache(2)
    executor = ToolExecutor(ToolRegistry([Counting().tool]), cache, 5.0)
    cached = [
        executor.run(ToolCall("COUNT", {"n": n}), PICTURE, ["COUNT"]).cached for n in (1, 2, 1, 3, 1, 2)
    ]
    assert cached == [False, False, True, False, True, False]
    assert len(cache) == 2


def test_a_hanging_call_ends_at_its_deadline_and_blocks_no_later_call() -> None:
    release = threading.Event()

    def hang(picture: Picture, params: ToolParams) -> ToolOutput:
        release.wait(10)
        return ToolOutput({})

    hanging = Tool("HANG", "1", "Hangs.", Counting.Params, Purity.PURE, (), hang)
    counting = Counting()
    cache = ToolResultCache(10)
    executor = ToolExecutor(ToolRegistry([hanging, counting.tool]), cache, 0.05)
    for n in range(3):
        late = executor.run(ToolCall("HANG"), PICTURE, ["HANG", "COUNT"])
        assert late.error is ToolErrorCode.DEADLINE
        assert 0.05 <= late.seconds < 1
        assert executor.run(ToolCall("COUNT", {"n": n}), PICTURE, ["HANG", "COUNT"]).ok
    release.set()
    time.sleep(0.05)
    assert executor.run(ToolCall("HANG"), PICTURE, ["HANG", "COUNT"]).ok  # the deadline was not cached


def test_parallel_calls_get_their_own_results() -> None:
    maps = [random_map(size, seed) for size in (3, 5, 8) for seed in range(4)]
    executor = ToolExecutor(vsp_registry(), ToolResultCache(20), 20.0)
    jobs = [(rows, call) for rows in maps for call in calls(rows)] * 2
    random.Random(0).shuffle(jobs)
    alone = ToolExecutor(vsp_registry(), None, 20.0)
    expected = [alone.run(call, render(rows), VSP_TOOLS).to_json() for rows, call in jobs]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda job: executor.run(job[1], render(job[0]), VSP_TOOLS).to_json(), jobs))
    assert got == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_executor_that_already_ran_works_in_a_forked_process() -> None:
    executor = ToolExecutor(vsp_registry(), None, 2.0)
    call = ToolCall("POINT", {"target": "holes"})
    assert executor.run(call, PICTURE, VSP_TOOLS).ok  # now the parent has a worker thread, the child will not
    child = os.fork()
    if child == 0:
        os._exit(0 if executor.run(call, PICTURE, VSP_TOOLS).ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_call_costs_little_beside_its_tool() -> None:
    executor = ToolExecutor(ToolRegistry([Counting().tool]), None, 5.0)
    seconds = sorted(executor.run(ToolCall("COUNT"), PICTURE, ["COUNT"]).seconds for _ in range(500))
    assert seconds[250] < 500e-6  # 0.03 ms when idle; room for a busy machine
