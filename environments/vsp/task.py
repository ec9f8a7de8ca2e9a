"""The two questions of VSP."""

from __future__ import annotations

from enum import StrEnum


class Task(StrEnum):
    """Find a safe path, or judge one."""

    NAVIGATION = "navigation"
    VERIFICATION = "verification"
