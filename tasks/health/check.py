"""One finding of `python -m tasks.doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """`warn` does not stop a run, `fail` does."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """What was looked at, how it stands, and, unless it is ok, how to mend it."""

    name: str
    status: Status
    finding: str
    remedy: str = ""

    def line(self) -> str:
        """One line for the console."""
        end = f"; {self.remedy}" if self.remedy else ""
        return f"{self.status:<4}  {self.name:<12} {' '.join(self.finding.split())}{end}"


def ok(name: str, finding: str) -> Check:
    """All is well."""
    return Check(name, Status.OK, finding)


def warn(name: str, finding: str, remedy: str) -> Check:
    """A run goes on, but the user should know."""
    return Check(name, Status.WARN, finding, remedy)


def fail(name: str, finding: str, remedy: str) -> Check:
    """A run would fail or do harm."""
    return Check(name, Status.FAIL, finding, remedy)
