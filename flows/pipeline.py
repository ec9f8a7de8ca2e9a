"""The pipeline as one Prefect flow: one task per DVC stage, in DVC's order, each in its own process group.

Prefect decides when and shows what happens; DVC decides what has to run; MLflow keeps the numbers. The same
work can be done by `dvc repro` alone, and leaves the same dvc.lock.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from flows.temporary_server import ServerError, prefect_server, wait_for_server
from tasks.cli import run_main
from tasks.dvc_graph import DvcError, Stage, out_of_date, read_stages, stage_fingerprint, upstream
from tasks.env import offline_environment
from tasks.params import PROJECT_ROOT, Params, ParamsError, load_params
from tasks.pipeline_report import Outcome, StageResult, print_results, read_metrics, stage_table
from tasks.process_group import CommandTimeout, run_guarded
from tasks.tracking import PARENT_RUN_VARIABLE, RunRecords, StageRun, pipeline_run

# What DVC repeats after every stage; `git add dvc.lock` once at the end is enough.
_DVC_HINTS = ("To track the changes", "git add", "To enable auto staging", "dvc config", "Use `dvc push`")


class StageFailed(Exception):
    """A stage ended with an error, or was killed (`killed`), which is worth another attempt."""

    def __init__(self, message: str, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


def worth_a_retry(task: Any, task_run: Any, state: Any) -> bool:
    """Only a stage that was killed from outside (out of memory, a lost node) is tried again: it goes on from
    its checkpoint. An error would come back."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, StageFailed) and error.killed


@task(
    task_run_name="dvc:{stage}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=1,
    retry_delay_seconds=5,
    retry_condition_fn=worth_a_retry,
)
def run_stage(
    stage: str, up_to_date: bool, root: Path, env: dict[str, str], timeout_s: float | None
) -> tuple[Outcome, float]:
    """Bring one stage up to date with `dvc repro -s`; its output goes to the log as it comes.

    Raises:
        StageFailed: DVC or the stage ended with an error.
    """
    log = get_run_logger()
    if up_to_date:
        log.info("%s: cached", stage)
        return "cached", 0.0
    started = time.monotonic()
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        del lines[:-200]
        if line.strip() and not line.strip().startswith(_DVC_HINTS):
            log.info("%s", line)

    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", stage]
    try:
        code = run_guarded(command, on_line, root, env, timeout_s)
    except CommandTimeout as error:
        raise StageFailed(f"stage {stage}: {error}; raise --timeout-hours, then run again") from error
    if code != 0:
        raise _failure(stage, lines)
    ran = any(line.startswith(f"Running stage '{stage}'") for line in lines)
    return ("ran" if ran else "cached"), time.monotonic() - started


def run_name() -> str:
    """Names the flow run after its profile: Prefect's own names are random words."""
    given = flow_run.parameters
    return f"pipeline-{given['profile'] or load_params(Path(given['root']) / 'params.yaml').profile}"


@flow(name="pipeline", flow_run_name=run_name)
def pipeline(
    profile: str | None = None,
    stages: list[str] | None = None,
    timeout_hours: float = 24.0,
    root: Path = PROJECT_ROOT,
) -> dict[str, str]:
    """Bring the pipeline up to date and record it.

    Args:
        profile: switch params.yaml to this profile first.
        stages: only these, in DVC's order; all when absent.
        timeout_hours: longest time for one stage.
        root: folder of dvc.yaml.

    Returns:
        For each stage `ran`, `cached` or `skipped`.

    Raises:
        StageFailed: the first stage that failed; later ones are not started.
    """
    if "DVC_STAGE" in os.environ:
        raise ParamsError("the pipeline was started inside a DVC stage; stages run tasks, not flows")
    params = choose_profile(root, profile)
    graph = select(read_stages(root, params.profile), stages)
    try:
        with FileLock(root / ".dvc" / "tmp" / "pipeline.lock", timeout=0):
            return _run_all(params, graph, timeout_hours * 3600, root)
    except Timeout:
        raise ParamsError(f"another pipeline is at work in {root}; wait for it, or stop it") from None


def _run_all(params: Params, graph: Mapping[str, bool], timeout_s: float, root: Path) -> dict[str, str]:
    """Bring the selected stages up to date, inside one MLflow parent run."""
    stages = read_stages(root, params.profile)
    base_env = child_environment()
    stale = out_of_date(root, base_env)
    flow_id = str(flow_run.get_id())
    results = {name: StageResult(name, "skipped") for name in graph}
    with pipeline_run(params, root, {"prefect.flow_run_id": flow_id}) as run:
        env = {**base_env, PARENT_RUN_VARIABLE: run.run_id, "TOOLPLAN_FLOW_RUN_ID": flow_id}
        try:
            for name in (name for name, selected in graph.items() if selected):
                fresh = name not in stale and not any(
                    results[other].outcome == "ran" for other in upstream(stages[name], stages)
                )
                started = time.monotonic()
                try:
                    outcome, seconds = run_stage(name, fresh, root, env, timeout_s)
                except BaseException as error:
                    reason = str(error) or type(error).__name__
                    results[name] = StageResult(name, "failed", time.monotonic() - started, reason)
                    raise
                results[name] = StageResult(name, outcome, seconds, run_id=maker(name, params, root))
        finally:
            record(run, list(results.values()), root)
    return {name: result.outcome for name, result in results.items()}


