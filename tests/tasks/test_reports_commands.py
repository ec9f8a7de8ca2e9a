"""Public reports about commands: help that takes seconds or has no example, imports with effects."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flows
from tasks.env import offline_environment
from tasks.params import PROJECT_ROOT

# What may not be loaded to print a help text: each takes a second or more.
HEAVY = ("torch", "mlflow", "prefect", "dvc", "optuna", "transformers", "great_expectations", "deepspeed")


def commands(package: str) -> list[str]:
    """Modules of a package that a person runs: those with a parser and a main."""
    names = [
        module.name for module in pkgutil.iter_modules([str(PROJECT_ROOT / package)]) if not module.ispkg
    ]
    sources = {name: (PROJECT_ROOT / package / f"{name}.py").read_text(encoding="utf-8") for name in names}
    return [f"{package}.{name}" for name in names if "argparse.ArgumentParser(" in sources[name]]


# Runs every command's main with --help in one process, and says what came out and which packages were loaded.
_HELP_OF_ALL = """
import contextlib, importlib, io, json, sys
said = {}
for name in sys.argv[1].split(","):
    module = importlib.import_module(name)
    sys.argv = [name, "--help"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            module.main()
        except SystemExit as end:
            assert not end.code, (name, end.code)
    said[name] = out.getvalue()
loaded = [name for name in sys.modules if "." not in name]
print(json.dumps({"said": said, "loaded": loaded}))
"""


def help_of(names: list[str]) -> tuple[dict[str, str], set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", _HELP_OF_ALL, ",".join(names)],
        cwd=PROJECT_ROOT,
        env={**os.environ, "COLUMNS": "110"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    return answer["said"], set(answer["loaded"])


@pytest.fixture(scope="module")
def task_help() -> tuple[dict[str, str], set[str]]:
    return help_of(commands("tasks"))


def test_every_help_has_a_description_and_an_example_that_names_the_command(
    task_help: tuple[dict[str, str], set[str]],
) -> None:
    said = {**task_help[0], **help_of(commands("flows"))[0]}
    assert {"tasks.sft", "tasks.grpo", "tasks.doctor", "flows.pipeline"} <= set(said)
    for name, text in said.items():
        assert re.search(rf"Example:\s+python -m {re.escape(name)}\b", text), f"{name}: no example"
        assert text.startswith(f"usage: python -m {name}"), f"{name}: prog is not the command"
        description = text.partition("\noptions:")[0].split("\n\n")[1]
        assert len(description.split()) > 3, f"{name}: no description"


def test_help_loads_nothing_heavy(task_help: tuple[dict[str, str], set[str]]) -> None:
    assert not task_help[1] & set(HEAVY)


def test_importing_flows_starts_nothing_and_writes_nothing(tmp_path: Path) -> None:
    """An import that opens a store or a server makes every `--help` and every test write files."""
    names = [module.name for module in pkgutil.iter_modules(flows.__path__, "flows.")]
    env = {
        **os.environ,
        **offline_environment(),
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "HOME": str(tmp_path),
    }
    code = (
        "import importlib, os, signal, sys, threading; before = dict(os.environ)\n"
        "for name in sys.argv[1].split(','): importlib.import_module(name)\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
        "assert not os.path.exists('mlflow.db'), 'a store was opened'\n"
        "added = {key for key in os.environ if os.environ[key] != before.get(key)}\n"
        "assert not {key for key in added if key.startswith(('MLFLOW', 'DVC', 'TOOLPLAN'))}, added\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ",".join(names)],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": str(PROJECT_ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_variable_that_keeps_the_stack_local_is_listed_for_the_user() -> None:
    """aim#2539: telemetry hangs without a network. Who starts commands without `make` must know the list."""
    text = (PROJECT_ROOT / ".env.example").read_text(encoding="utf-8")
    unlisted = [name for name in offline_environment() if name not in text]
    assert not [name for name in unlisted if name != "HF_HUB_DISABLE_TELEMETRY"], unlisted
    assert ".env.example" in (PROJECT_ROOT / "README.md").read_text(encoding="utf-8")


def test_the_modules_named_like_the_standard_library_are_none() -> None:
    """`python tasks/x.py` puts tasks/ first on sys.path: a tasks/queue.py would hide the library's queue."""
    for package in ("tasks", "flows"):
        names = {module.name for module in pkgutil.iter_modules([str(PROJECT_ROOT / package)])}
        assert not names & set(sys.stdlib_module_names), package
        assert importlib.import_module(package).__file__ is not None
