"""Hourly: end the records of runs whose process is gone, and remove the copies of the project they left."""

from __future__ import annotations

from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from flows.artifacts import show_table
from tasks.params import PROJECT_ROOT, Settings, load_params
from tasks.project_copy import remove_dead_copies
from tasks.tracking_store import open_store, reap_orphans, resolve_store


class ReapRun(Settings):
    """Where to look."""

    experiment: str | None = Field(
        None, min_length=1, description="MLflow experiment; absent: the one in params.yaml"
    )


_ALL = ReapRun()


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=30)
def close_orphans(experiment: str | None, root: Path) -> list[str]:
    """Set runs to KILLED whose process is gone. Tried again: a tracking server may be starting."""
    tracking = load_params(root / "params.yaml").tracking
    if experiment is not None:
        tracking = tracking.model_copy(update={"experiment": experiment})
    return reap_orphans(*open_store(resolve_store(tracking, root)))


@flow(name="reap", flow_run_name="reap")
def reap(run: ReapRun = _ALL, root: Path | None = None) -> dict[str, int]:
    """Clean up after processes that had no chance to do it themselves (SIGKILL, power loss).

    Args:
        run: where to look.
        root: the project; this one when absent.

    Returns:
        How many MLflow runs were closed, and copies removed.
    """
    project = PROJECT_ROOT if root is None else root
    runs = close_orphans(run.experiment, project)
    copies = remove_dead_copies(project)
    rows = [{"what": "MLflow run", "id": each, "now": "KILLED"} for each in runs]
    rows += [{"what": "copy of the project", "id": each, "now": "removed"} for each in copies]
    show_table("reaped", rows)
    return {"runs": len(runs), "copies": len(copies)}
