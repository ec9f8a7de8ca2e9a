"""Daily: the champion on maps that nobody has seen. The work is tasks/fresh_evaluation.py."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from flows.artifacts import show_link, show_table
from tasks import fresh_evaluation
from tasks.params import PROJECT_ROOT, Settings, load_params
from tasks.run_cards import mlflow_page


class EvaluationRun(Settings):
    """Which maps, and how many."""

    day: date | None = Field(None, description="decides the maps; absent: today, in UTC")
    per_size: int = Field(20, ge=1, le=1000, description="questions per task and map size")


_TODAY = EvaluationRun()


@task(task_run_name="fresh maps of {day}", cache_policy=NO_CACHE, persist_result=False)
def ask(day: date, per_size: int, root: Path) -> fresh_evaluation.FreshResult:
    """Ask the champion the day's questions."""
    return fresh_evaluation.evaluate_champion(load_params(root / "params.yaml"), day, per_size, root)


@flow(name="evaluate-champion", flow_run_name="evaluate-champion")
def evaluate_champion(run: EvaluationRun = _TODAY, root: Path | None = None) -> dict[str, float]:
    """Measure the registry's champion on new held-out maps.

    Args:
        run: which maps, and how many.
        root: the project; this one when absent.

    Returns:
        Accuracy by task.

    Raises:
        RegistryError: the registry has no champion.
    """
    day = run.day or fresh_evaluation.today()
    result = ask(day, run.per_size, PROJECT_ROOT if root is None else root)
    show_table("champion-on-fresh-maps", fresh_evaluation.table(result), f"{day}, new maps of the test split")
    show_link("mlflow-run", mlflow_page(result.experiment_id, result.run_id), "this evaluation in MLflow")
    return {name: accuracy["accuracy"] for name, accuracy in result.accuracies.items()}
