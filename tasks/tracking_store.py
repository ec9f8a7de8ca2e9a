"""The MLflow store: where it is, opening it once and for all processes, and closing what dead runs left open.

MLflow is imported inside functions: it takes three seconds, and `--help` should not.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from tasks.params import PROJECT_ROOT, TrackingConfig, read_yaml
from tasks.provenance import owner_is_dead

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

log = logging.getLogger(__name__)


class TrackingError(Exception):
    """The tracking store cannot be used; the message is one line with the remedy."""


@dataclass(frozen=True)
class Store:
    """A resolved tracking store. `artifact_root` is None where the server decides."""

    uri: str
    artifact_root: str | None
    database: Path | None
    experiment: str


def resolve_store(config: TrackingConfig, root: Path = PROJECT_ROOT) -> Store:
    """Where runs go: MLFLOW_TRACKING_URI, else params, else `mlflow.db` in the project.

    Relative sqlite paths and artifact roots are meant from the project, never from the current folder
    (mlflow/mlflow#7670).

    Raises:
        TrackingError: the address is a folder (MLflow's file store, which it no longer maintains).
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or config.tracking_uri or f"sqlite:///{root / 'mlflow.db'}"
    scheme = uri.split(":", 1)[0] if "://" in uri or uri.startswith("file:") else ""
    if scheme in {"", "file"} and uri != "databricks":
        raise TrackingError(
            f"tracking store {uri!r} is a folder, which MLflow no longer maintains: "
            "unset MLFLOW_TRACKING_URI, or set it to sqlite:///mlflow.db or to a server's http address"
        )
    if scheme != "sqlite":
        return Store(uri, config.artifact_root, None, config.experiment)
    database = root / uri.removeprefix("sqlite:///")
    artifacts = root / (config.artifact_root or "mlartifacts")
    return Store(f"sqlite:///{database}", artifacts.as_uri(), database, config.experiment)


def open_store(store: Store) -> tuple[MlflowClient, str]:
    """A client and the id of the experiment, which is created if new and restored if deleted.

    A fresh sqlite file is destroyed if several processes initialise it together (daizutabi/hydraflow#245),
    so the first connection of each process happens behind a file lock.

    Raises:
        TrackingError: the store cannot be reached or its schema is of another MLflow.
    """
    if store.database is None:
        return _connect(store)
    store.database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{store.database}.lock"):
        return _connect(store)


def _connect(store: Store) -> tuple[MlflowClient, str]:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    for chatty in ("alembic", "mlflow.store.db", "mlflow.system_metrics", "mlflow.tracing"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    client = MlflowClient(tracking_uri=store.uri, registry_uri=store.uri)
    try:
        experiment = client.get_experiment_by_name(store.experiment)
        if experiment is None:
            try:
                return client, client.create_experiment(
                    store.experiment, store.artifact_root, tags=_description(store.experiment)
                )
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                experiment = client.get_experiment_by_name(store.experiment)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage == "deleted":
            log.warning("the MLflow experiment %s was deleted; it is restored", store.experiment)
            client.restore_experiment(experiment.experiment_id)
    except MlflowException as error:
        hint = "is its server running?"
        if "out-of-date database schema" in str(error):
            hint = f"back it up, then run `mlflow db upgrade {store.uri}`"
        raise TrackingError(f"tracking store {store.uri}: {first_line(error)}; {hint}") from error
    return client, experiment.experiment_id


def _description(experiment: str) -> dict[str, str]:
    """The text of mlflow/experiments.yaml that MLflow shows above the runs."""
    text = read_yaml(PROJECT_ROOT / "mlflow" / "experiments.yaml").get(experiment)
    return {} if text is None else {"mlflow.note.content": text}


def find_orphans(client: MlflowClient, experiment_id: str) -> list[Run]:
    """Runs that look as if they ran though their process on this machine is gone."""
    running = client.search_runs([experiment_id], "attributes.status = 'RUNNING'", max_results=1000)
    return [run for run in running if owner_is_dead(run.data.tags)]


def reap_orphans(client: MlflowClient, experiment_id: str) -> list[str]:
    """Set runs to KILLED whose process on this machine is gone (SIGKILL leaves them RUNNING for ever)."""
    reaped = []
    for run in find_orphans(client, experiment_id):
        client.set_tag(run.info.run_id, "reaped", "true")
        client.set_terminated(run.info.run_id, "KILLED")
        reaped.append(run.info.run_id)
    return reaped


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__
