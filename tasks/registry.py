"""Versions and aliases in MLflow's model registry, for all who need the champion."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from tasks.params import PROJECT_ROOT, Params
from tasks.tracking_store import TrackingError, open_store, resolve_store

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION: Final = "champion"
CHALLENGER: Final = "challenger"


class RegistryError(TrackingError):
    """The registry has no champion; one line with what to do."""


def champion_folder(params: Params, root: Path = PROJECT_ROOT) -> Path:
    """A local folder with the champion's weights and tokenizer.

    Raises:
        RegistryError: the registry has no champion.
    """
    from mlflow.artifacts import download_artifacts

    store = resolve_store(params.tracking, root)
    client, _ = open_store(store)
    champion = version_of(client, params.promote.model_name, CHAMPION)
    if champion is None:
        raise RegistryError(
            f"no champion of {params.promote.model_name} in {store.uri}: register one with "
            "`dvc repro --force --single-item promote`, or name a model with --model"
        )
    return Path(download_artifacts(artifact_uri=champion.source, tracking_uri=store.uri))


def version_of(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """The version behind an alias, None if there is no such model or alias (MLflow raises for both)."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
            return None
        raise


def ensure_model(client: MlflowClient, name: str) -> None:
    """Make the registered model unless it is there."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name, description="Policies that plan with tools (VSP)")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
