"""What a pipeline run says at its end, for the console, Prefect's artifacts and MLflow's description."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tasks.usage import CPU_HOURS, GPU_HOURS, GROUP, PEAK_MEMORY, SECONDS, TOKENS_PER_SECOND

if TYPE_CHECKING:
    from tasks.tracked_run import StageRun

Outcome = Literal["ran", "cached", "skipped", "failed"]


@dataclass(frozen=True)
class StageResult:
    """What became of a stage: `run_id` is the MLflow run that made its present outputs, `cost` what that run
    took (`sys/…` metrics by name, tasks/usage.py), now or earlier."""

    stage: str
    outcome: Outcome
    seconds: float = 0.0
    reason: str = ""
    run_id: str | None = None
    cost: Mapping[str, float] = field(default_factory=dict)


def with_costs(results: Sequence[StageResult], run: StageRun) -> list[StageResult]:
    """The results with what their MLflow runs took; `run` is any run of the same store."""
    return [replace(r, cost=run.totals_of(r.run_id)) if r.run_id else r for r in results]


def cost_metrics(results: Sequence[StageResult]) -> dict[str, float]:
    """Metrics of the pipeline's run: what each stage that ran now took, `sys/<stage>/seconds` and so on."""
    metrics: dict[str, float] = {}
    for result in results:
        if result.seconds:
            metrics[f"sys/{result.stage}/seconds"] = result.seconds
        if result.outcome != "ran":
            continue
        for name in (CPU_HOURS, GPU_HOURS, PEAK_MEMORY, TOKENS_PER_SECOND):
            if name in result.cost:
                short = name.removeprefix(GROUP)
                metrics[f"sys/{result.stage}/{short}"] = result.cost[name]
    return metrics


def stage_table(results: Sequence[StageResult], experiment_id: str) -> str:
    """Markdown: what became of each stage, what its outputs cost (when they were made, if that was earlier), and
    a link (inside MLflow's pages) to the run that made them."""
    costs = ("seconds when made", "CPU hours", "GPU hours", "peak memory", "tokens/s")
    columns = ("stage", "result", "seconds now", *costs, "MLflow run")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for result in results:
        target = f"#/experiments/{experiment_id}/runs/{result.run_id}"
        link = f"[{result.run_id[:8]}]({target})" if result.run_id else "–"
        rows.append(
            f"| {result.stage} | {result.outcome} | {result.seconds:.0f} | {' | '.join(_costs(result))} | {link} |"
        )
    ran = sum(result.seconds for result in results)
    spared = sum(result.cost.get(SECONDS, 0.0) for result in results if result.outcome == "cached")
    rows += ["", f"{ran:.0f} seconds in all; what was cached would have taken {spared:.0f} more."]
    reasons = [f"**{result.stage}**: {result.reason}" for result in results if result.reason]
    return "\n".join([*rows, "", *reasons])


def _costs(result: StageResult) -> list[str]:
    shown = (
        (SECONDS, "{:.0f}"),
        (CPU_HOURS, "{:.3f}"),
        (GPU_HOURS, "{:.3f}"),
        (PEAK_MEMORY, "{:.0f} MB"),
        (TOKENS_PER_SECOND, "{:.0f}"),
    )
    return [text.format(result.cost[name]) if name in result.cost else "–" for name, text in shown]


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
