"""The gate's verdict: what was checked, what failed, and the first rows that made it fail.

Great Expectations' own result holds run ids, times and absolute paths. This one depends on the data alone,
so that DVC sees the same bytes for the same data.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class BadRow:
    """A row that fails an expectation: its id, the value that is wrong, and the file it is in."""

    key: str
    value: str
    file: str


@dataclass(frozen=True)
class CheckResult:
    """One expectation on one frame: `bad` of `checked` rows fail; `observed` is of whole-table checks."""

    frame: str
    about: str
    expectation: str
    column: str
    success: bool
    checked: int
    bad: int
    observed: str
    error: str
    first: tuple[BadRow, ...]

    def lines(self) -> list[str]:
        """A line for the expectation, and one for each of the first bad rows."""
        if self.error:
            found = f"could not be evaluated ({self.error})"
        elif self.observed:
            found = f"found {self.observed}"
        else:
            found = f"{self.bad} of {self.checked} rows are bad"
        name = f"{self.expectation}({self.column})" if self.column else self.expectation
        rows = [f"  {row.key}: {row.value}" + (f" in {row.file}" if row.file else "") for row in self.first]
        return [f"{self.frame}: {self.about}: {found} [{name}]", *rows]


@dataclass(frozen=True)
class GateReport:
    """All results, and the number of rows of each frame."""

    rows: dict[str, int]
    results: tuple[CheckResult, ...]

    @property
    def ingested_share(self) -> float:
        """Share of the trajectories that came from elsewhere (`tasks.ingest`), validation ones included."""
        ingested = self.rows.get("ingested", 0)
        return ingested / max(1, ingested + self.rows.get("trajectories", 0))

    @property
    def success(self) -> bool:
        return all(result.success for result in self.results)

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        return tuple(result for result in self.results if not result.success)

    def lines(self) -> list[str]:
        """What a person needs to read: every failed expectation and its first bad rows, or that all hold."""
        total = len(self.results)
        counted = ", ".join(f"{count} {frame}" for frame, count in self.rows.items())
        if self.ingested_share:
            counted += f"; {self.ingested_share:.1%} of the trajectories are ingested"
        if self.success:
            return [f"the data passed: all {total} expectations hold ({counted})"]
        head = f"the data failed {len(self.failures)} of {total} expectations ({counted})"
        return [head, *(line for failure in self.failures for line in failure.lines())]

    def to_json(self) -> str:
        """The report as text that depends on nothing but the data."""
        document: dict[str, Any] = {
            "success": self.success,
            "rows": self.rows,
            "expectations": len(self.results),
            "failed": len(self.failures),
            "results": [asdict(result) for result in self.results],
        }
        return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


class GateFailed(Exception):
    """The data is not fit to train on. The message has a line per failed expectation and bad row."""

    def __init__(self, report: GateReport) -> None:
        super().__init__("\n".join(report.lines()))
        self.report = report
