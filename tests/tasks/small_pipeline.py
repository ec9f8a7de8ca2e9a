"""The project's own dvc.yaml with stages that take no time: what DVC decides can then be seen in a second.

Each stage writes outputs that depend on all that it depends on, so a change travels as it does in earnest.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tasks.params import PROJECT_ROOT

ENV = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
}

STAND_IN = '''\
"""A stage in no time: appends its name to `calls`, writes each of its outputs from what it depends on."""
import hashlib, json, os, pathlib, time
from ruamel.yaml import YAML
def read(name):
    return YAML(typ="safe", pure=True).load(pathlib.Path(name).read_text())
name, root = os.environ["DVC_STAGE"], pathlib.Path(os.environ["DVC_ROOT"])
with open(os.environ.get("CALLS", root / "outputs" / "logs" / "calls"), "a") as calls:
    calls.write(name + "\\n")
time.sleep(float(os.environ.get("STAGE_SECONDS", "0")))
stage, params = read("dvc.yaml")["stages"][name], read("params.yaml")
digest = hashlib.sha256(name.encode())
for dep in stage["deps"]:
    path = pathlib.Path(dep)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and file.suffix != ".pyc":
            digest.update(file.read_bytes())
for key in stage["params"]:
    if isinstance(key, str):
        value = params
        for part in key.split("."):
            value = value[part]
        digest.update(json.dumps(value, sort_keys=True).encode())
for out in [*stage.get("outs", []), *stage.get("metrics", [])]:
    path = pathlib.Path(out if isinstance(out, str) else next(iter(out)))
    files = [path] if path.suffix else [path / "report.json", path / "validation_items.parquet",
                                        path / "test_items.parquet", path / "curve.csv"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"of": digest.hexdigest()}) if file.suffix == ".json" else digest.hexdigest()
        file.write_text(text)
'''


def make_small_pipeline(root: Path) -> Path:
    """A git and DVC repository at `root`: the working tree of the project with stand-ins for its stages,
    all run once and committed."""
    listed = git(PROJECT_ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    for name in filter(None, listed.split("\0")):
        if (PROJECT_ROOT / name).is_file():  # listed, though deleted
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT_ROOT / name, root / name)
    for part in (root / "data" / "ingested").glob("*.dvc"):  # the user's own data are not for tests
        part.unlink()
    file = root / "dvc.yaml"
    file.write_text(re.sub(r"(?m)^    cmd: .*$", "    cmd: python stand_in.py", file.read_text()))
    (root / "stand_in.py").write_text(STAND_IN)
    (root / "dvc.lock").unlink(missing_ok=True)
    (root / "outputs" / "logs").mkdir(parents=True)
    git(root, "init", "--quiet", "--initial-branch", "main")
    dvc(root, "repro", "--quiet")
    commit(root, "first")
    return root


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commit(root: Path, message: str) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", message)


def dvc(root: Path, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *arguments],
        cwd=root,
        env={**ENV, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def calls(root: Path) -> list[str]:
    """The stages that ran since the last time this was asked."""
    file = root / "outputs" / "logs" / "calls"
    ran = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return ran
