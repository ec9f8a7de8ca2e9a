"""What a sweep over re-scored rollouts costs, and whether it ranks settings as full runs of stage grpo do.

The same settings twice: as trials of a sweep (a few fresh rollouts, the rest shared and re-scored, weak trials stopped)
and as full runs with the parameters as they are. Reported are the cost ratio and, over the first `--ranked` settings,
which no pruner stops, Spearman's rank correlation of their validation success. Time is that of training and
validation, with the shared rollouts; starting Python and its libraries is in neither. Needs outputs/sft and the
validation questions (`dvc repro sft`). Results are kept in outputs/benchmarks: the same command goes on.

    python -m benchmarks.sweep_cost --settings 20 --ranked 8
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from tasks.params import PROJECT_ROOT, Params, load_params, override
from tasks.sweep_plan import Plan, make_plan

FOLDER = Path("outputs/benchmarks/sweep_cost")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--settings", type=int, default=20, help="settings to compare (default %(default)s)")
    parser.add_argument(
        "--ranked", type=int, default=8, help="settings for the ranking (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, help="policy updates of a full run (grpo.steps)")
    parser.add_argument("--trial-steps", type=int, help="policy updates of a trial (sweep.steps)")
    parser.add_argument("--full-runs", type=int, help="full runs to measure; the rest cost their mean (all)")
    parser.add_argument("--seed", type=int, default=0, help="of the settings (default %(default)s)")
    arguments = parser.parse_args()
    params = scaled(load_params(), arguments.steps, arguments.trial_steps, arguments.seed)
    full_runs = arguments.settings if arguments.full_runs is None else arguments.full_runs
    print(json.dumps(compare(params, arguments.settings, arguments.ranked, full_runs), indent=2))


def scaled(params: Params, steps: int | None, trial_steps: int | None, seed: int) -> Params:
    """The parameters with other lengths."""
    given = {"grpo.steps": steps, "sweep.steps": trial_steps}
    return override(params, {"seed": seed, **{name: value for name, value in given.items() if value}})


def compare(params: Params, settings: int, ranked: int, full_runs: int) -> dict[str, Any]:
    """Run what is missing and summarise."""
    # What is ranked must not be stopped; all others may be, as in any sweep.
    pruner = params.sweep.pruner.model_dump() | {"startup_trials": ranked}
    plan = make_plan(override(params, {"sweep.n_trials": settings, "sweep.pruner": pruner}))
    trials = sweep(plan)
    full = [full_run(plan, trial["settings"]) for trial in trials[: max(full_runs, ranked)]]
    trial_seconds = sum(trial["seconds"] for trial in trials) + shared_seconds(plan)
    full_seconds = float(np.mean([run["seconds"] for run in full])) * len(trials)
    pairs = [
        (trial["success"], run["success"])
        for trial, run in zip(trials[:ranked], full[:ranked], strict=True)
        if trial["success"] is not None
    ]
    best = max(
        (trial for trial in trials if trial["success"] is not None), key=lambda trial: trial["success"]
    )
    return {
        "sweep": plan.name,
        "settings": len(trials),
        "pruned": sum(trial["state"] == "pruned" for trial in trials),
        "sweep_seconds": round(trial_seconds, 1),
        "full_seconds": round(full_seconds, 1),
        "full_runs_measured": len(full),
        "cost_ratio": round(trial_seconds / full_seconds, 3),
        "ranked": len(pairs),
        "rank_correlation": correlation(pairs),
        "best_trial": best["number"],
        "success": {"trials": [a for a, _ in pairs], "full": [b for _, b in pairs]},
    }


def sweep(plan: Plan) -> list[dict[str, Any]]:
    """All trials of the sweep, by number; what is done already is not done again."""
    from tasks.sweep import run_sweep
    from tasks.sweep_study import SweepStudy

    run_sweep(plan)
    return [
        {
            "number": row.number,
            "state": row.state,
            "settings": row.settings,
            "seconds": row.seconds or 0.0,
            "success": row.values.get("success"),
        }
        for row in SweepStudy(plan).rows()
    ]


def shared_seconds(plan: Plan) -> float:
    """Seconds that sampling the shared rollouts took."""
    return float(json.loads((plan.folder / "rollouts.json").read_text(encoding="utf-8"))["seconds"])


def full_run(plan: Plan, settings: dict[str, Any]) -> dict[str, Any]:
    """Stage grpo's loop with the settings, from the SFT policy to its last step, without records."""
    from models.grpo import grpo_step
    from tasks.grpo import build_parts, validate, validation_questions
    from tasks.workspace import use_threads
    from tools.cache import ToolResultCache

    params = override(plan.params, settings)
    file = PROJECT_ROOT / FOLDER / f"{plan.name}-{params.grpo.steps}.jsonl"
    known = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    for result in known:
        if result["settings"] == settings:
            return dict(result)
    use_threads(params)
    began = time.monotonic()
    parts, state = build_parts(params, ToolResultCache(params.rollout.cached_results))
    questions = validation_questions(params.grpo.validation_items)
    success = 0.0
    while state.step < params.grpo.steps:
        grpo_step(parts, state, params.grpo, params.reward, params.seed)
        if state.step % params.grpo.eval_every == 0 or state.step == params.grpo.steps:
            success = validate(parts, questions)["grpo/validation_success"]
    result = {"settings": settings, "seconds": round(time.monotonic() - began, 1), "success": success}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(result) + "\n")
    return result


def correlation(pairs: list[tuple[float, float]]) -> float | None:
    """Spearman's rank correlation, ties by their mean rank; None where one side has only one value."""
    from scipy.stats import spearmanr

    first, second = zip(*pairs, strict=True) if pairs else ((), ())
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return round(float(spearmanr(first, second).statistic), 3)


if __name__ == "__main__":
    from tasks.cli import run_main
    from tasks.sweep_plan import SweepError

    run_main(main, SweepError)
