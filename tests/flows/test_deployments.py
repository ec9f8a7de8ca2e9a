"""Risks of prefect.yaml: numbers that two YAML readers read differently, runs that overlap, hours that do not exist."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
import yaml

from tasks.overrides import Overrides, changed_keys, difference, difference_table, write_overrides
from tasks.params import PROJECT_ROOT, ParamsError, flatten, load_params, read_yaml

DEPLOYMENTS = read_yaml(PROJECT_ROOT / "prefect.yaml")["deployments"]
READ_BY_PREFECT = [
    "prefect.yaml",
    *sorted(f"automations/{f.name}" for f in (PROJECT_ROOT / "automations").iterdir()),
]
each = pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda entry: entry["name"])


def parameter_files(root: Path) -> None:
    shutil.copy(PROJECT_ROOT / "params.yaml", root)
    shutil.copytree(PROJECT_ROOT / "profiles", root / "profiles")


@pytest.mark.parametrize("file", READ_BY_PREFECT)
def test_old_and_new_yaml_readers_agree(file: str) -> None:
    """Prefect reads these with PyYAML (YAML 1.1), we with YAML 1.2."""
    text = (PROJECT_ROOT / file).read_text(encoding="utf-8")
    assert yaml.safe_load(text) == read_yaml(PROJECT_ROOT / file)
    leaves = [
        value for value in flatten({"all": read_yaml(PROJECT_ROOT / file)}).values() if isinstance(value, str)
    ]
    assert not [text for text in leaves if re.fullmatch(r"[-+]?[\d.]+([eE][-+]?\d+)?", text)]


@each
def test_no_run_starts_beside_another_of_its_kind(deployment: dict) -> None:
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}


@each
def test_a_clock_change_neither_skips_nor_doubles_a_run(deployment: dict) -> None:
    for schedule in deployment["schedules"]:
        assert schedule["slug"]
        zone = ZoneInfo(schedule["timezone"])
        hours = schedule["cron"].split()[1]
        assert zone.key == "UTC" or int(hours) >= 4


@each
def test_a_person_finds_out_what_it_is_for(deployment: dict) -> None:
    assert deployment["description"].endswith(".")
    assert "toolplan" in deployment["tags"]


def test_the_file_names_no_machine_and_no_secret() -> None:
    text = (PROJECT_ROOT / "prefect.yaml").read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|work|tmp|Users)/|://|password|token", text)
    assert "pull" not in read_yaml(PROJECT_ROOT / "prefect.yaml")


def test_every_override_that_the_form_offers_is_a_parameter() -> None:
    def leaves(model: type) -> set[str]:
        found = set()
        for name, field in model.model_fields.items():
            inner = field.annotation
            nested = hasattr(inner, "model_fields")
            found |= {f"{name}.{leaf}" for leaf in leaves(inner)} if nested else {name}
        return found

    offered = leaves(Overrides)
    assert "grpo.lr" in offered
    assert "reward.lambda_tool" in offered
    assert offered <= set(flatten(load_params())) | {"reward.lambda_tool"}


def test_an_override_wins_over_the_profile_and_the_rest_stays(tmp_path: Path) -> None:
    parameter_files(tmp_path)
    before = load_params(tmp_path / "params.yaml", "gpu")
    asked = Overrides.model_validate({"sft": {"lr": 0.5}, "grpo": {"group_size": {"end": 99}, "steps": None}})
    after = write_overrides(tmp_path, "gpu", changed_keys(asked))
    changes = difference(before, after)
    assert {key: new for key, (_, new) in changes.items()} == {"sft.lr": 0.5, "grpo.group_size.end": 99}
    assert "| `sft.lr` |" in difference_table(changes)


def test_overrides_that_do_not_go_together_are_an_error_in_one_line(tmp_path: Path) -> None:
    parameter_files(tmp_path)
    with pytest.raises(ParamsError, match=r"grpo\.sizes"):
        write_overrides(tmp_path, None, {"grpo.sizes": [4, 5]})
