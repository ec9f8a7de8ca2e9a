"""The text of a registered model's version: mlflow/model_card.md, filled in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from string import Template
from typing import Any

from tasks.dvc_graph import lock_digest
from tasks.params import PROJECT_ROOT, Params
from tasks.provenance import run_tags

TEMPLATE = PROJECT_ROOT / "mlflow" / "model_card.md"
_SHOWN = ("policy", "sft", "grpo", "reward")  # parameter blocks that shape the policy


def model_card(params: Params, root: Path, result: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """The card of the model that `result` (outputs/promotion.json) is about.

    Args:
        params: what it was trained and measured with.
        root: the project, whose dvc.lock, git and data gate are quoted.
        result: the promotion's outcome.
        metrics: outputs/evaluation/metrics.json.
    """
    from tasks.evaluation_report import markdown_table

    tags = run_tags(params, root)
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        name=result["model"],
        policy=result["policy"],
        profile=params.profile,
        seed=params.seed,
        model_sha256=result["model_sha256"],
        data_md5=lock_digest(root, "cold_start", "data/cold_start") or "not recorded",
        data_gate=data_gate(root),
        commit=tags.get("git.commit", "none"),
        dirty=tags.get("git.dirty", "unknown"),
        params_sha=tags["params.sha"],
        suite=result["suite"],
        confidence=f"{100 * params.evaluate.confidence:g}",
        table=markdown_table(metrics),
        by_size=_size_table(metrics[result["suite"]][result["policy"]]),
        verdict=result["verdict"],
        reason=result["reason"],
        comparison=comparison_text(result["comparison"]),
        sizes=", ".join(map(str, params.data.sizes)),
        hole_density=f"{params.data.hole_density:g}",
        max_turns=params.agent.max_turns,
        max_tokens=params.agent.max_tokens,
        parameters=_parameters(params),
    )


def data_gate(root: Path) -> str:
    """What the data gate said of the data, e.g. `passed, 86 of 86 expectations hold`."""
    file = root / "outputs" / "validation" / "report.json"
    if not file.is_file():
        return "not recorded"
    report = json.loads(file.read_text(encoding="utf-8"))
    held = report["expectations"] - report["failed"]
    verdict = "passed" if report["success"] else "failed"
    return f"{verdict}, {held} of {report['expectations']} expectations hold"


def comparison_text(compared: Mapping[str, Any] | None) -> str:
    """The paired comparison with the champion as one sentence; empty where there was none."""
    if compared is None:
        return ""
    low, high = compared["interval"]
    return (
        f"Against the champion on the same {compared['n']} items: {compared['wins']} won, "
        f"{compared['losses']} lost, difference {100 * compared['difference']:+.1f} points "
        f"[{100 * low:+.1f}, {100 * high:+.1f}], p = {compared['p_value']:.3g}."
    )


def _size_table(summary: Mapping[str, Any]) -> str:
    from tasks.evaluation_report import accuracy_text

    by_task = summary.get("by_size", {})
    sizes = sorted({int(size) for task in by_task.values() for size in task})
    rows = [f"| size | {' | '.join(by_task)} |", "|---" * (len(by_task) + 1) + "|"]
    for size in sizes:
        cells = [accuracy_text(task[str(size)]) if str(size) in task else "–" for task in by_task.values()]
        rows.append(f"| {size}×{size} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n" if sizes else "(not measured)\n"


def _parameters(params: Params) -> str:
    from ruamel.yaml import YAML

    text = StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump(params.model_dump(mode="json", include=set(_SHOWN)), text)
    return text.getvalue()
