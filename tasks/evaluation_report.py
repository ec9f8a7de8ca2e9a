"""From per-item evaluation results to metrics, figures and a table. Pure; only `save_figure` writes.

An items frame has one row per (suite, policy, prompt), with the columns of `ITEM_COLUMNS`:
suite str (held_out | benchmark), policy str, prompt_id str, task str (navigation | verification), tools str
(the offered tools, joined by commas), size int (cells per side), path_length int (moves: of the question's
path, or of the shortest solution), correct bool, calls int, stop_reason str, tokens int. Suites and
policies are reported in the order of their first row.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from models.statistics import (
    Proportion,
    bootstrap_mean_interval,
    paired_comparison,
    proportion,
    weighted_proportion,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ITEM_COLUMNS = (
    *("suite", "policy", "prompt_id", "task", "tools", "size", "path_length"),
    *("correct", "calls", "stop_reason", "tokens"),
)
TASKS = ("navigation", "verification")
BREAKDOWNS = ("size", "path_length", "tools")
# The VSP benchmark has 600 navigation and 500 verification items, and its overall is the mean over all
# 1,100. The weights keep a part of it (27 sample items, say) comparable with published numbers.
BENCHMARK_WEIGHTS: Mapping[str, float] = {"navigation": 600, "verification": 500}
# Colours that stay apart for colour-blind readers (Okabe & Ito 2008, "Color Universal Design").
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


class ItemsError(ValueError):
    """An items frame that cannot be reported: a column is missing, a value is null, an item stands twice."""


def check_items(items: pd.DataFrame) -> None:
    """Raise ItemsError in one line if `items` is not a frame as the module describes it."""
    if missing := [column for column in ITEM_COLUMNS if column not in items]:
        raise ItemsError(f"evaluation items lack the columns {', '.join(missing)}")
    if items.empty:
        raise ItemsError("no evaluation items: nothing was evaluated")
    nulls = items[list(ITEM_COLUMNS)].isna().sum()
    if nulls.any():
        raise ItemsError(f"evaluation items hold nulls: {nulls[nulls > 0].to_dict()}")
    if unknown := sorted(set(items["task"]) - set(TASKS)):
        raise ItemsError(f"evaluation items of unknown tasks {unknown}, known are {', '.join(TASKS)}")
    keys = ["suite", "policy", "prompt_id"]
    if (twice := items.duplicated(keys)).any():
        first = items.loc[twice, keys].iloc[0].to_dict()
        raise ItemsError(f"{int(twice.sum())} evaluation items stand twice, the first is {first}")


def summarise(items: pd.DataFrame, confidence: float = 0.95, seed: int = 0) -> dict[str, Any]:
    """Metrics as JSON values: `{suite: {policy: {navigation, verification, overall, by_size, …}}}`.

    An accuracy is `{"accuracy": float, "n": int, "ci95": [low, high]}` (None for both when n is 0; the key
    follows `confidence`). `overall` is over all items, in the suite "benchmark" weighted by
    BENCHMARK_WEIGHTS. `by_<column>` is `{task: {value: accuracy}}`, `stop_reasons` `{reason: share}`,
    `calls_per_episode` and `tokens_per_episode` `{"mean", "ci95"}`. Raises ItemsError.
    """
    check_items(items)
    return {
        str(suite): {
            str(policy): _summarise_policy(rows, str(suite), confidence, seed)
            for policy, rows in of_suite.groupby("policy", sort=False)
        }
        for suite, of_suite in items.groupby("suite", sort=False)
    }


def _summarise_policy(rows: pd.DataFrame, suite: str, confidence: float, seed: int) -> dict[str, Any]:
    summary: dict[str, Any] = {
        task: _accuracy(_proportion(rows[rows["task"] == task], confidence), confidence) for task in TASKS
    }
    summary["overall"] = _accuracy(_overall(rows, suite, confidence), confidence)
    for column in BREAKDOWNS:
        summary[f"by_{column}"] = {
            task: {
                str(value): _accuracy(_proportion(part, confidence), confidence)
                for value, part in rows[rows["task"] == task].groupby(column)
            }
            for task in TASKS
        }
    shares = rows["stop_reason"].value_counts(normalize=True).sort_index()
    summary["stop_reasons"] = {str(reason): float(share) for reason, share in shares.items()}
    for column in ("calls", "tokens"):
        interval = bootstrap_mean_interval(rows[column].to_numpy(), confidence, seed)
        summary[f"{column}_per_episode"] = {
            "mean": float(rows[column].mean()),
            _interval_key(confidence): list(interval),
        }
    return summary


def compare(
    items: pd.DataFrame, challenger: str, champion: str, confidence: float = 0.95, seed: int = 0
) -> dict[str, Any]:
    """Paired comparison of two policies on the same items: `{suite: {navigation, verification, overall}}`.

    Each is `{"difference", "n", "wins", "losses", "ci95", "p_value", "better"}`; a task without items is
    left out. Raises ItemsError when a policy is absent or the two did not answer the same items of a suite.
    """
    check_items(items)
    result: dict[str, Any] = {}
    for suite, of_suite in items.groupby("suite", sort=False):
        table = of_suite.pivot(index=["task", "prompt_id"], columns="policy", values="correct")
        if missing := [policy for policy in (challenger, champion) if policy not in table]:
            raise ItemsError(f"suite {suite} has no results of {', '.join(missing)}")
        pair = table[[challenger, champion]]
        if unpaired := int(pair.isna().any(axis=1).sum()):
            raise ItemsError(
                f"suite {suite}: {unpaired} items were not answered by both {challenger}, {champion}"
            )
        tasks = pair.index.get_level_values("task")
        parts = {task: pair[tasks == task] for task in TASKS} | {"overall": pair}
        result[str(suite)] = {
            name: _comparison(part, challenger, champion, confidence, seed)
            for name, part in parts.items()
            if len(part)
        }
    return result


def _comparison(
    pair: pd.DataFrame, challenger: str, champion: str, confidence: float, seed: int
) -> dict[str, Any]:
    compared = paired_comparison(
        pair[challenger].to_numpy(dtype=float), pair[champion].to_numpy(dtype=float), confidence, seed
    )
    return {
        "difference": compared.difference,
        "n": compared.n,
        "wins": compared.wins,
        "losses": compared.losses,
        _interval_key(confidence): list(compared.interval),
        "p_value": compared.p_value,
        "better": compared.better,
    }


def markdown_table(metrics: Mapping[str, Any]) -> str:
    """The result of `summarise` as a Markdown table: a row per suite and policy, with intervals."""
    lines = [
        "| suite | policy | navigation | verification | overall | calls per episode |",
        "|---|---|---|---|---|---|",
    ]
    for suite, policies in metrics.items():
        for policy, summary in policies.items():
            cells = [accuracy_text(summary[name]) for name in (*TASKS, "overall")]
            calls = f"{summary['calls_per_episode']['mean']:.2f}"
            lines.append(f"| {suite} | {policy} | {' | '.join(cells)} | {calls} |")
    return "\n".join(lines) + "\n"


def accuracy_text(accuracy: Mapping[str, Any]) -> str:
    """`97.6 % [96.1, 98.5] (n = 600)`, or a dash when nothing was counted."""
    if accuracy["accuracy"] is None:
        return "–"
    low, high = next(value for key, value in accuracy.items() if key.startswith("ci"))
    return f"{100 * accuracy['accuracy']:.1f} % [{100 * low:.1f}, {100 * high:.1f}] (n = {accuracy['n']})"


def accuracy_figure(metrics: Mapping[str, Any], suite: str, breakdown: str = "size") -> Figure:
    """Accuracy over `breakdown` (size | path_length) with intervals: a panel per task, a line per policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, len(TASKS), sharey=True)
    for task, axes in zip(TASKS, panels, strict=True):
        policies = metrics[suite]
        for index, (policy, summary) in enumerate(policies.items()):
            points = [(int(value), entry) for value, entry in summary[f"by_{breakdown}"][task].items()]
            if not points:
                continue
            points.sort(key=lambda point: point[0])
            heights = np.array([entry["accuracy"] for _, entry in points])
            limits = np.array(
                [next(v for k, v in entry.items() if k.startswith("ci")) for _, entry in points]
            )
            # Policies stand side by side, so that their intervals stay readable where they agree.
            offset = 0.12 * (index - (len(policies) - 1) / 2)
            axes.errorbar(
                np.array([value for value, _ in points]) + offset,
                100 * heights,
                yerr=100 * np.abs(limits.T - heights),
                label=policy,
                color=PALETTE[index % len(PALETTE)],
                marker="o",
                capsize=3,
            )
        axes.set(title=task, xlabel=breakdown.replace("_", " "), ylim=(-3, 103))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy, %")
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")
    figure.suptitle(f"accuracy on {suite.replace('_', ' ')} by {breakdown.replace('_', ' ')}")
    return figure


