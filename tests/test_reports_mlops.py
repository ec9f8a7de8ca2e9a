"""66 public bug reports that users of such pipelines have met (Prefect, DVC, MLflow, Great Expectations, Optuna,
DeepSpeed, vLLM), each with the tests that guard against it here, or why it cannot occur.

The numbers are those of the collection that the project was started from; the links stand at the tests.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tasks.params import PROJECT_ROOT

TRACKING, REPORTS = "tasks/test_tracking.py", "tasks/test_reports_tracking.py"
TRAINED, COMMANDS = "tasks/test_reports_training.py", "tasks/test_reports_commands.py"
METRICS, GATE = "tasks/test_metric_log.py", "tasks/test_validate.py"
PIPELINE, SERVICES, FLOWS = "flows/test_pipeline.py", "flows/test_services.py", "flows/test_reports_flows.py"
DEPLOYMENTS, DOCTOR = "flows/test_deployments.py", "tasks/test_doctor.py"
PROMOTE, GRAPH, REPRODUCE = "tasks/test_promote.py", "tasks/test_dvc_graph.py", "tasks/test_reproduce.py"
SFT, RANKS, ENGINE, VLLM = (f"models/test_{name}.py" for name in ("sft", "ranks", "engine", "vllm_engine"))
GRPO, TOKENS = "models/test_grpo.py", "models/test_field_tokens.py"
PARAMS, COLD_START = "tasks/test_params.py", "tasks/test_cold_start.py"
STUDY = "tasks/test_sweep_study.py"
LAYOUT, REPORT_PAGE = "test_layout.py", "tasks/test_rollout_report.py"

# number -> (what was reported, {file: tests})
GUARDED: dict[int, tuple[str, dict[str, tuple[str, ...]]]] = {
    # ---- MLflow: runs and contexts
    1: (
        "a leaked run blocks the next one",
        {TRACKING: ("test_a_failed_run_does_not_block_or_capture_the_next",)},
    ),
    2: (
        "metrics of a thread make a new run",
        {TRACKING: ("test_a_failed_run_does_not_block_or_capture_the_next",)},
    ),
    3: (
        "a stage in another process is not nested",
        {TRACKING: ("test_a_stage_is_a_child_and_leaves_its_parent_running",)},
    ),
    4: (
        "a child ends its parent",
        {TRACKING: ("test_a_stage_is_a_child_and_leaves_its_parent_running",)},
    ),
    5: (
        "killed runs stay RUNNING",
        {
            TRACKING: (
                "test_each_way_to_end_gives_the_right_status",
                "test_a_killed_stage_is_reaped_and_its_run_and_curve_are_continued",
            ),
            DOCTOR: ("test_an_orphan_run_is_found_and_only_killed_when_asked",),
        },
    ),
    6: (
        "a crash shows as FINISHED, sys.exit(0) as FAILED",
        {TRACKING: ("test_each_way_to_end_gives_the_right_status",)},
    ),
    7: (
        "a resumed run dies on changed parameters",
        {
            TRACKING: (
                "test_a_changed_parameter_on_resume_becomes_a_tag",
                "test_other_parameters_do_not_continue_the_old_run",
            )
        },
    ),
    8: ("retries multiply runs", {REPORTS: ("test_two_failed_attempts_and_a_good_one_are_one_run",)}),
    9: (
        "trials without their sweep as parent",
        {"flows/test_sweep.py": ("test_all_trials_have_the_sweep_as_parent",)},
    ),
    10: ("every rank opens a run", {TRAINED: ("test_two_ranks_make_one_run",)}),
    11: (
        "a nested failure closes the parent",
        {TRACKING: ("test_a_stage_is_a_child_and_leaves_its_parent_running",)},
    ),
    # ---- MLflow: data
    12: (
        "illegal names",
        {
            METRICS: (
                "test_names_that_mlflow_refuses_never_merge_into_one",
                "test_every_name_becomes_one_that_mlflow_accepts",
            ),
            TRACKING: ("test_non_finite_values_and_odd_names_reach_mlflow_as_numbers",),
            REPORTS: ("test_a_parameter_name_that_mlflow_refuses_does_not_stop_a_run",),
        },
    ),
    13: (
        "NaN and infinity break pages",
        {
            METRICS: ("test_a_non_finite_value_is_counted_and_never_stored",),
            TRACKING: ("test_non_finite_values_and_odd_names_reach_mlflow_as_numbers",),
        },
    ),
    14: (
        "parallel first use destroys the sqlite file",
        {TRACKING: ("test_six_processes_on_a_fresh_store_all_succeed",)},
    ),
    15: (
        "two processes create the experiment; runs fall into Default",
        {TRACKING: ("test_six_processes_on_a_fresh_store_all_succeed",)},
    ),
    16: (
        "store and artifacts depend on the current folder",
        {TRACKING: ("test_the_store_does_not_depend_on_the_current_folder",)},
    ),
    17: ("file store refused", {TRACKING: ("test_a_folder_as_store_is_refused_with_the_remedy",)}),
    18: ("deleted experiment", {TRACKING: ("test_a_deleted_experiment_is_restored",)}),
    19: (
        "traces of threads attach to another run or are dropped",
        {
            TRACKING: ("test_traces_belong_to_the_run_and_keep_a_span_per_call",),
            REPORTS: ("test_four_rollouts_at_once_keep_their_own_traces_and_spans",),
        },
    ),
    20: (
        "pages with many points are slow",
        {METRICS: ("test_ten_thousand_steps_store_at_most_a_thousand_points_and_the_last",)},
    ),
    21: ("checkpoints are uploaded", {TRAINED: ("test_training_uploads_no_weights",)}),
    22: (
        "registry: no champion yet, ties, NaN",
        {
            PROMOTE: (
                "test_the_first_model_becomes_champion_and_can_be_fetched",
                "test_only_a_model_that_is_better_beyond_chance_takes_the_title",
                "test_an_accuracy_that_is_no_number_never_wins",
                "test_an_empty_registry_says_how_to_fill_it",
            )
        },
    ),
    # ---- DVC
    23: (
        "1e-5 is a string",
        {
            PARAMS: (
                "test_every_spelling_of_a_small_rate_is_a_float",
                "test_dvc_writes_numbers_that_the_loader_reads_back",
            ),
            LAYOUT: ("test_yaml_1_1_and_1_2_read_the_same_numbers_or_our_loader_decides",),
            DEPLOYMENTS: ("test_old_and_new_yaml_readers_agree",),
        },
    ),
    24: (
        "lock errors in parallel",
        {
            PIPELINE: ("test_a_second_pipeline_in_the_same_folder_is_one_line_and_not_a_lock_error",),
            REPRODUCE: ("test_the_second_repro_waits_for_the_first",),
            DOCTOR: (
                "test_an_entry_of_a_dead_process_is_found_and_released_and_a_live_one_stays",
                "test_dvc_works_again_after_a_damaged_lock_file_was_mended",
            ),
        },
    ),
    25: (
        "code edited during a stage is recorded as used",
        {TRACKING: ("test_an_edit_during_a_dvc_stage_is_not_recorded_as_what_was_run",)},
    ),
    26: (
        "outs are removed before a run, resume is lost",
        {
            REPORTS: ("test_a_checkpoint_lies_outside_what_dvc_deletes_and_serves_one_job_only",),
            SFT: ("test_a_killed_run_resumes_to_the_same_weights",),
            GRPO: ("test_a_killed_run_resumes_to_the_same_weights",),
        },
    ),
    27: (
        "nondeterministic outs",
        {
            COLD_START: ("test_two_builds_with_different_workers_have_the_same_bytes",),
            GATE: ("test_two_runs_write_the_same_bytes_without_times_or_paths_and_docs_of_every_suite",),
            GRPO: ("test_a_killed_run_resumes_to_the_same_weights",),
            PROMOTE: ("test_the_output_holds_nothing_that_differs_between_machines",),
            "tasks/test_evaluation_report.py": ("test_figures_have_the_same_bytes_twice",),
        },
    ),
    28: (
        "temporary experiments miss files",
        {REPRODUCE: ("test_a_temporary_experiment_works_in_a_clean_clone",)},
    ),
    29: ("many small files", {TRAINED: ("test_the_data_are_few_files",)}),
    30: (
        "conflicts in dvc.lock",
        {
            LAYOUT: ("test_dvc_lock_is_not_ignored_and_results_are",),
            REPRODUCE: ("test_a_merge_of_two_branches_never_mixes_their_lock_files",),
            DOCTOR: ("test_a_merge_conflict_and_an_ignored_lock_are_found",),
        },
    ),
    31: (
        "__pycache__ in a dependency reruns a stage",
        {
            TRAINED: ("test_caches_of_another_python_and_of_tools_rerun_nothing",),
            REPRODUCE: ("test_what_cannot_change_a_result_makes_nothing_stale",),
        },
    ),
    32: (
        "SIGTERM to dvc leaves the trainer alive",
        {
            PIPELINE: ("test_ending_the_flow_ends_its_stage",),
            GRAPH: (
                "test_an_interrupt_leaves_no_process_behind",
                "test_sigkill_of_the_caller_leaves_no_process_behind",
            ),
            "tasks/test_launch.py": ("test_no_rank_outlives_its_killed_launcher",),
        },
    ),
    33: (
        "touching the wrapper reruns everything",
        {
            LAYOUT: ("test_touching_flows_or_tests_reruns_nothing",),
            TRAINED: ("test_caches_of_another_python_and_of_tools_rerun_nothing",),
        },
    ),
    # ---- Prefect
    34: (
        "failed task, green flow",
        {
            PIPELINE: ("test_a_failed_stage_makes_a_failed_flow_with_the_stages_own_words",),
            SERVICES: ("test_a_failed_task_makes_a_failed_flow_with_its_own_words",),
            FLOWS: ("test_no_result_of_a_task_is_submitted_and_forgotten",),
        },
    ),
    35: (
        "a worker elsewhere does not find the code",
        {SERVICES: ("test_a_worker_started_outside_the_project_runs_the_pipeline",)},
    ),
    36: (
        "overlapping runs",
        {
            DEPLOYMENTS: ("test_no_run_starts_beside_another_of_its_kind",),
            SERVICES: (
                "test_of_two_schedules_that_fire_at_once_one_runs_and_cancelling_it_leaves_all_clean",
            ),
        },
    ),
    37: (
        "a backlog after downtime",
        {
            SERVICES: ("test_automations_are_there_and_a_failure_starts_the_reaper",),
            FLOWS: ("test_every_automation_watches_our_runs_only",),
        },
    ),
    38: (
        "clock changes skip or double runs",
        {DEPLOYMENTS: ("test_a_clock_change_neither_skips_nor_doubles_a_run",)},
    ),
    39: ("cache keys of partial inputs", {FLOWS: ("test_no_task_caches_and_no_result_is_stored",)}),
    40: (
        "results fill memory",
        {
            FLOWS: (
                "test_no_task_caches_and_no_result_is_stored",
                "test_every_flow_and_task_says_what_it_returns_in_small_types",
            )
        },
    ),
    41: (
        "database is locked",
        {"flows/test_postgres.py": ("test_one_setting_puts_both_stores_into_postgresql",)},
    ),
    42: (
        "a cancelled flow leaves GPU processes",
        {
            SERVICES: (
                "test_of_two_schedules_that_fire_at_once_one_runs_and_cancelling_it_leaves_all_clean",
            ),
            "tasks/test_launch.py": ("test_no_rank_outlives_its_killed_launcher",),
        },
    ),
    43: (
        "a crash stays Running",
        {
            SERVICES: ("test_automations_are_there_and_a_failure_starts_the_reaper",),
            FLOWS: ("test_every_automation_watches_our_runs_only",),
        },
    ),
    44: ("a logger that needs a run", {TRAINED: ("test_no_step_needs_prefect",)}),
    45: (
        "a manual retry runs everything again",
        {PIPELINE: ("test_stages_run_once_in_order_and_are_cached_after",)},
    ),
    46: (
        "artifact keys",
        {
            FLOWS: (
                "test_keys_of_artifacts_are_what_prefect_allows",
                "test_an_artifact_that_prefect_refuses_is_a_warning_and_never_a_failure",
            )
        },
    ),
    # ---- Great Expectations
    47: (
        "empty, null and NaN data pass",
        {
            GATE: (
                "test_an_empty_table_fails",
                "test_all_null_columns_fail_each_by_name",
                "test_a_reward_that_is_no_experts_reward_fails",
            )
        },
    ),
    48: (
        "a context that is used twice loses its definitions",
        {
            GATE: (
                "test_two_runs_write_the_same_bytes_without_times_or_paths_and_docs_of_every_suite",
                "test_the_command_fails_with_a_line_per_finding_and_two_processes_agree",
            )
        },
    ),
    49: (
        "integrations break on major versions",
        {REPORTS: ("test_great_expectations_is_used_without_its_integrations_and_within_one_major_version",)},
    ),
    # ---- Optuna
    50: (
        "several workers on a new study",
        {STUDY: ("test_four_workers_on_a_new_study_share_its_trials",)},
    ),
    51: (
        "NaN and infinity as the best value",
        {
            STUDY: (
                "test_results_that_are_not_finite_fail_and_are_never_the_best",
                "test_a_study_of_failures_only_says_so",
            ),
            "tasks/test_sweep_trial.py": ("test_a_metric_that_is_not_finite_fails_the_trial",),
        },
    ),
    52: ("a changed space on resume", {STUDY: ("test_another_search_never_continues_this_one",)}),
    53: ("another direction is ignored", {STUDY: ("test_a_study_of_another_direction_is_an_error",)}),
    54: (
        "killed trials stay RUNNING, living ones are killed",
        {
            STUDY: (
                "test_a_killed_trial_goes_on_and_is_no_extra_trial",
                "test_a_trial_that_always_dies_fails_at_last",
                "test_a_trial_of_a_living_worker_is_left_to_it",
            ),
            "tasks/test_sweep_trial.py": ("test_a_killed_trial_ends_like_an_undisturbed_one",),
        },
    ),
    55: (
        "a seeded sweep is not the same twice",
        {STUDY: ("test_a_seeded_sweep_is_the_same_twice_and_when_it_was_stopped",)},
    ),
    # ---- training
    57: (
        "a missing state silently restarts",
        {SFT: ("test_a_lost_state_is_an_error_not_a_silent_restart",)},
    ),
    58: (
        "a state of another world size",
        {REPORTS: ("test_a_checkpoint_lies_outside_what_dvc_deletes_and_serves_one_job_only",)},
    ),
    59: (
        "saving on rank 0 alone hangs",
        {
            RANKS: ("test_two_ranks_train_like_one",),
            TRAINED: ("test_two_ranks_end_and_leave_no_state_behind",),
        },
    ),
    60: (
        "colocated vLLM runs out of memory",
        {
            DOCTOR: (
                "test_a_policy_that_cannot_fit_beside_vllm_is_refused_before_it_starts",
                "test_the_table_of_nvidia_smi_is_read_and_parts_of_a_gpu_are_not_counted",
            )
        },
    ),
    61: (
        "stale prefix and picture caches",
        {
            VLLM: ("test_a_sync_loads_weights_and_then_resets_both_caches",),
            ENGINE: ("test_stale_picture_features_are_dropped_on_sync",),
        },
    ),
    62: (
        "log-probs of sampler and trainer differ",
        {
            "models/test_objective.py": ("test_ratio_is_one_for_identical_policies",),
            ENGINE: ("test_sampler_and_trainer_agree_at_any_temperature",),
        },
    ),
    63: (
        "truncation cuts inside a picture",
        {
            SFT: ("test_every_planned_batch_fits_its_window_and_its_tokens",),
            TOKENS: (
                "test_a_picture_that_does_not_fit_is_left_out_with_its_text",
                "test_vllm_gets_the_very_ids_with_one_placeholder_per_picture_and_all_pictures",
            ),
            "models/test_encoding.py": ("test_placeholders_without_their_picture_are_refused",),
        },
    ),
    64: ("no spread, loss 0", {GRPO: ("test_no_spread_means_no_update",)}),
    65: (
        "nobody can see the rollouts",
        {
            REPORT_PAGE: (
                "test_every_turn_call_observation_and_component_is_in_the_page",
                "test_200_episodes_of_the_largest_maps_stay_below_10_mb",
            )
        },
    ),
    66: (
        "telemetry hangs without a network",
        {
            TRAINED: ("test_nothing_is_asked_of_the_network", "test_the_noting_of_connections_works"),
            COMMANDS: ("test_every_variable_that_keeps_the_stack_local_is_listed_for_the_user",),
        },
    ),
}

# number -> why it cannot occur here
IMPOSSIBLE: dict[int, str] = {
    56: "no setting holds a batch size: DeepSpeed is told 1 and 1, and a step's end is set by hand "
    "(models/training_engine.py), so its assertion over three numbers is always met",
}


@cache
def names_in(file: str) -> frozenset[str]:
    """The tests that pytest collects from a file of plain functions."""
    path = PROJECT_ROOT / "tests" / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def test_every_report_has_a_guard_or_a_reason() -> None:
    assert not set(GUARDED) & set(IMPOSSIBLE)
    assert set(GUARDED) | set(IMPOSSIBLE) == set(range(1, 67))


@pytest.mark.parametrize("number", GUARDED)
def test_the_guards_of_a_report_exist(number: int) -> None:
    about, guards = GUARDED[number]
    assert about
    assert guards
    for file, names in guards.items():
        assert (PROJECT_ROOT / "tests" / file).is_file(), file
        assert not set(names) - names_in(file), f"{number} ({about}): {file}"


def test_pytest_collects_the_guards(request: pytest.FixtureRequest) -> None:
    """In a run of the whole suite: what is named above is really among the collected tests."""
    tests = Path(__file__).parent
    collected: dict[str, set[str]] = {}
    for item in request.session.items:
        name = getattr(item, "originalname", item.name)
        collected.setdefault(item.path.relative_to(tests).as_posix(), set()).add(name)
    for _, guards in GUARDED.values():
        for file, names in guards.items():
            if file in collected and len(collected[file]) >= len(names_in(file)):
                assert set(names) <= collected[file], file
