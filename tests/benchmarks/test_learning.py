"""Learning benchmarks: arms name real parameters, and tables say what the runs did."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.arms import Arm, fewest_bends, file_name
from benchmarks.learning import BENCHMARKS, end_table, replay_table, rollouts_until, stability_table
from environments.vsp.maps import GridMap
from tasks.params import load_params, override


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_arm_can_be_run(name: str) -> None:
    files = set()
    for arm in BENCHMARKS[name].arms:
        override(load_params(), dict(arm.changes))
        files.add(file_name(arm, 0))
    assert len(files) == len(BENCHMARKS[name].arms), "two arms would share a result file"


def test_the_results_of_two_seeds_never_share_a_file() -> None:
    assert file_name(Arm("a 1"), 1) != file_name(Arm("a"), 11)
    assert "/" not in file_name(Arm("λ 2:1 / x"), 0)


def _run(successes: list[float], start: float, end: float) -> dict[str, Any]:
    curve = [{"step": n, "fresh_rollouts": 10 * n, "success": s} for n, s in enumerate(successes)]
    before, after = {"success": start}, {"success": end, "calls": 3.0}
    return {"curve": curve, "start": before, "end": after, "budget": {"stop_gain": 0.1}}


def test_a_run_that_never_gets_there_is_not_counted_as_fast() -> None:
    slow, fast = _run([0.5, 0.5, 0.5], 0.5, 0.5), _run([0.5, 0.7], 0.5, 0.7)
    assert rollouts_until(slow) is None
    assert rollouts_until(fast) == 10
    row = replay_table({"arm": [slow, fast]})[-1]
    assert "| 15 |" in row
    assert "1 of 2" in row


def test_a_run_that_collapsed_on_the_way_is_not_stable() -> None:
    """S1 §5.3 counts runs that never collapse, however they end."""
    recovered, steady, fell = (
        _run([0.5, 0.2, 0.7], 0.5, 0.7),
        _run([0.5, 0.55, 0.6], 0.5, 0.6),
        _run([0.5, 0.5, 0.45], 0.5, 0.45),
    )
    assert "| 33% |" in stability_table({"arm": [recovered, steady, fell]})[-1]


def test_sampled_and_greedy_success_stand_in_columns_of_their_own() -> None:
    """A gain of sampled episodes must not be read as one of the greedy policy."""
    measured = {"start": 0.41, "end": 0.62, "greedy_start": 0.73, "greedy_end": 0.84}
    run = {stage: {"success": s, "calls": 3.0, "by_bends": {"1": [2, 4]}} for stage, s in measured.items()}
    header, _, row = end_table({"arm": [run, run]})
    cells = dict(zip(header.split("|"), row.split("|"), strict=True))
    assert [cells[name].split()[0] for name in (" SFT ", " greedy: SFT ")] == ["0.410", "0.730"]
    assert [cell.split()[0] for cell in row.split("|")[2:7]] == ["0.410", "0.620", "0.730", "0.840", "3.000"]
    assert "1: 4/8" in row


def test_bends_are_counted_around_holes() -> None:
    assert fewest_bends(GridMap(("SFG", "FFF", "FFF"))) == 0
    assert fewest_bends(GridMap(("SFF", "FFF", "FFG"))) == 1
    assert fewest_bends(GridMap(("SHG", "FHF", "FFF"))) == 2
    assert fewest_bends(GridMap(("SFH", "HFF", "HHG"))) == 3
