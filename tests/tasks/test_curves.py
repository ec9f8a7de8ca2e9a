"""Risks of curves: runs of different settings averaged together, intervals of one run, pictures that are missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tasks.curves import CurvesError, band, bands, find_runs, settings, write_curves
from tasks.params import Params, override
from tasks.run_figures import run_figures
from tasks.tracking import pipeline_run, stage_run
from tasks.tracking_store import open_store, resolve_store

STEPS = 12


def trained(records: Path, params: Params, seed: int, lr: float) -> str:
    """A run with the curves of a short training."""
    chosen = override(params, {"seed": seed, "grpo.lr": lr, "tracking.system_metrics_interval_s": 600.0})
    with stage_run("grpo", chosen, records) as run:
        for step in range(STEPS):
            share = (step + seed) / (2 * STEPS)
            metrics = {"grpo/validation_success": share, "reward/total": share, "reward/tool": 4 * share}
            metrics |= {"reward/tool_min": 0.0, "reward/tool_max": 4.0, "grpo/updated_tokens": 10.0}
            metrics |= {"grpo/stop_answered": share, "grpo/stop_max_turns": 1 - share}
            run.log_metrics(metrics, step)
    return run.run_id


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> tuple[Path, list[str]]:
    """Two seeds of one learning rate and one of another."""
    from shutil import copy

    from tasks.params import load_params

    records, params = tmp_path_factory.mktemp("records"), load_params(profile="laptop")
    copy(empty_store, records / "mlflow.db")
    return records, [trained(records, params, *each) for each in ((0, 2e-4), (1, 2e-4), (0, 1e-3))]


def test_seeds_share_a_curve_with_an_interval_and_other_settings_do_not(
    store: tuple[Path, list[str]], params: Params, tmp_path: Path
) -> None:
    records, ids = store
    client, _ = open_store(resolve_store(params.tracking, records))
    drawn = bands(client, find_runs(client, ids, "grpo"), ["grpo/validation_*", "reward/total"], 0.95, 0)
    assert list(drawn) == ["grpo/validation_success", "reward/total"]
    of_lr = {each.label: each for each in drawn["reward/total"]}
    assert {label: each.runs for label, each in of_lr.items()} == {"grpo.lr=0.0002": 2, "grpo.lr=0.001": 1}
    repeated, alone = of_lr["grpo.lr=0.0002"], of_lr["grpo.lr=0.001"]
    assert repeated.mean[3] == pytest.approx(3.5 / (2 * STEPS))
    assert (repeated.low < repeated.mean).all()
    assert (repeated.mean < repeated.high).all()
    assert (alone.low == alone.high).all()
    files = write_curves(drawn, 0.95, tmp_path)
    assert [file.name for file in files] == ["grpo_validation_success.png", "reward_total.png", "index.html"]
    page = files[-1].read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "http" not in page


def test_a_curve_that_is_shorter_or_thinned_is_compared_at_common_steps() -> None:
    made = band("x", [{0: 1.0, 5: 2.0, 9: 3.0}, {0: 3.0, 9: 5.0}], 0.95, 0)
    assert (made.steps.tolist(), made.mean.tolist()) == ([0, 9], [2.0, 4.0])
    assert band("x", [{0: 1.0}, {1: 2.0}], 0.95, 0).steps.size == 0


def test_what_is_no_setting_separates_no_curves() -> None:
    first = {"seed": "0", "grpo.lr": "1", "tracking.tracking_uri": "a"}
    labels = settings({"a": first, "b": {**first, "seed": "1", "tracking.tracking_uri": "b"}})
    assert set(labels.values()) == {"all runs"}


def test_a_pipeline_run_stands_for_the_run_that_made_its_stage(
    store: tuple[Path, list[str]], params: Params
) -> None:
    records, ids = store
    with pipeline_run(params, records) as parent:
        parent.set_tags({"stage.grpo.run_id": ids[0]})
    client, _ = open_store(resolve_store(params.tracking, records))
    assert [run.info.run_id for run in find_runs(client, [parent.run_id, ids[0]], "grpo")] == [ids[0]]
    with pytest.raises(CurvesError, match="no MLflow run nonsense"):
        find_runs(client, ["nonsense"], "grpo")
    with pytest.raises(CurvesError, match="no curve named x/y"):
        bands(client, find_runs(client, ids, "grpo"), ["x/y"], 0.95, 0)


def test_a_stage_ends_with_pictures_of_its_curves(store: tuple[Path, list[str]], params: Params) -> None:
    records, ids = store
    client, _ = open_store(resolve_store(params.tracking, records))
    stored = {item.path for item in client.list_artifacts(ids[0], "plots")}
    assert stored == {
        f"plots/{name}.png" for name in ("learning_curves", "reward_components", "stop_reasons")
    }
    learning = run_figures(client, ids[0])["learning_curves"]
    validation = learning.axes[0]
    assert validation.get_title() == "success on validation questions"
    assert len(validation.collections) == 1, "no interval around a share of a few answers"
    assert np.allclose(validation.lines[0].get_ydata()[:2], [0, 1 / (2 * STEPS)])
    assert "plots.error" not in client.get_run(ids[0]).data.tags


def test_a_run_without_curves_has_no_pictures(records: Path, params: Params) -> None:
    with stage_run("promote", params, records) as run:
        run.log_summary({"eval/held_out/grpo/overall": 0.5})
    client, _ = open_store(resolve_store(params.tracking, records))
    assert run_figures(client, run.run_id) == {}


def test_the_command_line_names_what_is_wrong() -> None:
    done = subprocess.run([sys.executable, "-m", "tasks.curves"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "RUN" in done.stderr
