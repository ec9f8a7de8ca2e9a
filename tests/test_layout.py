"""The repository's shape: what may import what, what DVC is told, and the trap that is called mlflow/."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ruamel.yaml import YAML

from tasks.dvc_graph import read_stages
from tasks.params import PROJECT_ROOT as ROOT
from tasks.params import Params, flatten, load_params, read_yaml

PACKAGES = ("flows", "tasks", "models", "environments", "tools")
# They deliver parameters and records; the values themselves are `params` in dvc.yaml.
PLUMBING = {
    *(f"tasks/{name}.py" for name in ("cli", "dvc_graph", "metric_log", "params", "provenance")),
    *(f"tasks/{name}.py" for name in ("tracking", "tracking_store", "tracked_run")),
    "tasks/episode_traces.py",
    *("models/config.py", "environments/vsp/config.py"),
}


def module_file(name: str) -> str | None:
    """`tasks.sft` -> "tasks/sft.py", None for a package or for what is not ours."""
    path = Path(*name.split(".")).with_suffix(".py")
    return path.as_posix() if name.split(".")[0] in PACKAGES and (ROOT / path).is_file() else None


def imports_of(file: str) -> set[str]:
    """Our modules that a file imports when it runs, at the top or inside functions."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {found for name in names if (found := module_file(name)) is not None}


def closure(file: str) -> set[str]:
    """`file` and all our modules behind it, not looking through the plumbing."""
    seen: set[str] = set()
    waiting = {file}
    while waiting:
        current = waiting.pop()
        seen.add(current)
        if current not in PLUMBING:
            waiting |= imports_of(current) - seen
    return seen - PLUMBING


STAGES = read_stages(ROOT)


@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_of_a_module_reruns_exactly_the_stages_that_import_it(stage: str) -> None:
    module = STAGES[stage].command.split()[2]
    wanted = closure(module.replace(".", "/") + ".py")
    code = {
        dep
        for dep in STAGES[stage].deps
        if dep.split("/")[0] in PACKAGES and not dep.endswith((".html", ".css", ".js"))
    }
    covered = {file for file in wanted for dep in code if file == dep or file.startswith(f"{dep}/")}
    assert not wanted - covered, "imported, but no dep in dvc.yaml"
    unused = {dep for dep in code if not any(file == dep or file.startswith(f"{dep}/") for file in wanted)}
    assert not unused, "a dep in dvc.yaml, but not imported"


@pytest.mark.parametrize("stage", STAGES)
def test_every_parameter_that_a_stage_reads_reruns_it(stage: str) -> None:
    """Read in the stage's own module; what it hands on whole (`params.sft`) is followed whole."""
    module = STAGES[stage].command.split()[2].replace(".", "/") + ".py"
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "params"
    }
    followed = {key.split(".")[0] for key in STAGES[stage].params}
    assert read & set(Params.model_fields) <= followed | {"tracking", "profile"}


def test_touching_flows_or_tests_reruns_nothing() -> None:
    deps = {dep for stage in STAGES.values() for dep in stage.deps}
    assert not [dep for dep in deps if dep.startswith(("flows", "tests", "docs"))]
    assert not {"params.yaml", "tasks", "models", "environments"} & deps


def test_no_stage_command_holds_what_differs_between_machines() -> None:
    for stage in STAGES.values():
        assert stage.command.startswith("python -m tasks.")
        assert not set("/$`") & set(stage.command)


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("tools", ("environments", "models", "tasks", "flows", "prefect", "dvc", "mlflow")),
        ("environments", ("models", "tasks", "flows", "prefect", "dvc", "mlflow")),
        ("models", ("tasks", "flows", "prefect", "dvc", "mlflow")),
        ("tasks", ("flows", "prefect")),
    ],
)
def test_imports_point_down_only(package: str, forbidden: tuple[str, ...]) -> None:
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            wrong = [name for name in names if name.split(".")[0] in forbidden]
            assert not wrong, f"{file.relative_to(ROOT)} imports {wrong}"


def test_our_mlflow_folder_can_never_shadow_the_package() -> None:
    assert not list((ROOT / "mlflow").rglob("*.py"))


@pytest.mark.parametrize(
    "command",
    [
        ["-c", "import mlflow; print(mlflow.__file__, mlflow.MlflowClient)"],
        ["-m", "pytest", "--version"],
        ["-m", "flows.pipeline", "--help"],
        ["-m", "mlflow", "--version"],
    ],
    ids=["python -c", "python -m pytest", "python -m flows.pipeline", "python -m mlflow"],
)
def test_mlflow_is_the_installed_one_from_the_project_folder(command: list[str]) -> None:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if command[0] == "-c":
        assert "site-packages" in done.stdout


def test_yaml_1_1_and_1_2_read_the_same_numbers_or_our_loader_decides() -> None:
    """PyYAML reads `1e-3` as a string (treeverse/dvc#5971). Nobody here may read parameters with it."""
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    old, new = flatten(yaml.safe_load(text)), flatten(YAML(typ="safe", pure=True).load(text))
    differing = {key for key in new if old[key] != new[key]}
    assert all(isinstance(new[key], float) for key in differing)
    for file in [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]:
        assert "import yaml" not in file.read_text(encoding="utf-8"), file


def test_a_changed_reward_weight_reruns_grpo_and_what_follows_only() -> None:
    direct = {name for name, stage in STAGES.items() if "reward" in stage.params}
    assert "grpo" in direct
    assert not direct & {"cold_start", "validate", "sft", "baseline"}


def test_every_parameter_block_is_followed_in_params_yaml_and_in_the_profile() -> None:
    """A block that a stage follows only in params.yaml would hide a change in the profile."""
    declared = read_yaml(ROOT / "dvc.yaml")["stages"]
    for name, body in declared.items():
        plain = {str(entry).split(".")[0] for entry in body["params"] if isinstance(entry, str)}
        (overlay,) = [
            entry["profiles/${profile}.yaml"] for entry in body["params"] if isinstance(entry, dict)
        ]
        assert set(overlay) == plain - {"seed", "threads"}, name
    followed = {key.split(".")[0] for stage in STAGES.values() for key in stage.params}
    assert set(Params.model_fields) - followed == {"profile", "sweep", "tracking"}


@pytest.mark.parametrize("profile", sorted(path.stem for path in (ROOT / "profiles").glob("*.yaml")))
def test_every_shipped_profile_is_valid(profile: str) -> None:
    assert load_params(profile=profile).profile == profile


def test_dvc_lock_is_not_ignored_and_results_are() -> None:
    def ignored(path: str) -> bool:
        return subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, check=False).returncode == 0

    assert not ignored("dvc.lock")
    outs = [out for stage in STAGES.values() for out in stage.outs]
    assert all(ignored(path) for path in [*outs, "mlflow.db", "mlartifacts/x", "outputs/.runs/sft.json"])
