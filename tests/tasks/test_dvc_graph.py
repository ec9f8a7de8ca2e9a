"""Risks of driving DVC: a wrong order, a stale or too eager fingerprint, processes that outlive their caller."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tasks.dvc_graph import DvcError, out_of_date, read_stages, stage_fingerprint, upstream
from tasks.params import PROJECT_ROOT, Params, ParamsError, override
from tasks.process_group import CommandTimeout, run_guarded

ENV = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def repro(root: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "dvc", "repro", *arguments]
    done = subprocess.run(command, cwd=root, env=ENV, capture_output=True, text=True, check=True)
    return done.stdout


def test_the_order_is_that_of_the_files_and_not_of_the_text(small_project: Path) -> None:
    stages = read_stages(small_project)
    assert list(stages) == ["first", "second"]
    assert upstream(stages["second"], stages) == {"first"}


def test_our_order_is_one_that_dvc_would_take() -> None:
    """The order is derived from dvc.yaml alone, which takes a millisecond; DVC's own graph is the judge."""
    from dvc.repo import Repo

    with Repo(str(PROJECT_ROOT)) as repo:
        edges = {(a.addressing, b.addressing) for a, b in repo.index.graph.edges}
    stages = read_stages(PROJECT_ROOT)
    edges = {(a, b) for a, b in edges if b in stages}  # ingested data are no stage
    assert {(name, other) for name, stage in stages.items() for other in upstream(stage, stages)} == edges
    order = list(stages)
    assert all(order.index(needed) < order.index(name) for name, needed in edges)


def test_a_circle_is_named_and_not_searched_for_ever(small_project: Path) -> None:
    file = small_project / "dvc.yaml"
    file.write_text(file.read_text().replace("deps: [stage.py]", "deps: [stage.py, outputs/second.txt]"))
    with pytest.raises(ParamsError, match="in a circle"):
        read_stages(small_project)


def test_the_status_names_what_changed(small_project: Path) -> None:
    assert set(out_of_date(small_project, ENV)) == {"first", "second"}
    repro(small_project)
    assert out_of_date(small_project, ENV) == {}
    text = (small_project / "params.yaml").read_text()
    (small_project / "params.yaml").write_text(text.replace("\nseed: ", "\nseed: 1"))
    assert out_of_date(small_project, ENV) == {}, "a parameter that no stage names made one out of date"
    (small_project / "params.yaml").write_text(re.sub(r"(?m)^(grpo:(?:.*\n)+?  lr: )\S+", r"\g<1>0.5", text))
    (reason,) = out_of_date(small_project, ENV)["second"]
    assert "grpo.lr" in reason
    assert set(out_of_date(small_project, ENV)) == {"second"}
    shutil.rmtree(small_project / "outputs")
    assert "outputs/first.txt deleted" in out_of_date(small_project, ENV)["first"]


def test_a_broken_dvc_yaml_is_one_line(small_project: Path) -> None:
    (small_project / "dvc.yaml").write_text("stages:\n  first:\n    nonsense: 1\n")
    with pytest.raises(DvcError) as caught:
        out_of_date(small_project, ENV)
    assert "\n" not in str(caught.value)


def test_the_fingerprint_follows_parameters_and_files_of_the_stage_only(
    small_project: Path, params: Params
) -> None:
    before = {name: stage_fingerprint(name, params, small_project) for name in ("first", "second")}
    changed = override(params, {"grpo.lr": 0.5})
    assert stage_fingerprint("first", changed, small_project) == before["first"]
    assert stage_fingerprint("second", changed, small_project) != before["second"]
    cache = small_project / "__pycache__"
    cache.mkdir()
    (cache / "stage.pyc").write_text("x")
    (small_project / "notes.md").write_text("x")
    assert stage_fingerprint("first", params, small_project) == before["first"]
    (small_project / "stage.py").write_text("# new")
    assert stage_fingerprint("first", params, small_project) != before["first"]


FAMILY = """
import subprocess, sys, time, pathlib
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
print("started", flush=True)
time.sleep(600)
"""


def family(tmp_path: Path) -> list[str]:
    """A command that starts a grandchild in a session of its own."""
    return [sys.executable, "-c", FAMILY, str(tmp_path / "pid")]


def gone(pid_file: Path, seconds: float = 10) -> bool:
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_an_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_guarded(family(tmp_path), interrupt, tmp_path, ENV)
    assert gone(tmp_path / "pid", 1)


def test_a_timeout_leaves_no_process_behind(tmp_path: Path) -> None:
    with pytest.raises(CommandTimeout):
        run_guarded(family(tmp_path), lambda line: None, tmp_path, ENV, timeout_s=3)
    assert gone(tmp_path / "pid", 1)


def test_sigkill_of_the_caller_leaves_no_process_behind(tmp_path: Path) -> None:
    """`dvc repro` alone would go on, and the next one would run beside it."""
    code = (
        "import os, sys; from pathlib import Path; from tasks.process_group import run_guarded\n"
        f"run_guarded({family(tmp_path)!r}, lambda line: print(line, flush=True), Path({str(tmp_path)!r}), os.environ)"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", code], cwd=PROJECT_ROOT, stdout=subprocess.PIPE, text=True
    )
    assert caller.stdout is not None
    assert caller.stdout.readline().strip() == "started"
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    assert gone(tmp_path / "pid")


def test_exit_code_and_every_line_arrive(tmp_path: Path) -> None:
    lines: list[str] = []
    code = "import sys; print('a'); print('b', file=sys.stderr); print('\\N{SNOWMAN}'); sys.exit(7)"
    assert run_guarded([sys.executable, "-c", code], lines.append, tmp_path, ENV) == 7
    assert sorted(lines) == ["a", "b", "☃"]
