"""Risks of a study: two workers on one trial, lost trials, NaN as the best, results of another search mixed in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.params import PROJECT_ROOT, ParamsError
from tasks.sweep_plan import Plan, SweepError, make_plan
from tasks.sweep_study import MAX_ATTEMPTS, SettingsFailed, SweepStudy, TrialRow, Values, work
from tests.tasks.sweep_worker import formula
from tests.tasks.sweeps import small_params


def plan(root: Path, **changes: Any) -> Plan:
    made = Plan(small_params(**changes), root, "digest")
    made.save()
    return made


def by_formula(trial: Any, settings: dict[str, Any]) -> Values:
    return {"success": formula(settings), "calls": settings["reward.lambda_tool"]}


def run(made: Plan, run_trial: Any = by_formula) -> list[TrialRow]:
    study = SweepStudy(made)
    work(study, run_trial)
    return study.rows()


def worker(made: Plan, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.tasks.sweep_worker", str(made.folder), *arguments]
    return subprocess.Popen(command, cwd=PROJECT_ROOT, env=os.environ, stdout=subprocess.PIPE, text=True)


def kill_in(made: Plan, trial: int) -> None:
    """A worker that is killed with SIGKILL in the middle of a trial."""
    process = worker(made, "--hang-in", str(trial))
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "hangs"
    process.kill()
    process.wait()


def test_four_workers_on_a_new_study_share_its_trials(tmp_path: Path) -> None:
    """optuna#820, #4994: several processes on a new sqlite file destroy it."""
    made = plan(tmp_path, sweep__n_trials=12)
    workers = [worker(made) for _ in range(4)]
    assert [process.wait() for process in workers] == [0, 0, 0, 0]
    rows = SweepStudy(made).rows()
    assert [row.number for row in rows] == list(range(12))
    assert {row.state for row in rows} == {"complete"}
    assert len({str(row.settings) for row in rows}) == 12


def test_a_killed_trial_goes_on_and_is_no_extra_trial(tmp_path: Path) -> None:
    """optuna#485, #6283: killed trials stay RUNNING for ever, or heartbeats end healthy ones."""
    made = plan(tmp_path)
    kill_in(made, 1)
    study = SweepStudy(made)
    left_behind = study.rows()[1]
    assert (left_behind.state, study.remaining()) == ("running", 2)
    rows = run(made)
    assert [(row.number, row.state) for row in rows] == [(n, "complete") for n in range(3)]
    assert rows[1].settings == left_behind.settings
    assert study.study.trials[1].user_attrs["attempts"] == 2


def test_a_trial_that_always_dies_fails_at_last(tmp_path: Path) -> None:
    made = plan(tmp_path)
    for _ in range(MAX_ATTEMPTS):
        kill_in(made, 0)
    rows = run(made)
    assert [row.state for row in rows] == ["fail", "complete", "complete"]
    assert "killed" in rows[0].error


def test_a_trial_of_a_living_worker_is_left_to_it(tmp_path: Path) -> None:
    made = plan(tmp_path)
    busy = worker(made, "--hang-in", "0")
    try:
        assert busy.stdout is not None
        assert busy.stdout.readline().strip() == "hangs"
        assert [row.state for row in run(made)] == ["running", "complete", "complete"]
    finally:
        busy.kill()
        busy.wait()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_results_that_are_not_finite_fail_and_are_never_the_best(tmp_path: Path, value: float) -> None:
    """optuna#2727, #3205: Optuna takes +inf for the best of all."""

    def sometimes(trial: Any, settings: dict[str, Any]) -> Values:
        return {"success": value if trial.number else 0.2}

    made = plan(tmp_path)
    rows = run(made, sometimes)
    assert [row.state for row in rows] == ["complete", "fail", "fail"]
    assert SweepStudy(made).best().number == 0
    assert SweepStudy(made).remaining() == 0


def test_a_study_of_failures_only_says_so(tmp_path: Path) -> None:
    """Optuna says "Record does not exist"."""

    def fails(trial: Any, settings: dict[str, Any]) -> Values:
        raise SettingsFailed("grpo/kl is nan")

    made = plan(tmp_path)
    run(made, fails)
    with pytest.raises(
        SweepError, match=r"none of its 3 trials came to a result \(trial 0: grpo/kl is nan\)"
    ):
        SweepStudy(made).best()


