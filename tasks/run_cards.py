"""What a run is made of, for people who look at it in Prefect: the data, the gate's verdict, links to MLflow."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tasks.dvc_graph import lock_digest

_LOCAL_MLFLOW = "http://127.0.0.1:5000"  # where `make up` and `make mlflow-ui` serve


def data_card(root: Path) -> str | None:
    """Markdown about the cold start, from its manifest; None if there is no data yet."""
    manifest = _read(root / "data" / "cold_start" / "manifest.json")
    if manifest is None:
        return None
    config = manifest["config"]
    rows = ["| split | rows | maps |", "|---|---|---|"]
    rows += [f"| {name} | {part['rows']} | {part['maps']} |" for name, part in manifest["splits"].items()]
    size = sum(file["bytes"] for file in manifest["files"].values())
    facts = [
        f"- version: MD5 `{lock_digest(root, 'cold_start', 'data/cold_start') or 'not recorded'}`",
        f"- size: {size / 1e6:.1f} MB in {len(manifest['files'])} files",
        f"- seed {manifest['seed']}, hole density {config['hole_density']}, map sizes {config['sizes']}",
        f"- test sizes {config['test_sizes']}; train, validation and test share no map",
    ]
    return "\n".join(["# Cold start: expert trajectories on VSP", "", *facts, "", *rows])


def validation_summary(root: Path) -> str | None:
    """Markdown about the data gate, from its report; None if it has not run."""
    report = _read(root / "outputs" / "validation" / "report.json")
    if report is None:
        return None
    verdict = "passed" if report["success"] else "**failed**"
    counted = ", ".join(f"{count} {frame}" for frame, count in report["rows"].items())
    lines = [
        f"# The data {verdict}",
        "",
        f"{report['expectations'] - report['failed']} of {report['expectations']} expectations hold ({counted}).",
    ]
    failures = [result for result in report["results"] if not result["success"]]
    if failures:
        lines += ["", "| frame | expectation | column | bad | checked |", "|---|---|---|---|---|"]
        lines += [
            f"| {each['frame']} | {each['about']} | {each['column']} | {each['bad']} | {each['checked']} |"
            for each in failures
        ]
    return "\n".join(lines)


def mlflow_page(experiment_id: str, run_id: str, artifact: str | None = None) -> str:
    """Address of a run in MLflow's pages, or of one of its artifacts."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    server = uri.rstrip("/") if uri.startswith(("http://", "https://")) else _LOCAL_MLFLOW
    page = f"{server}/#/experiments/{experiment_id}/runs/{run_id}"
    return page if artifact is None else f"{page}/artifacts/{artifact}"


def _read(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
