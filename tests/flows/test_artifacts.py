"""Risk of extras: a table that Prefect refuses turns a finished training red."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prefect import flow

from flows.artifacts import StageProgress, artifact_key, show_link, show_markdown, show_table
from tasks.dvc_graph import read_stages


@pytest.mark.parametrize("text", [*read_stages(), "Bad_Key", "a  b/c", "-x-"])
def test_keys_are_as_prefect_allows_them(text: str) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", artifact_key(f"progress-{text}"))


@pytest.mark.usefixtures("prefect_server")
def test_what_prefect_refuses_is_a_warning_and_the_flow_goes_on() -> None:
    @flow
    def shows() -> str:
        show_markdown("_", "a key with nothing left is refused")
        show_table("odd numbers", [{"value": float("nan")}, {"value": float("inf")}])
        show_link("_", "nowhere", "no address")
        progress = StageProgress("cold_start", interval_s=0)
        for line in (
            "cold start: 0 of 0 rows",
            "cold start: 1 of 2 rows",
            "hello: 5 of",
            "sft: 2 of 2, 0 s left",
        ):
            progress.follow(line)
        return "done"

    state: Any = shows(return_state=True)
    assert state.is_completed()
    assert state.result() == "done"
