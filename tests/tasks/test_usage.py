"""Risks of cost records: a resumed run that forgets its earlier time, names outside the group, endless curves."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tasks.params import Params, override
from tasks.pipeline_report import StageResult, cost_metrics, stage_table, with_costs
from tasks.tracking import pipeline_run, stage_run
from tasks.tracking_store import open_store, resolve_store
from tasks.usage import CPU_HOURS, SECONDS, TOKENS, TOKENS_PER_SECOND, Usage


def test_totals_go_on_from_earlier_attempts() -> None:
    first = Usage({})
    first.watch({"sft/agent_tokens": 300.0, "sft/tokens": 9000.0})
    first.watch({"grpo/updated_tokens": 200.0})
    earlier = {**first.totals(0), SECONDS: 100.0, CPU_HOURS: 2.0, "sys/peak_memory_megabytes": 1e9}
    assert earlier[TOKENS] == 500.0
    second = Usage(earlier)
    second.count_tokens(500)
    totals = second.totals(2)
    assert 100 <= totals[SECONDS] < 110
    assert totals[CPU_HOURS] == pytest.approx(2.0, abs=0.01)
    assert totals["sys/peak_memory_megabytes"] == 1e9
    assert totals[TOKENS_PER_SECOND] == pytest.approx(1000 / totals[SECONDS])
    assert totals["sys/gpu_hours"] == pytest.approx(2 * (totals[SECONDS] - 100) / 3600)
    assert TOKENS not in Usage({}).totals(0)


def test_the_machine_is_sampled_in_the_group_sys_alone_and_thinned(records: Path, params: Params) -> None:
    chosen = override(
        params, {"tracking.system_metrics_interval_s": 0.05, "tracking.max_points_per_metric": 20}
    )

    def fail() -> None:
        time.sleep(2.0)
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"), stage_run("sft", chosen, records) as run:
        fail()
    with stage_run("sft", chosen, records) as resumed:
        time.sleep(0.5)
    assert resumed.run_id == run.run_id
    client, _ = open_store(resolve_store(params.tracking, records))
    metrics = client.get_run(run.run_id).data.metrics
    assert {name.partition("/")[0] for name in metrics} == {"sys"}
    assert {"sys/cpu_utilization_percentage", "sys/system_memory_usage_megabytes"} <= set(metrics)
    assert metrics[SECONDS] > 2.5, "the first attempt's time is gone"
    points = client.get_metric_history(run.run_id, "sys/cpu_utilization_percentage")
    steps = [point.step for point in points]
    assert len(set(steps)) == len(steps), "a sample of the second attempt lies on one of the first"
    assert 5 < len(points) <= 22


def test_the_pipeline_says_what_each_stage_took_and_what_was_spared(records: Path, params: Params) -> None:
    with stage_run("sft", params, records) as stage:
        stage.count_tokens(1000)
    with pipeline_run(params, records) as run:
        results = [
            StageResult("sft", "ran", 12.0, run_id=stage.run_id),
            StageResult("grpo", "cached", run_id=stage.run_id),
            StageResult("evaluate", "skipped"),
            StageResult("promote", "cached", run_id="gone"),
        ]
        results = with_costs(results, run)
    assert results[3].cost == {}
    metrics = cost_metrics(results)
    assert metrics["sys/sft/seconds"] == 12.0
    assert {"sys/sft/cpu_hours", "sys/sft/peak_memory_megabytes", "sys/sft/tokens_per_second"} <= set(metrics)
    assert not [name for name in metrics if "grpo" in name], "a cached stage cost nothing now"
    lines = stage_table(results, "1").splitlines()
    assert len({line.count("|") for line in lines[:6]}) == 1
    assert lines[2].startswith("| sft | ran | 12 |")
    assert " MB | " in lines[3]
    assert "12 seconds in all" in "\n".join(lines)
