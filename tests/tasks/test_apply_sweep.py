"""Risks of writing settings: lost comments, values that the profile hides, settings of another profile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tasks.apply_sweep import best_settings, changes, difference
from tasks.params import PROJECT_ROOT, ParamsError, flatten, load_params
from tasks.sweep_plan import Plan, SweepError
from tasks.sweep_report import best_yaml
from tasks.sweep_study import TrialRow

FOUND = {"grpo.lr": 1.23e-05, "grpo.group_size.end": 12.0, "reward.lambda_tool": 1.5}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(PROJECT_ROOT / "params.yaml", tmp_path)
    shutil.copytree(PROJECT_ROOT / "profiles", tmp_path / "profiles")
    return tmp_path


def use_profile(root: Path, profile: str) -> None:
    file = root / "params.yaml"
    file.write_text(file.read_text().replace("profile: laptop", f"profile: {profile}"))


def write_best(root: Path) -> str:
    plan = Plan(load_params(root / "params.yaml"), root, "digest")
    best = TrialRow(3, "complete", FOUND, {"success": 0.5}, 1.0, "")
    folder = root / "outputs" / "sweeps" / plan.name
    folder.mkdir(parents=True)
    (folder / "best.yaml").write_text(best_yaml(plan, best))
    return plan.name


def test_only_the_values_change(project: Path) -> None:
    name = write_best(project)
    settings = best_settings(name, project)
    assert settings == FOUND
    before = load_params(project / "params.yaml")
    changed = changes(settings, project)
    assert list(changed) == [project / "params.yaml"]
    old, new = (
        (project / "params.yaml").read_text().splitlines(),
        changed[project / "params.yaml"].splitlines(),
    )
    assert len(old) == len(new)
    assert sum(a != b for a, b in zip(old, new, strict=True)) == len(FOUND)
    assert difference(project / "params.yaml", changed[project / "params.yaml"], project).count("\n+") == 4
    (project / "params.yaml").write_text(changed[project / "params.yaml"])
    after = load_params(project / "params.yaml")
    assert flatten(after) == {**flatten(before), **FOUND}
    assert changes(settings, project) == {}, "a second time there is nothing to do"


def test_a_value_goes_to_the_profile_where_that_one_decides(project: Path) -> None:
    use_profile(project, "gpu")
    name = write_best(project)
    changed = changes(best_settings(name, project), project)
    assert set(changed) == {project / "params.yaml", project / "profiles" / "gpu.yaml"}
    for file, text in changed.items():
        file.write_text(text)
    after = flatten(load_params(project / "params.yaml"))
    assert {key: after[key] for key in FOUND} == FOUND


def test_settings_of_another_profile_are_refused(project: Path) -> None:
    name = write_best(project)
    use_profile(project, "gpu")
    with pytest.raises(ParamsError, match=r"made with profile laptop, params\.yaml has gpu"):
        best_settings(name, project)


def test_an_unknown_sweep_names_those_that_exist(project: Path) -> None:
    name = write_best(project)
    with pytest.raises(SweepError, match=f"nonsense: no sweep.*there are {name}"):
        best_settings("nonsense", project)


def test_settings_that_no_longer_fit_are_refused(project: Path) -> None:
    with pytest.raises(ParamsError, match=r"reward\.lambda_tool"):
        changes({"reward.lambda_tool": -1.0}, project)
