"""What a pipeline run leaves behind: tags and a table in MLflow, artifacts and an event in Prefect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from prefect.events import emit_event

from flows.artifacts import show_link, show_markdown
from tasks.dvc_graph import stage_fingerprint
from tasks.params import Params
from tasks.pipeline_report import StageResult, cost_metrics, read_metrics, stage_table, with_costs
from tasks.run_cards import data_card, mlflow_page, validation_summary
from tasks.tracked_run import StageRun
from tasks.tracking import RunRecords

PROMOTED = "toolplan.model.promoted"
"""Event of a new champion; automations/promoted.yaml waits for it."""


def maker(stage: str, params: Params, root: Path) -> str | None:
    """The MLflow run that made a stage's present outputs."""
    return RunRecords(root, stage).run_id(stage_fingerprint(stage, params, root))


def record(run: StageRun, results: Sequence[StageResult], root: Path) -> None:
    """Write what became of each stage to the parent run and to Prefect's artifacts."""
    results = with_costs(results, run)
    table = stage_table(results, run.experiment_id)
    tags = {f"stage.{result.stage}": result.outcome for result in results}
    links = {f"stage.{result.stage}.run_id": result.run_id for result in results if result.run_id}
    run.set_tags({**tags, **links, "mlflow.note.content": table})
    run.log_summary(cost_metrics(results))
    run.log_text(table, "pipeline/stages.md")
    show_markdown("pipeline-stages", table)
    made = {result.stage: result for result in results if result.outcome in {"ran", "cached"}}
    if "cold_start" in made and (card := data_card(root)):
        show_markdown("data-card", card)
    # also of a gate that failed: that is when somebody reads it
    if any(result.stage == "validate" and result.outcome != "skipped" for result in results):
        summary = validation_summary(root)
        if summary:
            show_markdown("data-validation", summary)
    if "evaluate" in made:
        if metrics := read_metrics(root):
            from tasks.evaluation_report import markdown_table

            show_markdown("evaluation", markdown_table(metrics))
        if run_id := made["evaluate"].run_id:
            report = mlflow_page(run.experiment_id, run_id, "evaluation/report.html")
            show_link("rollout-report", report, "episodes, message by message")


def announce_champion(params: Params, root: Path) -> None:
    """Tell Prefect of a model that has just become the champion."""
    decided = json.loads((root / "outputs" / "promotion.json").read_text(encoding="utf-8"))
    if decided["verdict"] == "champion":
        name = params.promote.model_name
        resource = {"prefect.resource.id": f"toolplan.model.{name}", "prefect.resource.name": name}
        emit_event(
            PROMOTED, resource, payload={"reason": decided["reason"], "sha256": decided["model_sha256"]}
        )
