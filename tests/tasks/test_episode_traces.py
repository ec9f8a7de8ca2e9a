"""Risks of traces: calls that look like thoughts, spans of another episode, times that run backwards."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from models.trajectory import Step
from tasks.episode_traces import log_page, log_traces, spans
from tasks.params import Params
from tasks.tracking import stage_run
from tasks.tracking_store import open_store, resolve_store
from tests.tasks.test_rollout_report import REWARD, make_trajectories
from tools.base import Observation
from tools.errors import ToolErrorCode


def test_thoughts_and_answers_are_llm_spans_and_calls_tool_spans(records: Path, params: Params) -> None:
    (trajectory,) = make_trajectories(1)
    timed = tuple(
        replace(step, started=100.0 + i, written=100.5 + i, ended=100.8 + i)
        for i, step in enumerate(trajectory.steps)
    )
    unreadable = Step(
        "hm", None, Observation.failure(ToolErrorCode.MALFORMED_CALL, "no"), None, False, 0, 99.0, 99.5, 99.8
    )
    trajectory = replace(trajectory, steps=(unreadable, *timed))
    with stage_run("evaluate", params, records) as run:
        log_traces(run, [trajectory], {"policy": "grpo"})
    client, _ = open_store(resolve_store(params.tracking, records))
    (trace,) = client.search_traces(locations=[run.experiment_id])
    root = next(span for span in trace.data.spans if span.parent_id is None)
    below = sorted(
        (s for s in trace.data.spans if s.parent_id == root.span_id), key=lambda s: s.start_time_ns
    )
    assert root.span_type == "AGENT"
    assert len(below) == len(trace.data.spans) - 1
    calls = [step.call.name for step in trajectory.steps if step.call is not None]
    assert [span.name for span in below if span.span_type == "TOOL"] == calls
    assert [span.name for span in below if span.span_type == "LLM"] == ["think"] * (len(calls) + 2) + [
        "answer"
    ]
    assert [(s.name, s.status.status_code) for s in below if s.span_type == "PARSER"] == [
        ("unreadable", "ERROR")
    ]
    assert all(span.start_time_ns <= span.end_time_ns for span in below)
    assert below[-1].outputs == {"response": trajectory.response}
    picture = root.inputs["messages"][0]["content"][0]
    # MLflow keeps pictures as attachments of the trace
    assert re.match(r"mlflow-attachment://.*content_type=image%2Fpng", picture["image_url"]["url"])
    assert trace.info.tags["policy"] == "grpo"
    assert trace.info.request_metadata["mlflow.sourceRun"] == run.run_id


def test_the_page_of_a_training_step_is_an_artifact_of_its_run(records: Path, params: Params) -> None:
    with stage_run("grpo", params, records) as run:
        log_page(run, make_trajectories(2), REWARD, "rollouts of step 8", "rollouts/step-00008.html")
    client, _ = open_store(resolve_store(params.tracking, records))
    (page,) = client.list_artifacts(run.run_id, "rollouts")
    assert page.path == "rollouts/step-00008.html"
    text = Path(client.download_artifacts(run.run_id, page.path, str(records))).read_text(encoding="utf-8")
    assert "rollouts of step 8" in text


def test_a_turn_without_times_or_text_is_traced() -> None:
    (trajectory,) = make_trajectories(1)
    silent = replace(trajectory, steps=(Step("", None, None, "", True),))
    assert [(each.name, each.started, each.ended) for each in spans(silent)] == [
        ("think", 0.0, 0.0),
        ("answer", 0.0, 0.0),
    ]
