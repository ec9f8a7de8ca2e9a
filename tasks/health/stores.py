"""Whether what a run writes to or reads from over an address answers: MLflow, Prefect, DVC's remote."""

from __future__ import annotations

import os
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

from tasks.health.check import Check, fail, ok, warn
from tasks.params import Params
from tasks.tracking_store import TrackingError, find_orphans, open_store, reap_orphans, resolve_store

_PATIENCE_S = 5.0


def check_tracking(params: Params, root: Path) -> Check:
    """MLflow's store: there, of this MLflow's version, answering. A local one that is not there yet is fine."""
    try:
        store = resolve_store(params.tracking, root)
        if store.database is not None and not store.database.is_file():
            return ok("mlflow", "no records yet; the first run makes mlflow.db")
        if store.uri.startswith("http") and (problem := _unreachable(f"{store.uri.rstrip('/')}/health")):
            return fail(
                "mlflow",
                f"{store.uri} does not answer ({problem})",
                "start its server, or unset MLFLOW_TRACKING_URI",
            )
        open_store(store)
    except TrackingError as error:
        return fail("mlflow", *_split(str(error)))
    except Exception as error:  # a damaged sqlite file shows itself in many ways
        return fail(
            "mlflow",
            f"{store.uri}: {str(error).splitlines()[0][:200]}",
            "restore the file from a backup, or move it away to start anew",
        )
    return ok("mlflow", store.uri if store.database is None else str(store.database.name))


def check_orphans(params: Params, root: Path, fix: bool) -> Check:
    """Runs that MLflow shows as running though their process is gone (SIGKILL, a crash of the machine)."""
    store = resolve_store(params.tracking, root)
    if store.database is not None and not store.database.is_file():
        return ok("orphans", "none")
    client, experiment = open_store(store)
    if fix:
        return ok("orphans", f"{len(reap_orphans(client, experiment))} runs were set to KILLED")
    orphans = find_orphans(client, experiment)
    if orphans:
        names = ", ".join(f"{run.info.run_name} {run.info.run_id[:8]}" for run in orphans[:3])
        return warn(
            "orphans",
            f"{len(orphans)} runs of ended processes look as if they ran: {names}",
            "the next run marks them KILLED, and so does python -m tasks.doctor --fix",
        )
    return ok("orphans", "none")


def check_prefect(environment: dict[str, str] | None = None) -> Check:
    """The configured Prefect server; without one a run starts its own."""
    address = prefect_address(dict(os.environ) if environment is None else environment)
    if address is None:
        return ok("prefect", "no server configured; each run starts a temporary one")
    problem = _unreachable(f"{address.rstrip('/')}/health")
    if problem is None:
        return ok("prefect", address)
    return fail(
        "prefect",
        f"{address} does not answer ({problem})",
        "start it with `prefect server start`, or unset PREFECT_API_URL",
    )


def prefect_address(environment: dict[str, str]) -> str | None:
    """PREFECT_API_URL from the environment, else from Prefect's active profile (which `prefect config set` writes)."""
    if environment.get("PREFECT_API_URL"):
        return environment["PREFECT_API_URL"]
    home = Path(environment.get("PREFECT_HOME") or Path.home() / ".prefect")
    file = Path(environment.get("PREFECT_PROFILES_PATH") or home / "profiles.toml")
    if not file.is_file():
        return None
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError:
        return None
    active = environment.get("PREFECT_PROFILE") or content.get("active", "")
    address = content.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")
    return str(address) if address else None


def check_remote(root: Path) -> Check:
    """DVC's default remote, if there is one."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo(str(root)) as repo:
            name = repo.config["core"].get("remote")
            if name is None:
                return ok("dvc remote", "none configured; results stay in .dvc/cache")
            store = repo.cloud.get_remote_odb(name)
            if store.fs.exists(store.path):
                return ok("dvc remote", f"{name} answers")
    except DvcException as error:
        return fail("dvc remote", str(error), "correct it with `dvc remote modify`")
    except Exception as error:  # each kind of store has errors of its own
        return fail(
            "dvc remote",
            f"{name}: {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}",
            "see `dvc remote list`; secrets belong in .dvc/config.local",
        )
    return warn("dvc remote", f"{name} is empty or not there", "`dvc push` makes it")


def _unreachable(url: str) -> str | None:
    """Why `url` does not answer, None if it does."""
    try:
        with urllib.request.urlopen(url, timeout=_PATIENCE_S):
            return None
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except (urllib.error.URLError, OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def _split(message: str) -> tuple[str, str]:
    """A TrackingError says what is wrong and, after its last colon or semicolon, what to do."""
    at = max(message.rfind("; "), message.rfind(": unset"))
    return (message[:at], message[at + 2 :]) if at > 0 else (message, "see MLFLOW_TRACKING_URI")
