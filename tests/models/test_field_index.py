"""54 public bug reports about reinforcement learning with tools, and the test that keeps each of them out of here.

A report that cannot occur here has the reason instead. The tests' docstrings name the reports.
"""

from __future__ import annotations

import importlib

import pytest

AGENT_FORMAT = "tests/models/test_agent_format.py::"
ENCODING = "tests/models/test_encoding.py::"
ENGINE = "tests/models/test_engine.py::"
VLLM = "tests/models/test_vllm_engine.py::"
ROLLOUTS = "tests/models/test_field_rollouts.py::"
TOKENS = "tests/models/test_field_tokens.py::"
TOOLS = "tests/tools/test_field_tools.py::"
EXECUTOR = "tests/tools/test_executor.py::"
GRADE = "tests/environments/test_grade.py::"
REWARDS = "tests/models/test_rewards.py::"
ADVANTAGES = "tests/models/test_advantages.py::"
OBJECTIVE = "tests/models/test_objective.py::"
GRPO = "tests/models/test_grpo.py::"
OPTIONS = "tests/models/test_grpo_options.py::"
GUARDS = "tests/models/test_guards.py::"
REPLAY = "tests/models/test_replay.py::"
SFT = "tests/models/test_sft.py::"
RANKS = "tests/models/test_ranks.py::"
TRACKING = "tests/tasks/test_tracking.py::"

