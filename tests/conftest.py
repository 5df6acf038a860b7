"""The two tiers of the tests: ``scripts/run_tests.sh`` runs one, ``--all`` both.

A test is in the first tier unless it takes long for what it adds; of a long table and of a slow test, some rows are.
"""

import os
import time
from collections import Counter

import pytest

EVERY = {
    "test_bf16_layouts::test_a_layout_is_as_near_to_fp32_as_one_process_in_bf16": 5,
    "test_bf16_layouts::test_adapters_begin_as_their_base_and_only_they_are_reduced": 4,
    "test_figures::test_the_probe_writes_rows_of_its_groups_and_changes_no_loss": 0,
    "test_changed_meshes::test_a_run_continues_on_another_mesh": 13,
    "test_curriculum::test_the_debug_curriculum_trains_from_end_to_end": 0,
    "test_damaged_text::test_damaged_text_ends_all_ranks_before_the_step_that_would_use_it": 0,
    "test_finetuning::test_chats_train_the_same_on_any_layout_and_adapters_resume_over_their_base": 0,
    "test_float8_layouts::test_a_layout_in_fp8_equals_one_process": 12,
    "test_hangs::test_a_hung_rank_is_found_named_and_ended": 0,
    "test_hf_ranks::test_every_mesh_reads_and_writes_the_same_folder": 0,
    "test_launch::test_a_signal_saves_on_all_hosts_and_the_same_command_goes_on": 0,
    "test_launch::test_a_killed_rank_starts_all_hosts_again": 0,
    "test_index_learning::test_a_sparse_model_ends_as_good_as_a_dense_one": 0,
    "test_index_stages::test_a_run_that_stops_in_any_stage_changes_no_bit": 5,
    "test_interrupts::test_a_signal_ends_all_that_was_started": 9,
    "test_interrupts::test_a_signal_that_comes_before_python_listens_is_not_lost": 3,
    "test_launch::test_a_failing_rank_ends_the_run_with_its_traceback": 0,
    "test_launch::test_a_killed_rank_is_named_and_the_saved_run_goes_on": 0,
    "test_launch::test_a_node_ends_when_the_first_node_answers_no_more": 0,
    "test_launch::test_a_signal_saves_and_the_same_command_goes_on": 3,
    "test_launch::test_two_ranks_report_what_one_process_reports": 4,
    "test_launch::test_a_signal_to_the_launchers_of_two_nodes_has_one_code_on_both": 2,
    "test_muon_ranks::test_a_mesh_equals_one_process": 64,
    "test_planned_steps::test_planned_memory_is_what_a_rank_holds": 15,
    "test_planned_steps::test_planned_traffic_is_what_a_step_sends": 15,
    "test_policy_gradients::test_a_layout_equals_one_process": 4,
    "test_preference_layouts::test_a_layout_equals_one_process": 12,
    "test_pretend_gpu::test_a_layout_with_its_tensors_on_a_device_equals_one_process": 0,
    "test_figures::test_the_first_rank_records_its_part_of_the_step": 0,
    "test_reinforcement::test_ranks_agree_and_kills_lose_nothing": 0,
    "test_rollouts::test_every_layout_draws_what_one_rank_draws_with_the_trainers_logprobs": 0,
    "test_sharded_layouts::test_a_layout_equals_one_process": 16,
    "test_stale_rollouts::test_a_kill_in_a_rollout_loses_no_finished_group_and_changes_nothing": 0,
    "test_stops::test_a_signal_at_any_moment_loses_nothing_and_a_second_one_ends_at_once": 0,
    "test_store_kills::test_kill_9_at_a_request_loses_no_reported_step": 25,
    "test_verbs::test_every_command_of_the_tutorial_prints_what_the_page_shows": 0,
    "test_ablate::test_the_recipes_are_really_trained": 0,
    "test_convert::test_the_export_has_the_tokenizer_of_the_run": 3,
    "test_episodes::test_a_kill_in_a_conversation_trains_each_sample_once_and_ranks_agree": 0,
    "test_episodes::test_a_group_that_hangs_is_dropped_and_training_goes_on": 0,
    "test_convert::test_a_verb_says_what_a_folder_of_another_kind_is": 3,
    "test_convert::test_a_changed_or_too_large_tokenizer_is_refused": 0,
    "test_convert::test_transformers_loads_a_converted_folder": 0,
    "test_gpu_report::test_a_dry_run_runs_every_part": 0,
    "test_attention::test_packed_micro_batches_meet_few_plans": 3,
    "test_attention::test_runs_equal_the_mask_of_all_pairs": 4,
    "test_sparse_attention::test_logits_loss_and_every_gradient_equal_transformers": 3,
    "test_sparse_attention::test_known_faults_of_other_implementations_are_seen": 4,
    "test_compiled_code::test_program_starts_with_a_planted_empty_library": 0,
    "test_benchmark::test_both_trainers_have_the_same_losses": 0,
    "test_search::test_a_search_of_94_layers_on_256_gpus_takes_less_than_minutes": 0,
    "test_search::test_without_a_fit_the_smallest_cluster_is_named": 0,
    "test_search::test_the_command_prints_whole_numbers": 0,
    "test_compile::test_a_part_of_the_step_compiles_for_an_h100": 0,
    "test_measures::test_a_model_that_is_trained_for_it_finds_the_needle_and_greedy_decoding_writes_it": 0,
    "test_scoring::test_a_long_generation_meets_few_shapes_and_no_groups_of_heads_with_a_mask": 7,
    "test_monitoring_stack::test_a_program_that_reads_its_data_for_long_is_not_ended": 0,
    "test_golden_losses::test_a_run_with_eight_bit_states_and_many_workers_and_a_benchmark_write_no_errors": 0,
    "test_float8_run::test_an_offloaded_run_resumes_without_and_back": 0,
    "test_job_files::test_a_job_of_pbs_saves_before_its_walltime_and_is_not_submitted_again_after_qdel": 0,
    "test_memory::test_a_file_of_states_has_the_planned_size_and_a_step_moves_it_once_each_way": 2,
    "test_stage_table::test_the_bubble_is_that_of_torchs_order": 3,
    "test_chat_formats::test_random_conversations_read_as_the_original_template_writes_them": 3,
    "test_chat_formats::test_arguments_as_json_text_are_those_of_the_object": 0,
    "test_documents::test_memory_stays_within_the_setting_for_ten_times_the_documents": 0,
    "test_prepare::test_killed_at_random_moments_it_ends_with_the_same_bytes": 0,
    "test_prepare::test_text_that_changed_since_the_interruption_is_read_again": 0,
    "test_prepare::test_the_embedded_sources_hold_twenty_megabytes": 0,
    "test_prepare::test_two_runs_at_once_make_one_source": 0,
    "test_adapter_runs::test_the_folder_of_a_run_is_a_peft_folder_that_the_next_run_goes_on_from": 0,
    "test_adapter_runs::test_adapters_on_a_base_that_is_held_otherwise_are_told_once": 0,
    "test_adapter_runs::test_an_adapter_is_evaluated_on_its_base_and_refused_on_another": 0,
    "test_preferences::test_each_loss_learns_to_prefer_and_resumes_bit_for_bit": 3,
    "test_preferences::test_preferences_on_a_base_in_4_bits_train_as_on_the_converted_one_and_merge_into_it": 0,
    "test_preferences::test_a_policy_and_its_reference_in_float8_begin_equal": 0,
    "test_preferences::test_a_policy_and_its_reference_in_host_memory_train_as_on_the_device": 0,
    "test_task::test_answers_end_if_and_only_if_the_marker_behind_them_is_a_target": 0,
    "test_task::test_answers_are_computed_in_batches_no_larger_than_a_micro_batch": 0,
    "test_data_stream::test_a_new_stage_with_a_higher_loss_is_no_spike": 0,
    "test_code::test_a_label_that_a_program_without_an_answer_passes_is_refused": 4,
    "test_code::test_a_program_that_does_not_answer_right_has_not_passed": 7,
    "test_code::test_a_right_program_passes": 5,
    "test_rewards::test_a_program_that_loops_in_each_test_has_a_score": 0,
    "test_rewards::test_programs_that_a_reward_has_started_end_with_it_at_its_deadline": 0,
    "test_servers::test_server_that_comes_back_with_a_fault_does_not_end_the_run": 3,
    "test_learning::test_a_step_is_mostly_generation_and_passes": 0,
    "test_network_function::test_a_phase_goes_on_with_the_function_of_the_one_before": 0,
    "test_network_function::test_a_capacity_is_said_where_it_ends": 0,
    "test_network_function::test_a_resume_computes_at_the_temperature_of_the_last_step_and_scales_nothing": 0,
    "test_network_function::test_all_consumers_compute_what_a_key_of_adapters_says": 0,
    "test_prompts::test_a_label_that_no_answer_reaches_is_refused": 4,
    "test_verbs::test_answers_to_lm_eval_do_not_depend_on_the_ranks": 0,
    "test_evaluate::test_a_hugging_face_folder_gives_the_same_numbers_from_stated_text": 0,
    "test_evaluate::test_mistakes_are_named_with_exit_code_2": 4,
    "test_evaluate::test_results_in_the_folder_of_the_model_are_extended": 0,
    "test_evaluate::test_tables_of_long_text": 0,
    "test_plot::test_a_curriculum_is_drawn_from_its_files": 0,
    "test_plot::test_points_of_validation_are_drawn_over_steps_too": 0,
    "test_standard_tasks::test_a_second_call_computes_only_what_is_missing": 0,
    "test_standard_tasks::test_a_task_file_that_cannot_be_used_is_one_line_before_work": 6,
    "test_profiler::test_a_folder_that_cannot_be_made_does_not_stop_training": 0,
    "test_profiler::test_a_run_without_profiling_is_traced_on_request_and_computes_the_same": 0,
    "test_trainer::test_a_phase_takes_what_its_patterns_say_and_no_more": 0,
    "test_trainer::test_a_rollback_may_read_its_checkpoint_for_longer_than_a_hang": 0,
    "test_trainer::test_a_run_starts_from_weights_that_another_program_saved_with_dcp": 0,
    "test_trainer::test_outputs_events_and_checkpoints_may_lie_apart": 0,
    "test_consolidation::test_step_folders_on_both_sides_name_the_step": 0,
    "test_published_runs::test_the_command_plans_the_exchange_of_published_stacks": 0,
    "test_published_runs::test_the_script_reads_any_folder_of_runs": 0,
    "test_environment::test_nodes_of_a_job_that_start_at_once_install_into_their_checkout_once": 0,
    "test_tokenizer::test_endless_runs_encode_as_hugging_face_does": 3,
    "test_hub::test_a_run_keeps_the_ids_that_were_stated_and_resumes_with_another_cache": 0,
    "test_prepare_text::test_neither_the_memory_for_duplicates_nor_interruptions_change_a_byte": 0,
    "test_prepare_text::test_small_pieces_change_nothing": 0,
    "test_data_stream::test_four_sources_of_real_text_are_made_mixed_and_judged_one_by_one": 0,
    "test_stage_attention::test_a_checkpoint_has_the_window_and_scaling_of_its_step": 0,
    "test_reward_model::test_a_language_model_is_no_reward_model": 0,
    "test_server_check::test_policy_learns_from_samples_of_its_fp8_weights": 0,
    "test_training_kills::test_a_run_that_is_ended_again_and_again_computes_what_an_undisturbed_one_does": 2,
    "test_training_kills::test_kill_9_of_one_rank_or_all_loses_no_published_step_and_hangs_nobody": 3,
}
"""By name of a file and test: of its rows, the first and each n-th after it run in the first tier; 0: none.

What is not here is in the first tier, with all its rows, or with its first one if it is marked slow.
"""
FIRST = 1_000_000
"""More than a test has rows."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag of `tests/golden.py`."""
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew instead of comparing")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the rows of the second tier, and all rows of a test but its first one."""
    rows = Counter[str]()
    for item in items:
        number = rows[item.nodeid.partition("[")[0]]
        rows[item.nodeid.partition("[")[0]] += 1
        if number:
            item.add_marker("further")
        test = f"{item.path.stem}::{item.name.partition('[')[0]}"
        step = EVERY.get(test, FIRST if item.get_closest_marker("slow") else 1)
        if not step or number % step:
            item.add_marker("thorough")


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test of the second tier if the time that CI has for them is over."""
    end = os.environ.get("THOROUGH_UNTIL")
    if end and time.time() > float(end) and item.get_closest_marker("thorough"):
        pytest.skip("thorough, and the time that THOROUGH_UNTIL gives is over")
