"""Risks: a results table that hides missing or doubled items, figures whose bytes change, a wrong overall."""

import json

import numpy as np
import pandas as pd
import pytest

from tasks.evaluation_report import (
    ITEM_COLUMNS,
    ItemsError,
    accuracy_figure,
    compare,
    markdown_table,
    save_figure,
    stop_reason_figure,
    summarise,
)


def make_items(skill: dict[str, float], n: int = 40, suite: str = "held_out", seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    rows = []
    for policy, share in skill.items():
        for index in range(n):
            task = "navigation" if index % 2 else "verification"
            rows.append(
                {
                    "suite": suite,
                    "policy": policy,
                    "prompt_id": f"{task}-{index}",
                    "task": task,
                    "tools": "POINT,DRAW2DPATH",
                    "size": 3 + index % 7,
                    "path_length": 1 + index % 9,
                    "correct": bool(rng.random() < share),
                    "calls": int(rng.integers(0, 5)),
                    "stop_reason": "answered" if rng.random() < 0.9 else "max_turns",
                    "tokens": int(rng.integers(50, 200)),
                }
            )
    return pd.DataFrame(rows, columns=list(ITEM_COLUMNS))


@pytest.fixture
def items() -> pd.DataFrame:
    return make_items({"sft": 0.7, "grpo": 0.9, "baseline": 0.3})


def test_metrics_have_the_promised_shape_and_count_every_item_once(items):
    metrics = summarise(items)
    assert list(metrics["held_out"]) == ["sft", "grpo", "baseline"]
    summary = metrics["held_out"]["grpo"]
    of_policy = items[items["policy"] == "grpo"]
    assert summary["overall"]["accuracy"] == pytest.approx(of_policy["correct"].mean())
    assert set(summary["navigation"]) == {"accuracy", "n", "ci95"}
    for breakdown in ("by_size", "by_path_length", "by_tools"):
        for task in ("navigation", "verification"):
            assert sum(entry["n"] for entry in summary[breakdown][task].values()) == summary[task]["n"]
    assert sum(summary["stop_reasons"].values()) == pytest.approx(1)
    low, high = summary["calls_per_episode"]["ci95"]
    assert low <= summary["calls_per_episode"]["mean"] == of_policy["calls"].mean() <= high
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics


def test_metrics_are_the_same_for_any_row_order(items):
    shuffled = items.sample(frac=1, random_state=1).sort_values(
        "policy", key=lambda p: p != "sft", kind="stable"
    )
    first, second = summarise(items), summarise(shuffled)
    assert first["held_out"]["sft"] == second["held_out"]["sft"]
    assert first["held_out"]["grpo"] == second["held_out"]["grpo"]


def test_overall_of_a_part_of_the_benchmark_keeps_the_published_weights():
    items = make_items({"grpo": 0.8}, suite="benchmark", n=60).iloc[:45]
    summary = summarise(items)["benchmark"]["grpo"]
    expected = (600 * summary["navigation"]["accuracy"] + 500 * summary["verification"]["accuracy"]) / 1100
    assert summary["overall"]["accuracy"] == pytest.approx(expected)
    assert summary["overall"]["n"] == 45


def test_a_task_without_items_is_null_not_zero():
    items = make_items({"grpo": 0.8})
    metrics = summarise(items[items["task"] == "navigation"])
    assert metrics["held_out"]["grpo"]["verification"] == {"accuracy": None, "n": 0, "ci95": None}
    assert "| – |" in markdown_table(metrics)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: f.drop(columns="tools"), "lack the columns tools"),
        (lambda f: f.iloc[:0], "nothing was evaluated"),
        (lambda f: f.assign(calls=[np.nan] + [1.0] * (len(f) - 1)), "nulls: {'calls': 1}"),
        (lambda f: pd.concat([f, f.iloc[:2]]), "2 evaluation items stand twice"),
        (lambda f: f.assign(task="jigsaw"), "unknown tasks"),
    ],
)
def test_broken_items_are_refused_in_one_line(items, spoil, message):
    with pytest.raises(ItemsError, match=message) as caught:
        summarise(spoil(items))
    assert "\n" not in str(caught.value)


def test_policies_are_compared_on_the_same_items(items):
    result = compare(items, "grpo", "baseline")["held_out"]
    paired = items.pivot(index="prompt_id", columns="policy", values="correct")
    assert result["overall"]["difference"] == pytest.approx(paired["grpo"].mean() - paired["baseline"].mean())
    assert result["overall"]["better"]
    assert result["navigation"]["n"] + result["verification"]["n"] == result["overall"]["n"]
    json.dumps(result, allow_nan=False)


def test_comparison_of_other_items_is_refused(items):
    with pytest.raises(ItemsError, match="1 items were not answered by both"):
        compare(items.drop(items.index[0]), "grpo", "sft")
    with pytest.raises(ItemsError, match="no results of critic"):
        compare(items, "critic", "sft")


def test_figures_have_the_same_bytes_twice(items, tmp_path):
    metrics = summarise(items)
    written = []
    for run in ("a", "b"):
        save_figure(accuracy_figure(metrics, "held_out"), tmp_path / run / "size.png")
        save_figure(accuracy_figure(metrics, "held_out", "path_length"), tmp_path / run / "length.png")
        save_figure(stop_reason_figure(metrics, "held_out"), tmp_path / run / "stops.png")
        written.append([path.read_bytes() for path in sorted((tmp_path / run).iterdir())])
    assert written[0] == written[1]


def test_a_suite_of_one_task_has_figures_too(items, tmp_path, recwarn):
    metrics = summarise(items[(items["task"] == "navigation") & (items["policy"] != "baseline")])
    save_figure(accuracy_figure(metrics, "held_out"), tmp_path / "a.png")
    save_figure(stop_reason_figure(metrics, "held_out"), tmp_path / "b.png")
    assert not list(recwarn)


def test_table_names_every_suite_and_policy(items):
    metrics = summarise(pd.concat([items, make_items({"grpo": 1.0}, suite="benchmark")]))
    table = markdown_table(metrics)
    assert table.count("\n") == 2 + 4
    assert "| benchmark | grpo | 100.0 % [83.9, 100.0] (n = 20) |" in table
