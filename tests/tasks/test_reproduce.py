"""Risks: stages that run again for nothing, or do not run when they must; results that cannot be shared."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.dvc_graph import out_of_date, read_stages
from tasks.schema import ITEMS, item_row
from tests.models.policies import small_policy, some_prompts
from tests.tasks.small_pipeline import ENV, calls, commit, dvc, git, make_small_pipeline


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_pipeline(tmp_path_factory.mktemp("pipeline") / "made")


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Path:
    """A copy to change, with everything up to date."""
    root = Path(shutil.copytree(made, tmp_path / "project", symlinks=True))
    calls(root)
    return root


def set_param(root: Path, block: str, key: str, value: str) -> None:
    file = root / "params.yaml"
    text, count = re.subn(
        rf"(?m)^({block}:(?:.*\n)+?  {key}: )[^#\s]+", rf"\g<1>{value}", file.read_text(), count=1
    )
    assert count == 1
    file.write_text(text)


def test_what_cannot_change_a_result_makes_nothing_stale(project: Path) -> None:
    for name in ("flows/pipeline.py", "tests/conftest.py", "README.md", "docs/README.md", "Makefile"):
        with (project / name).open("a") as file:
            file.write("\n# touched\n")
    for folder in ("tools", "tasks", "models", "environments/vsp"):
        for options in ([], ["-O"]):  # as tests, and another Python's settings, leave them
            command = [sys.executable, *options, "-m", "compileall", "-q", folder]
            subprocess.run(command, cwd=project, check=True)
        (project / folder / "__pycache__" / "x.cpython-312.pyc").write_bytes(b"x")
        (project / folder / ".ipynb_checkpoints").mkdir()
        (project / folder / ".ipynb_checkpoints" / "a.py").write_text("x")
    (project / "tools" / ".DS_Store").write_bytes(b"x")
    (project / ".pytest_cache").mkdir()
    params = project / "params.yaml"
    text = params.read_text()
    other = re.sub(r"(?m) *#.*$", "", text).replace("lambda_acc: 1.0 ", "lambda_acc: 1 ") + "\n# the end\n"
    other = re.sub(r"(?m)^(reward:(?:.*\n)+?  lambda_acc: )1\.0\s*$", r"\g<1>1", other)
    assert other != text
    params.write_text(other)
    assert out_of_date(project, ENV) == {}


def test_a_reward_weight_reruns_grpo_and_what_follows_and_nothing_before(project: Path) -> None:
    set_param(project, "reward", "lambda_tool", "1.25")
    dvc(project, "repro")
    stages = list(read_stages(project))
    assert calls(project) == stages[stages.index("grpo") :]
    set_param(project, "reward", "lambda_tool", "0.0")
    dvc(project, "repro")
    assert calls(project) == [], "the earlier results are in the cache"


def test_a_parameter_makes_those_stages_stale_that_read_it(project: Path) -> None:
    stages = list(read_stages(project))
    for block, key, value, first in (
        ("tracking", "experiment", "x", ""),
        ("gate", "report_rows", "7", "validate"),
    ):
        set_param(project, block, key, value)
        status = out_of_date(project, ENV)
        assert [stage for stage in stages if stage in status][:1] == ([first] if first else [])


def test_the_data_folder_for_ingested_trajectories_is_there_in_a_fresh_clone(
    project: Path, tmp_path: Path
) -> None:
    git(tmp_path, "clone", "--quiet", str(project), "clone")
    clone = tmp_path / "clone"
    assert "data/ingested" not in str(out_of_date(clone, ENV))
    (clone / "outputs" / "logs").mkdir(parents=True)
    dvc(clone, "repro")
    assert git(clone, "status", "--short") == "", "a clone without any remote makes the same dvc.lock"


def test_a_clone_pulls_everything_and_evaluates_the_policy_without_training(
    project: Path, tmp_path: Path
) -> None:
    small_policy().save(project / "outputs" / "grpo")
    items = pa.Table.from_pylist([item_row(prompt) for prompt in some_prompts(4)], schema=ITEMS)
    pq.write_table(items, project / "data" / "cold_start" / "test_items.parquet")
    set_param(project, "agent", "max_tokens", "160")
    dvc(project, "commit", "--force")
    command = ["make", "--silent", "remote", f"URL={tmp_path / 'a remote'}"]
    subprocess.run(command, cwd=project, env=ENV, check=True, capture_output=True)
    commit(project, "remote")
    dvc(project, "push")
    git(tmp_path, "clone", "--quiet", str(project), "clone")
    clone = tmp_path / "clone"
    dvc(clone, "pull")
    assert out_of_date(clone, ENV) == {}
    command = [sys.executable, "-m", "tasks.evaluate", "--model", "outputs/grpo", "--json", "result.json"]
    subprocess.run(command, cwd=clone, env=ENV, check=True, capture_output=True)
    result = json.loads((clone / "result.json").read_text())
    assert result["overall"]["n"] == 4


def test_a_temporary_experiment_works_in_a_clean_clone(project: Path, tmp_path: Path) -> None:
    """treeverse/dvc#5801: a temporary experiment sees only what git tracks."""
    git(tmp_path, "clone", "--quiet", str(project), "clone")
    clone, log = tmp_path / "clone", tmp_path / "calls"
    dvc(clone, "cache", "dir", "--local", str(project / ".dvc" / "cache"))
    dvc(clone, "exp", "run", "--temp", "--name", "bold", "-S", "reward.lambda_acc=3.0", CALLS=str(log))
    assert log.read_text().split() == ["grpo", "evaluate", "promote"]
    assert git(clone, "status", "--short") == "", "the experiment touched the workspace"
    shown = json.loads(dvc(clone, "exp", "show", "--json"))
    assert "bold" in json.dumps(shown)
    assert "lambda_acc" in dvc(clone, "params", "diff", "--md", "HEAD", "bold")


def test_the_second_repro_waits_for_the_first(project: Path) -> None:
    set_param(project, "reward", "lambda_tool", "0.75")
    command = [sys.executable, "-m", "tasks.repro"]
    both = [
        subprocess.Popen(
            command,
            cwd=project,
            env={**ENV, "STAGE_SECONDS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert out_of_date(project, ENV) == {}
    assert calls(project) == ["grpo", "evaluate", "promote"]


def test_a_merge_of_two_branches_never_mixes_their_lock_files(project: Path) -> None:
    """docs/how-to/merge-conflict-in-dvc-lock.md, step by step."""
    for branch, value in (("one", "0.75"), ("two", "0.75")):
        git(project, "checkout", "--quiet", "-b", branch, "main")
        set_param(project, "reward", "lambda_tool" if branch == "one" else "lambda_acc", value)
        dvc(project, "repro")
        commit(project, branch)
    merge = subprocess.run(
        ["git", "merge", "one"], cwd=project, env=ENV, capture_output=True, text=True, check=False
    )
    conflicts = git(project, "diff", "--name-only", "--diff-filter=U").split()
    assert merge.returncode == 1
    assert "dvc.lock" in conflicts
    assert "<<<<<<<" not in (project / "dvc.lock").read_text(), "the lock is one side's, whole, and readable"
    calls(project)
    git(project, "checkout", "--ours", "params.yaml")
    set_param(project, "reward", "lambda_tool", "0.75")
    git(project, "checkout", "--ours", "dvc.lock")
    dvc(project, "repro")
    assert calls(project) == ["grpo", "evaluate", "promote"], "the merged settings are new to both branches"
    commit(project, "merged")
    assert out_of_date(project, ENV) == {}
    assert "dvc.lock" in git(project, "ls-files").split()
