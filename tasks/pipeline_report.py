"""What a pipeline run says at its end, for the console, Prefect's artifacts and MLflow's description."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["ran", "cached", "skipped", "failed"]


@dataclass(frozen=True)
class StageResult:
    """What became of a stage: `run_id` is the MLflow run that made its present outputs."""

    stage: str
    outcome: Outcome
    seconds: float = 0.0
    reason: str = ""
    run_id: str | None = None


def stage_table(results: Sequence[StageResult], experiment_id: str) -> str:
    """Markdown: what became of each stage, with a link (inside MLflow's pages) to the run that made it."""
    rows = ["| stage | result | seconds | MLflow run |", "|---|---|---|---|"]
    for result in results:
        target = f"#/experiments/{experiment_id}/runs/{result.run_id}"
        link = f"[{result.run_id[:8]}]({target})" if result.run_id else "–"
        rows.append(f"| {result.stage} | {result.outcome} | {result.seconds:.0f} | {link} |")
    reasons = [f"**{result.stage}**: {result.reason}" for result in results if result.reason]
    return "\n".join([*rows, "", *reasons])


def read_metrics(root: Path) -> dict[str, Any]:
    """`outputs/evaluation/metrics.json`, empty if there is none."""
    file = root / "outputs" / "evaluation" / "metrics.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def print_results(outcomes: Mapping[str, str], root: Path) -> None:
    """The end of `make run`: what happened, how good the policies are, where to look."""
    from rich.console import Console
    from rich.table import Table

    from tasks.evaluation_report import accuracy_text
    from tasks.provenance import git

    console = Console(highlight=False)
    console.print("\n" + ", ".join(f"{stage} [bold]{outcome}[/bold]" for stage, outcome in outcomes.items()))
    columns = ("navigation", "verification", "overall")
    for suite, policies in read_metrics(root).items():
        table = Table(
            "policy", *columns, "items", title=f"accuracy, {suite.replace('_', ' ')}, 95 % intervals"
        )
        for policy, numbers in policies.items():
            cells = [accuracy_text(numbers[column]).split(" (n")[0] for column in columns]
            table.add_row(policy, *cells, str(numbers["overall"]["n"]))
        console.print(table)
    promotion = root / "outputs" / "promotion.json"
    if promotion.is_file():
        decided = json.loads(promotion.read_text(encoding="utf-8"))
        console.print(f"promotion: {decided['policy']} is {decided['verdict']}: {decided['reason']}")
    console.print("curves, episodes and models: `make mlflow-ui`, then http://127.0.0.1:5000")
    for path in ("outputs/evaluation/report.html", "outputs/data_docs/index.html"):
        if (root / path).is_file():
            console.print(f"report: {path}")
    if git(root, "status", "--porcelain", "dvc.lock"):
        console.print(
            "dvc.lock has changed: commit it, and others can repeat exactly this (`git add dvc.lock`)"
        )
