"""The pipeline as one Prefect flow: one task per DVC stage, in DVC's order, each in its own process group.

Prefect decides when and shows what happens; DVC decides what has to run; MLflow keeps the numbers. The same
work can be done by `dvc repro` alone, and leaves the same dvc.lock.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from flows.artifacts import show_link, show_markdown
from flows.records import announce_champion, maker, record
from flows.stage import StageFailed, child_environment, run_stage
from flows.temporary_server import ServerError, prefect_server, wait_for_server
from tasks.cli import run_main
from tasks.dvc_graph import DvcError, Stage, out_of_date, read_stages, upstream
from tasks.env import offline_environment
from tasks.estimate import config_text, plan_text
from tasks.health.locks import check_dvc_lock
from tasks.overrides import (
    Optional,
    Overrides,
    changed_keys,
    difference,
    difference_table,
    without_default,
    write_overrides,
)
from tasks.params import PROJECT_ROOT, Params, ParamsError, load_params
from tasks.pipeline_report import StageResult, print_results
from tasks.project_copy import project_copy
from tasks.run_cards import mlflow_page
from tasks.tracking import PARENT_RUN_VARIABLE, pipeline_run
from tasks.tracking_store import open_store, resolve_store


class PipelineRun(Optional):
    """One run of the pipeline, as the form in Prefect asks for it. What is left out is as in params.yaml."""

    profile: str | SkipJsonSchema[None] = Field(
        None,
        description="file in profiles/; absent: the one that params.yaml names",
        json_schema_extra=without_default,
    )
    stages: list[str] | SkipJsonSchema[None] = Field(
        None,
        description="only these stages of dvc.yaml; absent: all",
        json_schema_extra=without_default,
    )
    timeout_hours: float = Field(24.0, gt=0, description="longest time for one stage")
    overrides: Overrides = Field(
        default_factory=Overrides,
        description="parameters for this run only; it is made on a copy of the project",
    )


AS_IT_STANDS = PipelineRun()
_NOT_THERE = StageResult("", "skipped")


def run_name() -> str:
    """Names the flow run after its profile: Prefect's own names are random words."""
    given = flow_run.parameters
    run = PipelineRun.model_validate(given["run"])
    root = Path(given["root"] or PROJECT_ROOT)
    return f"pipeline-{run.profile or load_params(root / 'params.yaml').profile}"


@flow(name="pipeline", flow_run_name=run_name)
def pipeline(run: PipelineRun = AS_IT_STANDS, root: Path | None = None) -> dict[str, str]:
    """Bring the pipeline up to date and record it.

    Args:
        run: what to run. With another profile or with overrides it runs on a copy of the project, whose
            results go to the DVC cache and to MLflow; params.yaml stays as it is.
        root: folder of dvc.yaml; this project's own when absent.

    Returns:
        For each stage `ran`, `cached` or `skipped`.

    Raises:
        StageFailed: the first stage that failed; later ones are not started.
    """
    if "DVC_STAGE" in os.environ:
        raise ParamsError("the pipeline was started inside a DVC stage; stages run tasks, not flows")
    root = PROJECT_ROOT if root is None else root
    params = load_params(root / "params.yaml")
    env = child_environment()
    changes = changed_keys(run.overrides)
    if not changes and run.profile in (None, params.profile):
        return _run_all(params, run, root, env, {})
    store = resolve_store(params.tracking, root)
    open_store(store)  # made here, so that records and artifacts lie with the project's own
    with project_copy(root, str(flow_run.get_id()), env) as copy:
        tried = write_overrides(copy, run.profile, changes)
        differs = difference(params, tried)
        show_markdown("overrides", difference_table(differs), "what this run changes in params.yaml")
        text = "; ".join(f"{key}: {old} -> {new}" for key, (old, new) in differs.items())
        tracking = tried.tracking.model_copy(update={"tracking_uri": store.uri})
        tried = tried.model_copy(update={"tracking": tracking})
        return _run_all(tried, run, copy, {**env, "MLFLOW_TRACKING_URI": store.uri}, {"overrides": text})


def _run_all(
    params: Params, options: PipelineRun, root: Path, base_env: Mapping[str, str], tags: Mapping[str, str]
) -> dict[str, str]:
    """Bring the selected stages up to date, inside one MLflow parent run."""
    stages = read_stages(root, params.profile)
    graph = select(stages, options.stages)
    flow_id = str(flow_run.get_id())
    timeout_s = options.timeout_hours * 3600
    results = {name: StageResult(name, "skipped") for name in graph}
    records = pipeline_run(params, root, {"prefect.flow_run_id": flow_id, **tags})
    with only_pipeline(root), records as run:
        show_link("mlflow-run", mlflow_page(run.experiment_id, run.run_id), "this pipeline run in MLflow")
        stale = out_of_date(root, base_env)
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
        if results.get("promote", _NOT_THERE).outcome == "ran":
            announce_champion(params, root)
    return {name: result.outcome for name, result in results.items()}


@contextmanager
def only_pipeline(root: Path) -> Iterator[None]:
    """One pipeline at a time in a folder.

    Raises:
        ParamsError: another is at work.
    """
    try:
        with FileLock(root / ".dvc" / "tmp" / "pipeline.lock", timeout=0):
            try:
                yield
            finally:  # a killed dvc leaves its entries in .dvc/tmp/rwlock
                check_dvc_lock(root, fix=True)
    except Timeout:
        raise ParamsError(f"another pipeline is at work in {root}; wait for it, or stop it") from None


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
    print(config_text(params, root))
    print("stages:")
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
    print(plan_text([name for name in graph if name in running], params, root))


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
        outcomes = pipeline(PipelineRun(stages=arguments.stages, timeout_hours=arguments.timeout_hours))
    print_results(outcomes, PROJECT_ROOT)
    return 0


if __name__ == "__main__":
    run_main(main, StageFailed, DvcError, ServerError)