def stop_reason_figure(metrics: Mapping[str, Any], suite: str) -> Figure:
    """How episodes ended: a stacked bar per policy."""
    from matplotlib.figure import Figure

    policies = metrics[suite]
    reasons = sorted({reason for summary in policies.values() for reason in summary["stop_reasons"]})
    figure = Figure(figsize=(8, 1.5 + 0.5 * len(policies)), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(policies))
    for index, reason in enumerate(reasons):
        shares = np.array([100 * summary["stop_reasons"].get(reason, 0.0) for summary in policies.values()])
        axes.barh(list(policies), shares, left=left, label=reason, color=PALETTE[index % len(PALETTE)])
        left += shares
    axes.invert_yaxis()
    axes.set(xlabel="episodes, %", xlim=(0, 100), title=f"stop reasons on {suite.replace('_', ' ')}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG whose bytes depend on the figure alone (no program version in its metadata)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120, metadata={"Software": None})


def _overall(rows: pd.DataFrame, suite: str, confidence: float) -> Proportion:
    if suite != "benchmark":
        return _proportion(rows, confidence)
    parts = [rows[rows["task"] == task] for task in TASKS]
    counts = [(int(part["correct"].sum()), len(part)) for part in parts]
    return weighted_proportion(counts, [BENCHMARK_WEIGHTS[task] for task in TASKS], confidence)


def _proportion(rows: pd.DataFrame, confidence: float) -> Proportion:
    return proportion(int(rows["correct"].sum()), len(rows), confidence)


def _accuracy(share: Proportion, confidence: float) -> dict[str, Any]:
    interval = None if share.interval is None else list(share.interval)
    return {"accuracy": share.value, "n": share.n, _interval_key(confidence): interval}


def _interval_key(confidence: float) -> str:
    return f"ci{100 * confidence:g}"
