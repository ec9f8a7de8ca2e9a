"""The sweep as a Prefect flow: one task that runs `python -m tasks.sweep` in its own process group."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from pydantic import Field

from flows.artifacts import StageProgress, show_link, show_markdown, show_table
from flows.stage import child_environment
from flows.temporary_server import ServerError, prefect_server, wait_for_server
from tasks.cli import run_main
from tasks.params import PROJECT_ROOT, Params, Settings, load_params
from tasks.process_group import CommandTimeout, run_guarded
from tasks.run_cards import mlflow_page
from tasks.sweep import with_options
from tasks.sweep_plan import FOLDER, Plan, make_plan
from tasks.sweep_preview import preview

SHOWN = 10  # best trials in Prefect's table


class SweepRun(Settings):
    """One run of the sweep, as the form in Prefect asks for it. What is left out is as in params.yaml."""

    trials: int | None = Field(None, ge=1, description="settings to try in all, earlier runs included")
    workers: int | None = Field(None, ge=1, description="trials at a time, each in a process of its own")
    study: str | None = Field(
        None, min_length=1, description="name of an earlier sweep to go on with; fails if the settings differ"
    )
    timeout_hours: float = Field(24.0, gt=0, description="longest time; a later run goes on from there")


AS_IT_STANDS = SweepRun()


class SweepFailed(Exception):
    """The sweep ended with an error; the message is its own."""


@task(task_run_name="sweep:{name}", cache_policy=NO_CACHE, persist_result=False)
def run_trials(name: str, arguments: list[str], root: Path, timeout_s: float) -> None:
    """Run what remains of the sweep; its output goes to the log as it comes.

    Raises:
        SweepFailed: it ended with an error, or not in time.
    """
    log = get_run_logger()
    errors: list[str] = []
    progress = StageProgress("sweep")

    def on_line(line: str) -> None:
        progress.follow(line)
        if line.startswith("error: "):
            errors.append(line.removeprefix("error: "))
        if line.strip():
            log.info("%s", line)

    env = child_environment() | {"TOOLPLAN_FLOW_RUN_ID": str(flow_run.get_id())}
    command = [sys.executable, "-m", "tasks.sweep", *arguments]
    try:
        code = run_guarded(command, on_line, root, env, timeout_s)
    except CommandTimeout as error:
        raise SweepFailed(f"sweep {name}: {error}; run it again to go on") from error
    if code != 0:
        raise SweepFailed(f"sweep {name}: {'; '.join(errors) or f'ended with exit code {code}'}")


@flow(name="sweep", flow_run_name="sweep")
def sweep(run: SweepRun = AS_IT_STANDS, root: Path | None = None) -> dict[str, Any]:
    """Search over reward weights and settings of GRPO, or go on with a search that was stopped.

    Args:
        run: what to run.
        root: the project; this one when absent.

    Returns:
        The sweep's summary: trials by state, best trial, its values and settings.

    Raises:
        SweepFailed: the sweep ended with an error.
    """
    root = PROJECT_ROOT if root is None else root
    plan = _plan(load_params(root / "params.yaml"), run, root)
    show_markdown("sweep-plan", f"```\n{preview(plan)}\n```", "what is searched, and how long it takes")
    run_trials(plan.name, _arguments(run), root, run.timeout_hours * 3600)
    return record(plan)


def record(plan: Plan) -> dict[str, Any]:
    """Show the result in Prefect and return the summary."""
    summary: dict[str, Any] = json.loads((plan.folder / "summary.json").read_text(encoding="utf-8"))
    trials = json.loads((plan.folder / "trials.json").read_text(encoding="utf-8"))
    show_table("sweep-trials", trials[:SHOWN], f"best trials of sweep {plan.name}")
    best = (plan.folder / "best.yaml").read_text(encoding="utf-8")
    show_markdown(
        "sweep-best",
        f"```yaml\n{best}```\n\nTo use these settings: `python -m tasks.apply_sweep {plan.name}`",
        "best settings",
    )
    page = mlflow_page(summary["experiment_id"], summary["run_id"])
    show_link("sweep-run", page, "this sweep in MLflow: trials, plots, importance")
    return summary


def _plan(params: Params, run: SweepRun, root: Path) -> Plan:
    return make_plan(with_options(params, run.trials, run.workers), root, run.study)


def _arguments(run: SweepRun) -> list[str]:
    given = {"--trials": run.trials, "--workers": run.workers, "--study": run.study}
    return [part for name, value in given.items() if value is not None for part in (name, str(value))]


def main() -> None:
    """Command line of the flow."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.sweep",
        description="Search over reward weights and settings of GRPO, shown in Prefect.",
        epilog="Example: python -m flows.sweep --trials 8 --workers 2",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be searched, then stop")
    parser.add_argument("--trials", type=int, metavar="N", help="settings to try in all (sweep.n_trials)")
    parser.add_argument("--workers", type=int, metavar="N", help="trials at a time (sweep.workers)")
    parser.add_argument("--study", metavar="NAME", help=f"go on with this sweep of {FOLDER}")
    arguments = parser.parse_args()
    params = with_options(load_params(), arguments.trials, arguments.workers)
    plan = make_plan(params, expected=arguments.study)
    if arguments.dry_run:
        print(preview(plan))
        return
    run = SweepRun(trials=arguments.trials, workers=arguments.workers, study=arguments.study)
    with prefect_server() as patience_s:
        wait_for_server(patience_s)
        result = sweep(run)
    print(f"sweep {plan.name}: {json.dumps(result['best'])}")


if __name__ == "__main__":
    run_main(main, SweepFailed, ServerError)
