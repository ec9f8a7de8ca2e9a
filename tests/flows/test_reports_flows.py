"""Public reports about Prefect that are read from the code of flows/ and need no server."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import flows.artifacts as artifacts
from flows.artifacts import StageProgress, artifact_key, show_markdown, show_table
from tasks.dvc_graph import read_stages
from tasks.params import PROJECT_ROOT

FLOWS = sorted((PROJECT_ROOT / "flows").glob("*.py"))


def decorators(kind: str) -> Iterator[tuple[str, ast.expr]]:
    """`file:function` and the decorator of every Prefect task or flow in flows/."""
    for file in FLOWS:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for decorator in getattr(node, "decorator_list", ()):
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                if isinstance(called, ast.Name) and called.id == kind:
                    yield f"{file.name}:{node.name}", decorator  # type: ignore[attr-defined]


def settings(decorator: ast.expr) -> dict[str, str]:
    assert isinstance(decorator, ast.Call), "a bare decorator takes Prefect's defaults"
    return {each.arg or "": ast.unparse(each.value) for each in decorator.keywords}


def test_no_task_caches_and_no_result_is_stored() -> None:
    """PrefectHQ/prefect#15861, #10952: keys made of a part of the inputs, and results that pile up in memory and on
    disk. DVC knows what is up to date; Prefect must not think it does."""
    found = dict(decorators("task"))
    assert {"stage.py:run_stage", "reap.py:close_orphans"} <= set(found)
    for name, decorator in found.items():
        assert settings(decorator)["cache_policy"] == "NO_CACHE", name
        assert settings(decorator).get("persist_result", "False") == "False", name
    for name, decorator in decorators("flow"):
        assert settings(decorator).get("persist_result", "False") == "False", name


def test_no_result_of_a_task_is_submitted_and_forgotten() -> None:
    """A future that nobody resolves hides a failure: the flow is green over a red task."""
    for file in FLOWS:
        text = file.read_text(encoding="utf-8")
        assert ".submit(" not in text or ".result(" in text, file.name
        assert "return_exceptions=True" not in text, file.name


def test_every_flow_and_task_says_what_it_returns_in_small_types() -> None:
    """PrefectHQ/prefect#12668: a DataFrame that goes from task to task stays in memory. Paths and numbers do not."""
    large = ("DataFrame", "ndarray", "Tensor", "bytes", "Trajectory")
    for file in FLOWS:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.decorator_list and node.returns is not None:
                assert not [word for word in large if word in ast.unparse(node.returns)], (
                    f"{file.name}:{node.name}"
                )


@pytest.mark.parametrize("text", [*read_stages(), "Bad_Key", "progress-cold_start", "éà ok", "__a__"])
def test_keys_of_artifacts_are_what_prefect_allows(text: str) -> None:
    from prefect.client.schemas.actions import ArtifactCreate

    key = artifact_key(text)
    assert ArtifactCreate(key=key, type="markdown", data="x").key == key
    assert key


def test_an_artifact_that_prefect_refuses_is_a_warning_and_never_a_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`Bad_Key` failed a whole flow. Here every kind of artifact meets a server that refuses everything."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("the server is away")

    for name in ("create_markdown_artifact", "create_table_artifact", "create_progress_artifact"):
        monkeypatch.setattr(artifacts, name, refuse)
    monkeypatch.setattr(artifacts, "get_run_logger", lambda: logging.getLogger("flows.test"))
    show_markdown("a page", "text")
    show_table("a table", [{"a": 1}])
    StageProgress("sft").follow("sft: 3 of 10, 4 s left")
    assert len([record for record in caplog.records if "the server is away" in record.getMessage()]) == 3


def test_every_automation_watches_our_runs_only() -> None:
    """An automation without a filter would cancel and crash the runs of other teams on the same server."""
    from tasks.params import read_yaml

    files = sorted(Path(PROJECT_ROOT / "automations").glob("*.yaml"))
    assert {file.stem for file in files} >= {"crashed", "failed", "late"}
    for file in files:
        trigger = read_yaml(file)["trigger"]
        assert "toolplan" in str(trigger.get("match_related", trigger["match"])), file.name