def maker(stage: str, params: Params, root: Path) -> str | None:
    """The MLflow run that made a stage's present outputs."""
    return RunRecords(root, stage).run_id(stage_fingerprint(stage, params, root))


def record(run: StageRun, results: Sequence[StageResult], root: Path) -> None:
    """Write what became of each stage to the parent run and to Prefect's artifacts."""
    table = stage_table(results, run.experiment_id)
    tags = {f"stage.{result.stage}": result.outcome for result in results}
    links = {f"stage.{result.stage}.run_id": result.run_id for result in results if result.run_id}
    run.set_tags({**tags, **links, "mlflow.note.content": table})
    run.log_summary({f"seconds/{result.stage}": result.seconds for result in results if result.seconds})
    _artifact("pipeline-stages", table)
    evaluated = any(result.stage == "evaluate" and result.outcome in {"ran", "cached"} for result in results)
    if evaluated and (metrics := read_metrics(root)):
        from tasks.evaluation_report import markdown_table

        _artifact("evaluation", markdown_table(metrics))


def _artifact(key: str, markdown: str) -> None:
    """Show a table in Prefect. It is an extra: a server that refuses it must not fail the pipeline."""
    try:
        create_markdown_artifact(markdown, key=key)
    except Exception as error:
        get_run_logger().warning("Prefect did not take the artifact %s: %s", key, error)


def child_environment() -> dict[str, str]:
    """The environment of stages: this Python first on PATH, nothing reported to anyone."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {
        **os.environ,
        **offline_environment(),
        "PATH": path,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def choose_profile(root: Path, profile: str | None) -> Params:
    """Read the parameters; another profile than the present one is written to params.yaml first, since DVC
    and every stage read it there."""
    file = root / "params.yaml"
    params = load_params(file)
    if profile is None or profile == params.profile:
        return params
    chosen = load_params(file, profile)
    text = re.sub(r"(?m)^profile:[ ]*\S+", f"profile: {profile}", file.read_text(encoding="utf-8"), count=1)
    file.write_text(text, encoding="utf-8")
    print(f"params.yaml: profile {params.profile} -> {profile}")
    return chosen


def select(stages: Mapping[str, Stage], wanted: list[str] | None) -> dict[str, bool]:
    """For each stage, in order, whether to bring it up to date."""
    unknown = sorted(set(wanted or ()) - set(stages))
    if unknown:
        raise ParamsError(
            f"--stages: no stage {', '.join(unknown)} in dvc.yaml; there are {', '.join(stages)}"
        )
    return {name: wanted is None or name in wanted for name in stages}


def _failure(stage: str, lines: list[str]) -> StageFailed:
    """The stage's own error lines say more than DVC's."""
    own = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    dvc = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    code = re.search(r"exited with (-?\d+)", "\n".join(dvc))
    number = int(code.group(1)) if code else 0
    killed = number in {-9, 137}
    return StageFailed(f"stage {stage}: {'; '.join(own or dvc or lines[-1:]) or 'no output'}", killed)


def dry_run(root: Path, profile: str | None, wanted: list[str] | None) -> None:
    """Print what a run would do, without Prefect and MLflow and without writing anything."""
    params = load_params(root / "params.yaml", profile)
    stages = read_stages(root, params.profile)
    graph = select(stages, wanted)
    if params.profile == load_params(root / "params.yaml").profile:
        stale = out_of_date(root, child_environment())
    else:
        stale = {name: [f"profile {params.profile}"] for name in stages}
    print(f"profile {params.profile}, seed {params.seed}")
    running: set[str] = set()
    for name, selected in graph.items():
        after = upstream(stages[name], stages) & running
        if not selected:
            print(f"  skip    {name}")
        elif name in stale or after:
            running.add(name)
            why = stale.get(name) or [f"after {', '.join(sorted(after))}"]
            print(f"  run     {name:<12} {'; '.join(why[:3])}{' …' if len(why) > 3 else ''}")
        else:
            print(f"  cached  {name}")


def main() -> int:
    """Command line of the flow."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.pipeline",
        description="Bring the whole pipeline up to date: data, gate, SFT, GRPO, evaluation, promotion.",
        epilog="Example: python -m flows.pipeline --stages sft grpo",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would run and why, then stop")
    parser.add_argument("--profile", help="write this profile to params.yaml first (see profiles/)")
    parser.add_argument("--stages", nargs="+", metavar="STAGE", help="only these stages of dvc.yaml")
    parser.add_argument("--timeout-hours", type=float, default=24.0, help="longest time for one stage (24)")
    arguments = parser.parse_args()
    if arguments.dry_run:
        dry_run(PROJECT_ROOT, arguments.profile, arguments.stages)
        return 0
    # Checked before the server starts, so that a mistake shows at once.
    params = choose_profile(PROJECT_ROOT, arguments.profile)
    select(read_stages(PROJECT_ROOT, params.profile), arguments.stages)
    os.environ.update(offline_environment())
    with prefect_server() as patience_s:
        importlib.import_module("mlflow")  # takes three seconds, in which the temporary server starts
        wait_for_server(patience_s)
        outcomes = pipeline(stages=arguments.stages, timeout_hours=arguments.timeout_hours)
    print_results(outcomes, PROJECT_ROOT)
    return 0


if __name__ == "__main__":
    run_main(main, StageFailed, DvcError, ServerError)