def test_a_mistake_of_the_program_stops_the_worker_and_keeps_the_trial(tmp_path: Path) -> None:
    def broken(trial: Any, settings: dict[str, Any]) -> Values:
        raise KeyError("no such metric")

    made = plan(tmp_path)
    with pytest.raises(KeyError):
        run(made, broken)
    assert SweepStudy(made).rows()[0].state == "running"


def test_the_first_trial_is_what_params_yaml_holds_and_resuming_counts(tmp_path: Path) -> None:
    made = plan(tmp_path, sweep__n_trials=2, reward__lambda_tool=1.2345678)
    assert len(run(made)) == 2
    assert len(run(made)) == 2
    more = Plan(small_params(sweep__n_trials=4, reward__lambda_tool=1.2345678), tmp_path, "digest")
    assert more.folder == made.folder
    rows = run(more)
    assert len(rows) == 4
    assert rows[0].settings == made.base
    assert rows[0].settings["reward.lambda_tool"] == 1.2345678
    assert all(row.settings != made.base for row in rows[1:])


def test_a_seeded_sweep_is_the_same_twice_and_when_it_was_stopped(tmp_path: Path) -> None:
    """optuna#4412: a resumed sampler begins its random numbers again."""

    def stops(trial: Any, settings: dict[str, Any]) -> Values:
        if trial.number == 12 and trial.user_attrs["attempts"] == 1:
            raise KeyboardInterrupt
        return by_formula(trial, settings)

    changes = {"sweep__n_trials": 15}
    whole = run(plan(tmp_path / "whole", **changes))
    cut = plan(tmp_path / "cut", **changes)
    with pytest.raises(KeyboardInterrupt):
        run(cut, stops)
    SweepStudy(cut).study._storage.set_trial_user_attr(12, "owner", None)  # as if this process had ended
    assert [row.settings for row in run(cut)] == [row.settings for row in whole]
    other = run(plan(tmp_path / "other", seed=1, **changes))
    assert [row.settings for row in other] != [row.settings for row in whole]


def test_another_search_never_continues_this_one(tmp_path: Path) -> None:
    """optuna#2199, #2328: a changed space fails in the middle of a study, or mixes two searches."""
    made = plan(tmp_path)
    run(made)
    for change in (
        {"sweep__space": {"reward.lambda_tool": {"low": 0.5, "high": 3.0}}},
        {"sweep__objectives": ["success", "calls"]},
        {"reward__lambda_acc": 3.0},
        {"sweep__steps": 5},
    ):
        params = small_params(**change)
        assert Plan(params, tmp_path, "digest").folder != made.folder
        with pytest.raises(ParamsError, match=r"started with other settings: .*leave out --study"):
            make_plan(params, tmp_path, made.name)
    with pytest.raises(ParamsError, match="no sweep abc in outputs/sweeps; there are"):
        make_plan(small_params(), tmp_path, "abc")


def test_a_study_of_another_direction_is_an_error(tmp_path: Path) -> None:
    """Optuna ignores the direction of an existing study."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    made = plan(tmp_path)
    storage = JournalStorage(JournalFileBackend(str(made.folder / "journal.log")))
    optuna.create_study(storage=storage, study_name=made.name, direction="minimize")
    with pytest.raises(SweepError, match=r"directions .'minimize'.*move that folder away"):
        SweepStudy(made)


def test_weak_trials_are_stopped_with_one_objective_only(tmp_path: Path) -> None:
    from optuna import TrialPruned

    def reports(trial: Any, settings: dict[str, Any]) -> Values:
        for step in (1, 2):
            trial.report(formula(settings), step)
            if trial.should_prune():
                raise TrialPruned
        return by_formula(trial, settings)

    rows = run(plan(tmp_path, sweep__n_trials=6, reward__lambda_tool=2.0), reports)
    assert rows[0].state == "complete"
    assert "pruned" in {row.state for row in rows[1:]}
    none_stopped = plan(tmp_path, sweep__pruner={"percentile": 100.0}, reward__lambda_tool=1.9)
    assert {row.state for row in run(none_stopped, reports)} == {"complete"}
    two = plan(tmp_path, sweep__objectives=["success", "calls"])
    rows = run(two)
    assert {row.state for row in rows} == {"complete"}
    assert set(rows[0].values) == {"success", "calls"}