GUARDED: dict[int, tuple[str, ...]] = {
    # tool calls and environments
    1: (ROLLOUTS + "test_each_continuation_belongs_to_its_own_prefix",),
    2: (ENGINE + "test_every_episode_ends_with_its_reason",),
    3: (
        ENGINE + "test_a_malformed_call_is_answered_with_an_error_the_agent_can_read",
        ROLLOUTS + "test_text_around_or_instead_of_the_arguments_is_no_call",
        ROLLOUTS + "test_a_call_that_cannot_be_written_down_is_an_error_not_a_crash_of_the_report",
    ),
    4: (
        AGENT_FORMAT + "test_a_truncated_call_never_runs",
        ROLLOUTS + "test_truncated_call_is_never_executed",
    ),
    5: (
        ROLLOUTS + "test_malformed_arguments_never_run_a_tool_that_needs_none",
        TOOLS + "test_no_argument_is_guessed_for_a_tool_that_needs_none",
    ),
    6: (
        VLLM + "test_a_turn_cut_by_the_limit_never_runs_its_call",
        ROLLOUTS + "test_truncated_call_is_never_executed",
    ),
    7: (AGENT_FORMAT + "test_valid_json_that_is_no_call_is_a_defect",),
    8: (ROLLOUTS + "test_malformed_arguments_never_run_a_tool_that_needs_none",),
    9: (
        ENGINE + "test_a_malformed_call_is_answered_with_an_error_the_agent_can_read",
        ROLLOUTS + "test_a_prompt_that_fills_the_context_ends_alone_and_trains_no_token",
    ),
    10: (
        EXECUTOR + "test_a_hanging_call_ends_at_its_deadline_and_blocks_no_later_call",
        ROLLOUTS + "test_a_hanging_call_ends_at_its_deadline",
        TOOLS + "test_sixty_four_calls_at_once_hang_no_longer_than_one",
    ),
    11: (
        ENGINE + "test_an_episode_past_its_deadline_ends",
        ROLLOUTS + "test_a_hanging_call_ends_at_its_deadline",
    ),
    12: (ROLLOUTS + "test_time_spent_in_tools_counts_towards_the_one_deadline_of_the_episode",),
    13: (ROLLOUTS + "test_a_straggler_does_not_hold_its_group",),
    14: (TOOLS + "test_the_late_result_of_a_call_given_up_reaches_no_one",),
    15: (TOOLS + "test_the_watchdog_names_the_tool_that_hangs",),
    16: (
        GRADE + "test_farming_and_wrong_paths_get_nothing",
        REWARDS + "test_an_answer_that_is_wrong_earns_no_bonus_whatever_it_holds",
    ),
    17: (
        AGENT_FORMAT + "test_several_answers_or_calls_in_one_turn_earn_nothing",
        ROLLOUTS + "test_misbehaviour_ends_with_a_reason_and_earns_no_format_reward",
        GRADE + "test_hedged_answers_get_nothing",
    ),
    18: (REWARDS + "test_more_calls_do_not_earn_more",),
    19: (REWARDS + "test_every_component_reaches_both_of_its_bounds",),
    20: (
        REWARDS + "test_components_never_leave_their_bounds",
        ROLLOUTS + "test_no_cap_flattens_the_rewards_of_a_group",
    ),
    21: (
        ROLLOUTS + "test_the_document_terminator_ends_a_turn_too",
        TOKENS + "test_no_weights_can_make_a_policy_write_an_image_or_a_role",
    ),
    # tokens, masks, images
    22: (TOKENS + "test_incremental_ids_equal_a_whole_conversation_render",),
    23: (TOKENS + "test_incremental_ids_equal_a_whole_conversation_render",),
    24: (TOKENS + "test_ids_that_no_tokenizer_would_make_of_their_text_are_kept_and_trained_on",),
    25: (
        TOKENS + "test_contracts_hold_after_every_transition_whatever_the_policy_writes",
        TOKENS + "test_ids_that_no_tokenizer_would_make_of_their_text_are_kept_and_trained_on",
        ROLLOUTS + "test_trajectories_are_the_same_with_and_without_the_tool_cache_and_beside_the_sampling",
    ),
    26: (TOKENS + "test_vllm_gets_the_very_ids_with_one_placeholder_per_picture_and_all_pictures",),
    27: (
        GUARDS + "test_a_forced_call_is_seen_by_the_agent_and_trained_by_nobody",
        TOKENS + "test_incremental_ids_equal_a_whole_conversation_render",
    ),
    28: (TOKENS + "test_a_picture_that_does_not_fit_is_left_out_with_its_text",),
    29: (
        TOKENS + "test_a_picture_that_does_not_fit_is_left_out_with_its_text",
        ENCODING + "test_placeholders_without_their_picture_are_refused",
        SFT + "test_every_planned_batch_fits_its_window_and_its_tokens",
    ),
    30: (TOKENS + "test_pictures_stay_with_their_episode_when_only_some_go_on",),
    31: (
        ENCODING + "test_positions_equal_the_library_rope_index",
        TOKENS + "test_positions_have_three_rows_of_the_length_of_the_ids",
    ),
    32: (TOKENS + "test_positions_have_three_rows_of_the_length_of_the_ids",),
    33: (
        TOKENS + "test_no_weights_can_make_a_policy_write_an_image_or_a_role",
        TOKENS + "test_markers_that_a_policy_spells_change_no_mask_and_no_image",
        TOKENS + "test_an_error_that_repeats_a_marker_brings_no_special_token_back",
    ),
    34: (
        VLLM + "test_episodes_keep_the_sampled_ids_and_send_every_picture_each_turn",
        TOKENS + "test_vllm_gets_the_very_ids_with_one_placeholder_per_picture_and_all_pictures",
    ),
    # advantages, loss, KL
    35: (
        ADVANTAGES + "test_a_group_of_one_has_advantage_zero",
        ADVANTAGES + "test_broken_rewards_are_refused",
    ),
    36: (ADVANTAGES + "test_nearly_equal_rewards_do_not_explode",),
    37: (
        ADVANTAGES + "test_global_and_dynamic_keep_groups_without_spread_out",
        GRPO + "test_no_spread_means_no_update",
    ),
    38: (ADVANTAGES + "test_order_and_neighbours_do_not_matter",),
    39: (ADVANTAGES + "test_a_group_of_one_has_advantage_zero",),
    40: (ADVANTAGES + "test_broken_rewards_are_refused",),
    41: (
        ROLLOUTS + "test_a_straggler_does_not_hold_its_group",
        GRPO + "test_a_step_moves_the_policy_and_reports_finite_metrics",
    ),
    42: (ADVANTAGES + "test_order_and_neighbours_do_not_matter",),
    43: (
        GRPO + "test_padding_and_micro_batches_change_no_update",
        OBJECTIVE + "test_a_dead_sample_adds_nothing",
        SFT + "test_the_gradient_does_not_depend_on_the_split",
        RANKS + "test_two_ranks_train_like_one",
    ),
    44: (OBJECTIVE + "test_kl_gradient_is_that_of_the_exact_reverse_kl",),
    45: (
        ENGINE + "test_sampler_and_trainer_agree_at_any_temperature",
        OPTIONS + "test_ratio_is_exactly_one_at_any_temperature",
    ),
    46: (OBJECTIVE + "test_stale_tokens_outside_the_trust_region_do_not_push",),
    # replay, resume, tracking, engines
    47: (
        GRPO + "test_an_empty_buffer_gives_nothing_and_equal_priorities_do_not_crash",
        REPLAY + "test_a_checkpoint_holds_what_was_on_disk",
        OPTIONS + "test_replayed_rollouts_of_age_zero_train_like_fresh_ones",
    ),
    48: (GRPO + "test_an_empty_buffer_gives_nothing_and_equal_priorities_do_not_crash",),
    49: (
        GRPO + "test_a_killed_run_resumes_to_the_same_weights",
        OPTIONS + "test_a_run_with_every_option_resumes_to_the_same_weights",
    ),
    50: (
        OPTIONS + "test_a_run_with_every_option_resumes_to_the_same_weights",
        SFT + "test_a_killed_run_resumes_to_the_same_weights",
    ),
    51: (
        VLLM + "test_a_sync_loads_weights_and_then_resets_both_caches",
        ENGINE + "test_stale_picture_features_are_dropped_on_sync",
    ),
    54: (
        TRACKING + "test_a_changed_parameter_on_resume_becomes_a_tag",
        TRACKING + "test_a_failed_run_does_not_block_or_capture_the_next",
        TRACKING + "test_non_finite_values_and_odd_names_reach_mlflow_as_numbers",
        "tests/tasks/test_reports_tracking.py::test_a_parameter_name_that_mlflow_refuses_does_not_stop_a_run",
    ),
}

IMPOSSIBLE: dict[int, str] = {
    52: "GRPO samples and trains in one process: no rank waits for another one in a generate loop",
    53: "vLLM is started without tensor parallelism, and adapters are merged before it gets the weights",
}


def test_each_of_the_54_reports_has_a_guard_or_a_reason() -> None:
    assert sorted([*GUARDED, *IMPOSSIBLE]) == list(range(1, 55))
    assert all(GUARDED.values())
    assert all(IMPOSSIBLE.values())


@pytest.mark.parametrize("node", sorted({node for nodes in GUARDED.values() for node in nodes}))
def test_every_guard_exists(node: str) -> None:
    file, _, name = node.partition("::")
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    assert callable(vars(module)[name])
