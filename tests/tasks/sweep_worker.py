"""A worker of a sweep whose trials are a formula: run by test_sweep_study.py, several at once, and killed.

python -m tests.tasks.sweep_worker FOLDER [--hang-in TRIAL]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from tasks.sweep_plan import load_plan
from tasks.sweep_study import SweepStudy, Values, work


def formula(settings: dict[str, Any]) -> float:
    """Best near λ_tool = 2."""
    return 1 / (1 + (settings["reward.lambda_tool"] - 2) ** 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hang-in", type=int, default=-1)
    arguments = parser.parse_args()
    plan = load_plan(arguments.folder)

    def run_trial(trial: Any, settings: dict[str, Any]) -> Values:
        if trial.number == arguments.hang_in:
            print("hangs", flush=True)
            time.sleep(600)
        time.sleep(0.05)  # so that every worker gets some
        return {"success": formula(settings)}

    work(SweepStudy(plan), run_trial)


if __name__ == "__main__":
    main()
