"""Curves and accuracies as small files, for `dvc plots show`, `dvc plots diff` and `dvc metrics diff`."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.tracked_run import StageRun

MAX_ROWS = 200  # DVC puts every point into the page
_ACCURACIES = ("navigation", "verification", "overall")


def write_curves(run: StageRun, names: Sequence[str], folder: Path) -> None:
    """A file per metric of the run: `sft/loss` becomes `loss.csv` with the columns step and loss.

    Read back from the run, because only there stand the steps of earlier attempts too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        curve = run.history(name)
        column = name.rpartition("/")[2]
        steps = thin(sorted(curve), MAX_ROWS)
        _write_csv(folder / f"{column}.csv", ("step", column), [(step, curve[step]) for step in steps])


def thin(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps, evenly spread, the first and the last among them."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


def write_accuracy_by_size(policies: Mapping[str, Any], file: Path) -> None:
    """One suite of `evaluation_report.summarise`: a row per map size, columns such as `grpo_navigation`."""
    cells: dict[int, dict[str, float]] = {}
    for policy, summary in policies.items():
        for task, sizes in summary["by_size"].items():
            for size, entry in sizes.items():
                cells.setdefault(int(size), {})[f"{policy}_{task}"] = entry["accuracy"]
    columns = sorted({column for row in cells.values() for column in row})
    rows = [(size, *(row.get(column) for column in columns)) for size, row in sorted(cells.items())]
    _write_csv(file, ("size", *columns), rows)


def write_summary(metrics: Mapping[str, Any], file: Path) -> None:
    """The few numbers of `evaluation_report.summarise` that a table of differences should show."""
    summary = {
        suite: {policy: _few(of_policy) for policy, of_policy in policies.items()}
        for suite, policies in metrics.items()
    }
    file.write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _few(summary: Mapping[str, Any]) -> dict[str, float]:
    accuracies = {name: summary[name]["accuracy"] for name in _ACCURACIES}
    numbers = accuracies | {"calls_per_episode": summary["calls_per_episode"]["mean"]}
    return {name: value for name, value in numbers.items() if value is not None}


def _write_csv(file: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
