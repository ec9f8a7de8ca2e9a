"""Running the suites: a Great Expectations checkpoint per frame, one context, one set of Data Docs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import great_expectations as gx
import pandas as pd
from great_expectations.checkpoint import UpdateDataDocsAction
from great_expectations.checkpoint.actions import ValidationAction
from great_expectations.core.expectation_validation_result import ExpectationValidationResult
from great_expectations.data_context.types.base import (
    DataContextConfig,
    InMemoryStoreBackendDefaults,
    ProgressBarsConfig,
)

from tasks.gate.expectations import Check, Suite
from tasks.gate.report import BadRow, CheckResult

DOCS_SITE = "data_gate"
_VALUE_LENGTH = 120


def run_suites(
    suites: list[Suite], frames: dict[str, pd.DataFrame], report_rows: int, docs_dir: Path | None
) -> list[CheckResult]:
    """Check every frame, write Data Docs into `docs_dir` (if given); results are in the checks' order."""
    # GX logs each exception inside an expectation with its traceback; the result holds the message already.
    logging.getLogger("great_expectations").setLevel(logging.CRITICAL)
    context = gx.get_context(project_config=_context_config(docs_dir), mode="ephemeral")
    actions: list[ValidationAction] = (
        [UpdateDataDocsAction(name="data_docs", site_names=[DOCS_SITE])] if docs_dir else []
    )
    source = context.data_sources.add_or_update_pandas("data")
    results: list[CheckResult] = []
    for suite in suites:
        frame = frames[suite.frame].rename_axis("row").reset_index()
        expectations = [check.expectation for check in suite.checks]
        for number, expectation in enumerate(expectations):
            expectation.meta = {"number": number}  # results come back in another order
        definition = context.validation_definitions.add_or_update(
            gx.ValidationDefinition(
                name=suite.frame,
                data=source.add_dataframe_asset(suite.frame).add_batch_definition_whole_dataframe("all"),
                suite=context.suites.add_or_update(
                    gx.ExpectationSuite(name=suite.frame, expectations=expectations)
                ),
            )
        )
        checkpoint = context.checkpoints.add_or_update(
            gx.Checkpoint(
                name=suite.frame,
                validation_definitions=[definition],
                actions=actions,
                result_format={
                    "result_format": "SUMMARY",
                    "unexpected_index_column_names": ["row", suite.key, "file"],
                    "partial_unexpected_count": report_rows,
                },
            )
        )
        run = checkpoint.run(batch_parameters={"dataframe": frame})
        (validation,) = run.run_results.values()
        by_number = {_config(result).meta["number"]: result for result in validation.results}
        results += [
            _check_result(suite, check, by_number[number], frame) for number, check in enumerate(suite.checks)
        ]
    return results


def _context_config(docs_dir: Path | None) -> DataContextConfig:
    sites = {} if docs_dir is None else {DOCS_SITE: _site_config(docs_dir)}
    return DataContextConfig(
        store_backend_defaults=InMemoryStoreBackendDefaults(init_temp_docs_sites=False),
        analytics_enabled=False,
        progress_bars=ProgressBarsConfig(globally=False),
        data_docs_sites=sites,
    )


def _site_config(docs_dir: Path) -> dict[str, Any]:
    return {
        "class_name": "SiteBuilder",
        "store_backend": {
            "class_name": "TupleFilesystemStoreBackend",
            "base_directory": str(docs_dir.resolve()),
        },
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
    }


def _check_result(
    suite: Suite, check: Check, result: ExpectationValidationResult, frame: pd.DataFrame
) -> CheckResult:
    details: dict[str, Any] = result.result or {}
    config = _config(result)
    observed = details.get("observed_value")
    indices = details.get("partial_unexpected_index_list") or []
    return CheckResult(
        frame=suite.frame,
        about=check.about,
        expectation=config.type,
        column=str(config.kwargs.get("column") or ",".join(config.kwargs.get("column_list", ()))),
        success=bool(result.success),
        checked=int(details.get("element_count", len(frame))),
        bad=int(details.get("unexpected_count", 0)),
        observed="" if observed is None else str(observed),
        error=_exception_text(result.exception_info),
        first=tuple(_bad_row(frame.loc[int(index["row"])], suite.key, check.shows) for index in indices),
    )


def _config(result: ExpectationValidationResult) -> Any:
    assert result.expectation_config is not None  # it is optional in the type only
    return result.expectation_config


def _bad_row(row: pd.Series, key: str, shows: tuple[str, ...]) -> BadRow:
    value = ", ".join(f"{column}={_short(row[column])}" for column in shows)
    turn = f" turn {row['turn']}" if "turn" in row else ""
    return BadRow(f"{row[key]}{turn}", value, str(row["file"]))


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _VALUE_LENGTH else text[: _VALUE_LENGTH - 1] + "…"


def _exception_text(info: dict[str, Any] | None) -> str:
    """The messages of what went wrong inside an expectation; GX nests them per metric, or not."""
    nested = [info or {}, *(value for value in (info or {}).values() if isinstance(value, dict))]
    messages = {entry.get("exception_message") for entry in nested}
    return "; ".join(sorted(" ".join(message.split()) for message in messages if message))
