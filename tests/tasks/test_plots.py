"""Risks: curves that lose what a killed attempt logged, pages that DVC cannot draw, plots of files nobody makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.dvc_graph import read_stages
from tasks.params import PROJECT_ROOT, Params, read_yaml
from tasks.plots import MAX_ROWS, thin, write_accuracy_by_size, write_curves, write_summary
from tasks.tracking import stage_run


def test_a_curve_has_the_steps_of_an_earlier_attempt(params: Params, records: Path, tmp_path: Path) -> None:
    def attempt(first: int, last: int) -> None:
        with stage_run("sft", params, root=records) as run:
            for step in range(first, last):
                run.log_metrics({"sft/loss": 1 / step}, step)
            if last < 9:
                raise RuntimeError("killed")
            write_curves(run, ["sft/loss", "sft/validation_loss"], tmp_path / "curves")

    with pytest.raises(RuntimeError):
        attempt(1, 5)
    attempt(3, 9)
    lines = (tmp_path / "curves" / "loss.csv").read_text().splitlines()
    assert lines[:2] == ["step,loss", "1,1.0"]
    assert [int(line.split(",")[0]) for line in lines[1:]] == list(range(1, 9))
    assert (tmp_path / "curves" / "validation_loss.csv").read_text() == "step,validation_loss\n"


def test_long_curves_keep_their_ends() -> None:
    steps = list(range(1, 12_346))
    kept = thin(steps, MAX_ROWS)
    assert len(kept) == len(set(kept)) == MAX_ROWS
    assert (kept[0], kept[-1]) == (1, 12_345)


def test_accuracies_become_one_column_per_line_and_the_summary_stays_small(tmp_path: Path) -> None:
    def accuracy(value: float | None) -> dict[str, object]:
        return {"accuracy": value, "n": 4, "ci95": None if value is None else [0.1, 0.9]}

    summary = {
        "by_size": {
            "navigation": {"4": accuracy(0.5), "10": accuracy(0.25)},
            "verification": {"4": accuracy(1.0)},
        },
        "navigation": accuracy(0.5),
        "verification": accuracy(None),
        "overall": accuracy(0.75),
        "calls_per_episode": {"mean": 3.5, "ci95": [3.0, 4.0]},
    }
    write_accuracy_by_size({"grpo": summary}, tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == (
        "size,grpo_navigation,grpo_verification\n4,0.5,1.0\n10,0.25,\n"
    )
    write_summary({"held_out": {"grpo": summary}}, tmp_path / "s.json")
    numbers = {"navigation": 0.5, "overall": 0.75, "calls_per_episode": 3.5}
    assert json.loads((tmp_path / "s.json").read_text()) == {"held_out": {"grpo": numbers}}


def test_every_plot_is_of_a_file_that_a_stage_makes() -> None:
    outs = [out for stage in read_stages(PROJECT_ROOT).values() for out in stage.outs]
    sources: list[str] = []
    for plot in read_yaml(PROJECT_ROOT / "dvc.yaml")["plots"]:
        if isinstance(plot, str):
            sources.append(plot)
        else:
            ((name, body),) = plot.items()
            drawn = (body or {}).get("y", name)
            sources += list(drawn) if isinstance(drawn, dict) else [name]
    assert not [
        name for name in sources if not any(name == out or name.startswith(f"{out}/") for out in outs)
    ]
