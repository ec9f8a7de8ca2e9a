"""Risks of the files in mlflow/: a server that does not start, descriptions of experiments that nobody makes."""

from __future__ import annotations

import re
from string import Template

import click
import pytest
from mlflow.cli import cli

from tasks.params import PROJECT_ROOT, load_params, read_yaml
from tasks.tracking_store import _description

FOLDER = PROJECT_ROOT / "mlflow"
COMPOSE = read_yaml(FOLDER / "compose.yaml")
SERVER = COMPOSE["services"]["mlflow"]


def test_every_experiment_of_the_profiles_is_described() -> None:
    described = set(read_yaml(FOLDER / "experiments.yaml"))
    used = {
        load_params(profile=file.stem).tracking.experiment
        for file in (PROJECT_ROOT / "profiles").glob("*.yaml")
    }
    assert used <= described
    assert all("mlflow.note.content" in _description(name) for name in used)


def test_metric_groups_in_the_descriptions_are_those_of_the_reference() -> None:
    page = (PROJECT_ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    for text in read_yaml(FOLDER / "experiments.yaml").values():
        groups = set(re.findall(r"`([a-z]+)/", text))
        assert groups
        assert not [group for group in groups if f"`{group}/" not in page]


def test_the_server_in_the_compose_file_is_the_client_of_the_constraints() -> None:
    installed = re.search(r"(?m)^mlflow==(\S+)", (PROJECT_ROOT / "constraints.txt").read_text())
    assert installed is not None
    assert f"mlflow=={installed.group(1)} " in SERVER["build"]["dockerfile_inline"]


def test_the_servers_options_exist_and_its_stores_are_services() -> None:
    words = SERVER["command"].split()
    assert words[:2] == ["mlflow", "server"]
    command = cli.get_command(click.Context(cli), "server")
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    database = re.search(r"postgresql://(\w+):\S+@(\w+)/(\w+)", SERVER["command"])
    assert database is not None
    user, host, name = database.groups()
    environment = COMPOSE["services"][host]["environment"]
    assert (environment["POSTGRES_USER"], environment["POSTGRES_DB"]) == (user, name)
    endpoint = re.fullmatch(r"http://(\w+):\d+", SERVER["environment"]["MLFLOW_S3_ENDPOINT_URL"])
    assert endpoint is not None
    assert endpoint.group(1) in COMPOSE["services"]
    bucket = re.search(r"--artifacts-destination s3://(\w+)", SERVER["command"])
    assert bucket is not None
    assert f"store/{bucket.group(1)}" in COMPOSE["services"]["bucket"]["command"][0]
    assert set(SERVER["depends_on"]) <= set(COMPOSE["services"])
    assert "POSTGRES_PASSWORD: " not in (FOLDER / "compose.yaml").read_text().replace("PASSWORD: ${", "")


@pytest.mark.parametrize("name", ["README.md", "compose.yaml", "experiments.yaml", "model_card.md"])
def test_the_readme_names_every_file(name: str) -> None:
    assert name == "README.md" or f"`{name}`" in (FOLDER / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in FOLDER.iterdir()} >= {name}


def test_the_model_card_asks_for_what_the_code_fills_in() -> None:
    """Filled in for real in test_promote; here that nothing is filled in that the template has dropped."""
    template = Template((FOLDER / "model_card.md").read_text(encoding="utf-8"))
    source = (PROJECT_ROOT / "tasks" / "model_card.py").read_text(encoding="utf-8")
    given = set(re.findall(r"(?m)^        (\w+)=", source))
    assert set(template.get_identifiers()) == given
