"""Episodes as records of a run: MLflow traces (an AGENT span with a span for each thought, tool call and answer
below it), and a page to look at.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.tracked_run import TraceStep

if TYPE_CHECKING:
    from environments.base import Prompt
    from models.config import RewardConfig
    from models.trajectory import Step, Trajectory
    from tasks.tracked_run import StageRun


def log_traces(run: StageRun, trajectories: Sequence[Trajectory], tags: Mapping[str, str]) -> None:
    """Store each episode as a trace of `run`; `tags` are added to those that tell episodes apart."""
    for trajectory in trajectories:
        run.log_trace(
            str(trajectory.prompt.task),
            question(trajectory.prompt),
            {"response": trajectory.response, "stop_reason": str(trajectory.stop_reason)},
            list(spans(trajectory)),
            {
                **tags,
                "prompt_id": trajectory.prompt.prompt_id,
                "stop_reason": str(trajectory.stop_reason),
                "correct": str(trajectory.components["accuracy"] > 0).lower(),
            },
        )


def log_page(
    run: StageRun, trajectories: Sequence[Trajectory], reward: RewardConfig, name: str, artifact: str
) -> None:
    """Store the episodes as rollout report `artifact`, e.g. "rollouts/step-8.html"; `name` stands above them."""
    from tasks.rollout_report import write_report

    path = Path(artifact)
    with tempfile.TemporaryDirectory() as folder:
        write_report(trajectories, reward, Path(folder) / path.name, name)
        run.log_artifact(Path(folder) / path.name, str(path.parent))


def question(prompt: Prompt) -> dict[str, Any]:
    """The question as chat messages, which MLflow shows with their pictures."""
    pictures = [
        {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(p.png).decode()}"},
        }
        for p in prompt.pictures
    ]
    content = [*pictures, {"type": "text", "text": prompt.question}]
    return {"messages": [{"role": "user", "content": content}], "offered_tools": list(prompt.tools)}


def spans(trajectory: Trajectory) -> Iterator[TraceStep]:
    """Spans in order of time: `think` and `answer` (LLM), the tool's name (TOOL), and `unreadable` (PARSER) for
    a turn from which neither a call nor an answer could be read."""
    for step in trajectory.steps:
        thought = _thought_ended(step)
        written: dict[str, Any] = {"think": step.think}
        if step.call is not None:
            written["call"] = step.call.to_json()
        yield TraceStep("think", "LLM", {}, written, step.started, thought)
        if step.response is not None:
            yield TraceStep("answer", "LLM", {}, {"response": step.response}, thought, step.written)
        elif step.observation is not None:
            yield _observed(step)


def _observed(step: Step) -> TraceStep:
    seen = step.observation
    assert seen is not None
    if step.call is None:
        return TraceStep("unreadable", "PARSER", {}, seen.payload, step.written, step.ended, True)
    facts = {"cached": seen.cached, "call_level": step.call_level}
    return TraceStep(
        step.call.name[:64],
        "TOOL",
        step.call.params,
        seen.payload,
        step.written,
        step.ended,
        not seen.ok,
        facts,
    )


def _thought_ended(step: Step) -> float:
    """When the answer began: a turn's tokens have no times of their own, so its time is shared by length."""
    if step.response is None:
        return step.written
    share = len(step.think) / max(1, len(step.think) + len(step.response))
    return step.started + share * (step.written - step.started)
