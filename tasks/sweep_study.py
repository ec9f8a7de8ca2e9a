"""The Optuna study of a sweep: who works on which trial, and what becomes of trials whose worker is gone.

Optuna leaves a killed trial RUNNING for ever, or needs heartbeats that end healthy trials when they are late
(optuna#485, #6283). Here every running trial names the process that works on it. When that process is gone, the next
worker goes on with the very same trial, from its checkpoint. So there are never more trials than asked for.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from tasks.provenance import git, owner_is_dead, owner_tags
from tasks.sweep_plan import Plan, SweepError
from tasks.sweep_space import Dimension, space_data

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.trial import FrozenTrial

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
Values = dict[str, float]
RunTrial = Callable[["Trial", dict[str, Any]], Values]


class SettingsFailed(Exception):
    """A trial came to nothing because of its settings (NaN, out of memory): it fails, the sweep goes on."""


@dataclass(frozen=True)
class TrialRow:
    """A trial for tables: `state` in lower case, `values` by objective, empty unless complete."""

    number: int
    state: str
    settings: dict[str, Any]
    values: Values
    seconds: float | None
    error: str


class SweepStudy:
    """The study in the folder of a plan. Safe to use from several processes at once."""

    def __init__(self, plan: Plan) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.plan = plan
        self._space = {name: _distribution(each) for name, each in plan.space.items()}
        plan.folder.mkdir(parents=True, exist_ok=True)
        with self._alone():
            # Not sqlite, which several processes at once destroy while it is new (optuna#820, #4994).
            storage = JournalStorage(JournalFileBackend(str(plan.folder / "journal.log")))
            self.study: Study = optuna.create_study(
                storage=storage,
                study_name=plan.name,
                directions=plan.directions,
                pruner=_pruner(plan),
                load_if_exists=True,
            )
            self._check_or_describe()
            self.study.enqueue_trial(plan.base, user_attrs={"settings": plan.base}, skip_if_exists=True)

    def _alone(self) -> FileLock:
        return FileLock(self.plan.folder / "study.lock")

    def _check_or_describe(self) -> None:
        """Optuna takes an existing study whatever direction or space is asked for (optuna#2199, #2328)."""
        wanted = {"space": space_data(self.plan.space), "objectives": list(self.plan.params.sweep.objectives)}
        present = self.study.user_attrs
        directions = [direction.name.lower() for direction in self.study.directions]
        if directions != self.plan.directions:
            raise SweepError(
                f"{self.plan.folder} holds a study with directions {directions}, but the objectives "
                f"{wanted['objectives']} need {self.plan.directions}; move that folder away to begin anew"
            )
        for name, value in wanted.items():
            if name not in present:
                self.study.set_user_attr(name, value)
            elif present[name] != value:
                raise SweepError(
                    f"{self.plan.folder} holds a study with another {name}; move that folder away to begin anew"
                )
        commit = git(self.plan.root, "rev-parse", "HEAD")
        if "git.commit" not in present:
            self.study.set_user_attr("git.commit", commit)
            self.study.set_user_attr("outputs/sft", self.plan.policy_digest)
        elif present["git.commit"] != commit:
            log.warning("sweep %s goes on with other code than it was started with", self.plan.name)

    def remaining(self) -> int:
        """Trials that have not ended yet, of the number asked for."""
        ended = sum(trial.state.is_finished() for trial in self.study.get_trials(deepcopy=False))
        return max(0, self.plan.params.sweep.n_trials - ended)

    def take(self) -> Trial | None:
        """A trial to work on: one whose worker is gone, else the next one. None when there is none left."""
        from optuna import Trial
        from optuna.trial import TrialState

        with self._alone():
            trials = self.study.get_trials(deepcopy=False)
            for found in trials:
                owner = found.user_attrs.get("owner")
                if found.state is not TrialState.RUNNING or (owner and not owner_is_dead(owner)):
                    continue
                attempts = found.user_attrs.get("attempts", 0)
                trial = Trial(self.study, found._trial_id)
                if attempts >= MAX_ATTEMPTS:
                    self.fail(trial, f"its process was killed {attempts} times")
                    continue
                log.info("trial %d goes on (attempt %d)", found.number, attempts + 1)
                return self._own(trial, attempts + 1)
            started = sum(trial.state is not TrialState.WAITING for trial in trials)
            if started >= self.plan.params.sweep.n_trials:
                return None
            self.study.sampler = _sampler(self.plan.params.seed, started)
            return self._own(self.study.ask(self._space), 1)

    def _own(self, trial: Trial, attempt: int) -> Trial:
        trial.set_user_attr("attempts", attempt)
        trial.set_user_attr("owner", owner_tags())
        if "settings" not in trial.user_attrs:
            trial.set_user_attr("settings", {name: _rounded(value) for name, value in trial.params.items()})
        return trial

    def complete(self, trial: Trial, values: Mapping[str, float]) -> None:
        """Record the result. Values that are not finite fail the trial: Optuna would call inf the best."""
        wanted = [values[name] for name in self.plan.params.sweep.objectives]
        if not all(math.isfinite(value) for value in wanted):
            self.fail(trial, f"its result is not finite: {wanted}")
            return
        self.study.tell(trial.number, wanted)

    def prune(self, trial: Trial) -> None:
        """Record that the pruner stopped the trial."""
        from optuna.trial import TrialState

        self.study.tell(trial.number, state=TrialState.PRUNED)

    def fail(self, trial: Trial, reason: str) -> None:
        """Record that the trial came to nothing."""
        from optuna.trial import TrialState

        log.warning("trial %d failed: %s", trial.number, reason)
        trial.set_user_attr("error", reason)
        self.study.tell(trial.number, state=TrialState.FAIL)

    def rows(self) -> list[TrialRow]:
        """All trials that were begun, by number."""
        from optuna.trial import TrialState

        trials = self.study.get_trials(deepcopy=False)
        return [self._row(trial) for trial in trials if trial.state is not TrialState.WAITING]

    def _row(self, trial: FrozenTrial) -> TrialRow:
        names = self.plan.params.sweep.objectives
        done = trial.state.name == "COMPLETE"
        return TrialRow(
            number=trial.number,
            state=trial.state.name.lower(),
            settings=trial.user_attrs.get("settings", {}),
            values=dict(zip(names, trial.values, strict=True)) if done else {},
            seconds=trial.user_attrs.get("seconds"),
            error=trial.user_attrs.get("error", ""),
        )

    def best(self) -> TrialRow:
        """The complete trial of most success; of equal ones that of fewer calls, then the earlier one.

        Raises:
            SweepError: no trial is complete.
        """
        rows = self.rows()
        complete = [row for row in rows if row.state == "complete"]
        if not complete:
            errors = [f"trial {row.number}: {row.error}" for row in rows if row.error]
            raise SweepError(
                f"sweep {self.plan.name}: none of its {len(rows)} trials came to a result"
                f"{f' ({errors[0]})' if errors else ''}; narrow sweep.space or repair params.yaml, then run again"
            )
        return min(
            complete, key=lambda row: (-row.values["success"], row.values.get("calls", 0.0), row.number)
        )


def work(study: SweepStudy, run_trial: RunTrial, once: bool = False) -> None:
    """Work on trials until there are none left, or on one only.

    An exception other than SettingsFailed ends the worker and leaves the trial to be taken up again: it says
    something about the program, not about the settings.
    """
    from optuna import TrialPruned

    while (trial := study.take()) is not None:
        try:
            study.complete(trial, run_trial(trial, trial.user_attrs["settings"]))
        except TrialPruned:
            study.prune(trial)
        except SettingsFailed as error:
            study.fail(trial, str(error))
        if once:
            return


def _distribution(dimension: Dimension) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.choices is not None:
        return CategoricalDistribution(dimension.choices)
    assert dimension.low is not None
    assert dimension.high is not None
    if dimension.integer:
        step = int(dimension.step or 1)
        return IntDistribution(int(dimension.low), int(dimension.high), dimension.log, step)
    return FloatDistribution(dimension.low, dimension.high, dimension.log, dimension.step)


def _sampler(seed: int, number: int) -> Any:
    """Seeded per trial: a sampler of one seed would start its stream again when a sweep is resumed (optuna#4412)."""
    from optuna.samplers import TPESampler

    return TPESampler(seed=int(np.random.SeedSequence([seed, number]).generate_state(1)[0]))


def _pruner(plan: Plan) -> BasePruner:
    from optuna.pruners import NopPruner, PercentilePruner

    config = plan.params.sweep.pruner
    if (
        config.percentile == 100 or len(plan.directions) > 1
    ):  # Optuna refuses reports of studies with two objectives
        return NopPruner()
    return PercentilePruner(
        config.percentile, n_startup_trials=config.startup_trials, n_warmup_steps=config.warmup_steps
    )


def _rounded(value: Any) -> Any:
    """Three significant digits: more would only look exact, and params.yaml has to stay readable."""
    return float(f"{value:.3g}") if isinstance(value, float) else value


def settings_text(settings: Mapping[str, Any]) -> str:
    """One line for logs."""
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in settings.items())
