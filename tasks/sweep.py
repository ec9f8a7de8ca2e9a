"""The sweep: search over reward weights and settings of GRPO. Resumes where a killed one stopped."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from typing import Any

from filelock import FileLock, Timeout

from tasks.cli import run_main
from tasks.params import Params, load_params, override
from tasks.sweep_plan import FOLDER, Plan, SweepError, make_plan

log = logging.getLogger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.sweep",
        description="Search over reward weights and settings of GRPO, as the block `sweep` of params.yaml says. "
        "The same command goes on where a killed sweep stopped.",
        epilog="Example: python -m tasks.sweep --trials 8 --workers 2",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be searched and how long, then stop"
    )
    parser.add_argument("--trials", type=int, metavar="N", help="settings to try in all (sweep.n_trials)")
    parser.add_argument("--workers", type=int, metavar="N", help="trials at a time (sweep.workers)")
    parser.add_argument(
        "--study", metavar="NAME", help=f"go on with this sweep of {FOLDER}, or fail if it differs"
    )
    arguments = parser.parse_args()
    params = with_options(load_params(), arguments.trials, arguments.workers)
    plan = make_plan(params, expected=arguments.study)
    if arguments.dry_run:
        from tasks.sweep_preview import preview

        print(preview(plan))
        return
    result = run_sweep(plan)
    best = ", ".join(f"{name} {value:.3f}" for name, value in result["best"]["values"].items())
    print(f"sweep {plan.name}: trial {result['best']['trial']} is the best: {best}")
    print(
        f"settings: {FOLDER / plan.name / 'best.yaml'}; to use them: python -m tasks.apply_sweep {plan.name}"
    )


def with_options(params: Params, trials: int | None, workers: int | None) -> Params:
    """Parameters with what the command line says instead. Raises ParamsError for numbers below 1."""
    given = {"sweep.n_trials": trials, "sweep.workers": workers}
    changes = {name: value for name, value in given.items() if value is not None}
    return override(params, changes) if changes else params


def run_sweep(plan: Plan, tags: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run what remains of the sweep, record it, and return its summary (`summary.json`).

    Raises:
        SweepError: another process is at this sweep, a worker failed, or no trial came to a result.
        FileNotFoundError: there is no SFT policy to start from.
    """
    if plan.policy_digest == "missing":
        raise FileNotFoundError(
            "outputs/sft holds no model, and trials start from it; make it with `dvc repro sft`"
        )
    if plan.params.rollout.engine == "vllm" and plan.params.sweep.workers > 1:
        raise SweepError("vLLM's weights of all workers would share outputs/.weights; set sweep.workers to 1")
    plan.save()
    try:
        with FileLock(plan.folder / "sweep.lock", timeout=0):
            return _run_sweep(plan, tags or {})
    except Timeout:
        raise SweepError(
            f"sweep {plan.name} is already at work in another process; wait for it, or stop it"
        ) from None


def _run_sweep(plan: Plan, tags: Mapping[str, Any]) -> dict[str, Any]:
    from tasks.sweep_report import figures, markdown, summary, write_files
    from tasks.sweep_study import MAX_ATTEMPTS, SweepStudy
    from tasks.sweep_workers import environment, run_workers
    from tasks.tracking import resumable_run
    from tasks.workspace import ProgressLog

    study = SweepStudy(plan)
    config = plan.params.sweep
    everything = {**tags, "sweep": plan.name, "sweep.objectives": " ".join(config.objectives)}
    record = plan.folder / "run_id"
    with resumable_run(f"sweep-{plan.name}", record, plan.params, plan.root, everything, False) as run:
        run.log_text(json.dumps(plan.identity, indent=1), "sweep/identity.json")
        run.expect_steps(config.n_trials)
        left = study.remaining()
        log.info("sweep %s: %d of %d trials remain", plan.name, left, config.n_trials)
        if left:
            with ProgressLog("sweep") as progress:
                shown = -1

                def remaining() -> int:
                    nonlocal shown
                    left = study.remaining()
                    if left != shown:
                        shown = left
                        progress.update(config.n_trials - left, config.n_trials)
                    return left

                run_workers(
                    folder=plan.folder,
                    root=plan.root,
                    count=min(config.workers, left),
                    env=environment(run.run_id),
                    once=plan.params.rollout.engine == "vllm",
                    say=lambda line: print(line, flush=True),
                    remaining=remaining,
                    most_restarts=MAX_ATTEMPTS * config.n_trials,
                )
        best, rows = study.best(), study.rows()
        so_far = 0.0
        for row in rows:
            if row.values:
                so_far = max(so_far, row.values["success"])
                run.log_metrics({f"sweep/{name}": value for name, value in row.values.items()}, row.number)
                run.log_metrics({"sweep/best_success": so_far}, row.number)
        found = summary(plan, rows, best, run)
        for file in write_files(plan, rows, best, found):
            run.log_artifact(file, "sweep")
        for name, figure in figures(study):
            run.log_figure(figure, f"sweep/{name}.png")
        run.set_tags({"mlflow.note.content": markdown(plan, rows, best), "sweep.best_trial": best.number})
        return found


if __name__ == "__main__":
    run_main(main, SweepError)
