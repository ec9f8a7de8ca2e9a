"""A worker of a sweep: takes trials one after the other and trains each a little, from the SFT policy."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.cli import run_main
from tasks.params import Params, ParamsError
from tasks.sweep_plan import Plan, SweepError, load_plan
from tasks.sweep_study import SettingsFailed, SweepStudy, Values, settings_text, work

if TYPE_CHECKING:
    from optuna import Trial

    from tasks.tracked_run import StageRun

# Where a training that has gone wrong shows first.
_MUST_BE_FINITE = ("grpo/grad_norm", "grpo/policy", "grpo/kl", "reward/total", "grpo/validation_success")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.trial",
        description="Work on the trials of a sweep until none is left. `python -m tasks.sweep` starts this.",
        epilog="Example: python -m tasks.trial outputs/sweeps/3f2a9c81d7e4",
    )
    parser.add_argument("folder", type=Path, help="folder of the sweep")
    parser.add_argument("--once", action="store_true", help="stop after one trial")
    arguments = parser.parse_args()
    plan = load_plan(arguments.folder)
    study = SweepStudy(plan)
    work(study, TrialRunner(plan), arguments.once)


class TrialRunner:
    """Runs trials of one sweep; the tool cache and the shared rollouts serve all of them."""

    def __init__(self, plan: Plan) -> None:
        from tasks.grpo import validation_questions
        from tasks.sweep_rollouts import shared_rollouts
        from tasks.workspace import use_threads
        from tools.cache import ToolResultCache

        use_threads(plan.params)
        self.plan = plan
        self.cache = ToolResultCache(plan.params.rollout.cached_results)
        self.questions = validation_questions(plan.params.grpo.validation_items)
        self.rollouts = shared_rollouts(plan, self.cache)

    def __call__(self, trial: Trial, settings: dict[str, Any]) -> Values:
        """Train under the settings; the objectives of the last validation.

        Raises:
            TrialPruned: the pruner stopped it.
            SettingsFailed: the settings do not fit together, do not fit into memory or diverge.
        """
        import torch
        from optuna import TrialPruned

        from tasks.tracking import resumable_run

        try:
            params = self.plan.trial_params(settings)
        except ParamsError as error:
            raise SettingsFailed(str(error).splitlines()[0]) from None
        folder = self.plan.trial_folder(trial.number)
        tags = {"sweep": self.plan.name, "trial": trial.number}
        began = time.monotonic()
        with resumable_run(f"trial-{trial.number}", folder / "run_id", params, tags=tags) as run:
            try:
                values = self._train(trial, params, folder, run)
            except torch.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                raise SettingsFailed(f"out of memory: {str(error).splitlines()[0]}") from error
            seconds = trial.user_attrs.get("seconds", 0.0) + time.monotonic() - began
            trial.set_user_attr("seconds", seconds)
            run.set_tags({"trial.state": "pruned" if values is None else "complete"})
        result = ", ".join(f"{name} {value:.3f}" for name, value in (values or {}).items()) or "stopped early"
        print(f"trial {trial.number}: {result} in {seconds:.1f} s with {settings_text(settings)}", flush=True)
        if values is None:
            raise TrialPruned
        return values

    def _train(self, trial: Trial, params: Params, folder: Path, run: StageRun) -> Values | None:
        """The loop of stage grpo, shorter; None if the trial was pruned."""
        from models.checkpoint import Checkpoints
        from models.grpo import grpo_step
        from tasks.grpo import build_parts, restore, validate
        from tasks.sweep_rollouts import fill

        parts, state = build_parts(params, self.cache)
        state.replay.spill_folder = folder / "spilled"  # other workers have theirs
        checkpoints = Checkpoints(folder / "checkpoint")
        fill(state.replay, self.rollouts, params)
        state = restore(parts, state, checkpoints)
        steps, every = params.grpo.steps, params.grpo.eval_every
        run.expect_steps(steps)
        while True:
            metrics, _ = grpo_step(parts, state, params.grpo, params.reward, params.seed)
            last = state.step >= steps
            if last or state.step % every == 0:
                metrics |= validate(parts, self.questions)
            _check_finite(metrics, state.step)
            run.log_metrics(metrics, state.step)
            if last:
                checkpoints.clear()
                names = {"success": "grpo/validation_success", "calls": "grpo/validation_calls"}
                return {name: metrics[names[name]] for name in params.sweep.objectives}
            if state.step % every == 0:
                if self._stopped(trial, metrics["grpo/validation_success"], state.step):
                    checkpoints.clear()
                    return None
                checkpoints.store(parts.engine, {"step": state.step, "state": state})

    def _stopped(self, trial: Trial, success: float, step: int) -> bool:
        """Whether the pruner gives the trial up. Studies with two objectives take no reports."""
        if len(self.plan.directions) > 1:
            return False
        if step not in trial.study.trials[trial.number].intermediate_values:  # known after a resume
            trial.report(success, step)
        return trial.should_prune()


def _check_finite(metrics: Mapping[str, float], step: int) -> None:
    wrong = [
        f"{name} is {metrics[name]}" for name in _MUST_BE_FINITE if not math.isfinite(metrics.get(name, 0.0))
    ]
    if wrong:
        raise SettingsFailed(f"diverged at step {step}: {', '.join(wrong)}")


if __name__ == "__main__":
    from models.checkpoint import CheckpointError

    run_main(main, CheckpointError, SweepError, ValueError)
