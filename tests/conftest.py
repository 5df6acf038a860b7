"""The two tiers of the tests: ``scripts/run_tests.sh`` runs one, ``--all`` both.

A test is in the first tier unless it takes long for what it adds; of a long table, some rows are.
"""

import os
import time

import pytest

EVERY = {
    "test_bf16_layouts::test_a_layout_is_as_near_to_fp32_as_one_process_in_bf16": 5,
    "test_bf16_layouts::test_adapters_begin_as_their_base_and_only_they_are_reduced": 4,
    "test_figures::test_the_probe_writes_rows_of_its_groups_and_changes_no_loss": 0,
    "test_changed_meshes::test_a_run_continues_on_another_mesh": 13,
    "test_curriculum::test_the_debug_curriculum_trains_from_end_to_end": 0,
    "test_damaged_text::test_damaged_text_ends_all_ranks_before_the_step_that_would_use_it": 0,
    "test_edge_cases::test_a_case_equals_one_process": 9,
    "test_finetuning::test_chats_train_the_same_on_any_layout_and_adapters_resume_over_their_base": 0,
    "test_float8_layouts::test_a_layout_in_fp8_equals_one_process": 6,
    "test_hangs::test_a_hung_rank_is_found_named_and_ended": 0,
    "test_hf_ranks::test_every_mesh_reads_and_writes_the_same_folder": 0,
    "test_launch::test_a_signal_saves_on_all_hosts_and_the_same_command_goes_on": 0,
    "test_launch::test_a_killed_command_leaves_no_process_on_any_host": 0,
    "test_launch::test_faults_are_found_before_a_host_trains": 0,
    "test_launch::test_a_killed_rank_starts_all_hosts_again": 0,
    "test_interrupts::test_a_signal_ends_all_that_was_started": 4,
    "test_launch::test_a_failing_rank_ends_the_run_with_its_traceback": 0,
    "test_launch::test_a_killed_rank_is_named_and_the_saved_run_goes_on": 0,
    "test_launch::test_a_node_ends_when_the_first_node_answers_no_more": 0,
    "test_launch::test_a_signal_saves_and_the_same_command_goes_on": 3,
    "test_launch::test_two_ranks_report_what_one_process_reports": 6,
    "test_muon_ranks::test_a_mesh_equals_one_process": 64,
    "test_planned_steps::test_8192_ranks_are_planned_to_the_byte": 3,
    "test_planned_steps::test_planned_memory_is_what_a_rank_holds": 3,
    "test_planned_steps::test_planned_traffic_is_what_a_step_sends": 15,
    "test_policy_gradients::test_a_layout_equals_one_process": 4,
    "test_preference_layouts::test_a_layout_equals_one_process": 7,
    "test_pretend_gpu::test_a_layout_with_its_tensors_on_a_device_equals_one_process": 0,
    "test_figures::test_the_first_rank_records_its_part_of_the_step": 0,
    "test_reinforcement::test_ranks_agree_and_kills_lose_nothing": 0,
    "test_rollouts::test_every_layout_draws_what_one_rank_draws_with_the_trainers_logprobs": 0,
    "test_sharded_layouts::test_a_layout_equals_one_process": 14,
    "test_stale_rollouts::test_a_kill_in_a_rollout_loses_no_finished_group_and_changes_nothing": 0,
    "test_stops::test_a_signal_at_any_moment_loses_nothing_and_a_second_one_ends_at_once": 0,
    "test_store_kills::test_kill_9_at_a_request_loses_no_reported_step": 25,
    "test_tutorial::test_every_command_of_the_tutorial_prints_what_the_page_shows": 0,
    "test_figures::test_a_layout_validates_what_one_process_does": 3,
    "test_ablate::test_a_signal_stops_the_run_and_the_next_call_continues": 2,
    "test_ablate::test_the_recipes_are_really_trained": 0,
    "test_convert::test_the_export_has_the_tokenizer_of_the_run": 3,
    "test_episodes::test_hostile_programs_end_their_own_episodes_and_nothing_else": 2,
    "test_convert::test_a_hugging_face_folder_is_quantised_as_its_step_folder_is": 3,
    "test_convert::test_a_verb_says_what_a_folder_of_another_kind_is": 3,
    "test_gpu_report::test_a_dry_run_runs_every_part": 0,
    "test_attention::test_packed_micro_batches_meet_few_plans": 3,
    "test_attention::test_runs_equal_the_mask_of_all_pairs": 4,
    "test_sparse_attention::test_logits_loss_and_every_gradient_equal_transformers": 3,
    "test_sparse_attention::test_known_faults_of_other_implementations_are_seen": 4,
    "test_compile::test_compiled_block_equals_eager_without_break_or_recompilation": 2,
    "test_compile::test_rollouts_compile_no_layer_again": 2,
    "test_compiled_code::test_program_starts_with_a_planted_empty_library": 0,
    "test_benchmark::test_both_trainers_have_the_same_losses": 0,
    "test_search::test_a_search_of_94_layers_on_256_gpus_takes_less_than_minutes": 0,
    "test_quantised_weights::test_forward_keeps_no_converted_weight": 2,
    "test_quantised_weights::test_one_kernel_converts_to_the_same_bits_and_is_compiled_once": 2,
    "test_memory::test_selective_checkpointing_holds_what_the_formula_says": 2,
    "test_agent_recipes::test_a_small_policy_trains_by_a_recipe": 2,
    "test_servers::test_only_server_that_fails_ends_in_one_message": 3,
    "test_h100_code::test_a_part_of_the_step_compiles_for_an_h100": 0,
    "test_kernel_counts::test_bytes_and_kernels_only_fall": 3,
    "test_measures::test_a_model_that_is_trained_for_it_finds_the_needle_and_greedy_decoding_writes_it": 0,
    "test_standard_tasks::test_chats_and_texts_are_those_of_the_hf_backend": 6,
    "test_scoring::test_a_long_generation_meets_few_shapes_and_no_groups_of_heads_with_a_mask": 7,
    "test_monitoring_stack::test_a_program_that_reads_its_data_for_long_is_not_ended": 0,
    "test_monitoring_stack::test_grafana_and_dcgm_exporter_start_with_these_arguments": 4,
    "test_hang_report::test_what_a_rank_asks_does_not_grow_with_the_number_of_ranks": 2,
    "test_float8_run::test_a_checkpoint_goes_from_fp8_to_higher_precision_and_back": 2,
    "test_library_messages::test_a_run_with_eight_bit_states_and_many_workers_and_a_benchmark_write_no_errors": 0,
    "test_float8_run::test_an_offloaded_run_resumes_without_and_back": 2,
    "test_trainer::test_a_step_is_published_after_its_row_however_slow_the_storage_of_rows": 2,
    "test_trainer::test_ruined_weights_are_never_published_and_end_the_run_as_diverged": 2,
    "test_trainer::test_stopping_after_any_step_and_starting_again_changes_no_bit": 4,
    "test_types::test_a_size_that_the_rules_accept_trains": 11,
    "test_types::test_adapters_obey_every_pair_of_types": 2,
    "test_types::test_every_pair_of_types_is_obeyed": 48,
    "test_benchmark::test_measured_links_join_the_file_of_rates": 2,
    "test_job_files::test_a_job_of_pbs_saves_before_its_walltime_and_is_not_submitted_again_after_qdel": 0,
    "test_setup_cluster::test_a_cluster_is_set_up_and_again_gives_the_same": 3,
    "test_memory::test_a_file_of_states_has_the_planned_size_and_a_step_moves_it_once_each_way": 2,
    "test_memory::test_activations_of_a_frozen_layer_with_adapters_match_what_autograd_keeps": 4,
    "test_stage_table::test_the_bubble_is_that_of_torchs_order": 3,
    "test_step_time::test_bytes_and_kernels_of_a_layer_are_those_of_the_model": 6,
    "test_chat_formats::test_random_conversations_read_as_the_original_template_writes_them": 2,
    "test_chat_formats::test_arguments_as_json_text_are_those_of_the_object": 0,
    "test_chat_formats::test_documents_and_prompts_equal_apply_chat_template": 3,
    "test_hf_config::test_real_shapes_give_the_tensor_and_parameter_counts_of_the_releases": 3,
    "test_hub::test_ranks_get_the_folders_that_were_fetched_once": 2,
    "test_documents::test_memory_stays_within_the_setting_for_ten_times_the_documents": 0,
    "test_prepare::test_killed_at_random_moments_it_ends_with_the_same_bytes": 0,
    "test_adapter_runs::test_a_quantised_base_trains_as_the_converted_one_and_a_resume_changes_no_bit": 2,
    "test_adapter_runs::test_the_folder_of_a_run_is_a_peft_folder_that_the_next_run_goes_on_from": 2,
    "test_preferences::test_each_loss_learns_to_prefer_and_resumes_bit_for_bit": 2,
    "test_preferences::test_preferences_on_a_base_in_4_bits_train_as_on_the_converted_one_and_merge_into_it": 3,
    "test_preferences::test_a_run_begins_at_ln_2_learns_and_resumes_bit_for_bit": 2,
    "test_task::test_answers_end_if_and_only_if_the_marker_behind_them_is_a_target": 2,
    "test_data_stream::test_a_new_stage_with_a_higher_loss_is_no_spike": 0,
    "test_stage_attention::test_stages_equal_runs_with_the_keys_of_each_stage": 2,
    "test_code::test_a_label_that_a_program_without_an_answer_passes_is_refused": 4,
    "test_code::test_a_program_that_does_not_answer_right_has_not_passed": 7,
    "test_code::test_a_right_program_passes": 5,
    "test_rewards::test_a_program_that_loops_in_each_test_has_a_score": 2,
    "test_servers::test_server_that_comes_back_with_a_fault_does_not_end_the_run": 3,
    "test_weight_group::test_update_after_one_that_broke_anywhere_succeeds": 6,
    "test_weight_group::test_worker_waits_no_longer_for_a_trainer_that_is_stopped": 3,
    "test_goals::test_a_step_is_mostly_generation_and_passes": 0,
    "test_modes::test_prediction_layers_learn_from_samples_and_the_policy_does_not_learn_from_them": 0,
    "test_network_function::test_a_phase_goes_on_with_the_function_of_the_one_before": 3,
    "test_network_function::test_all_consumers_compute_what_a_key_of_adapters_says": 7,
    "test_network_function::test_all_consumers_compute_what_a_key_says": 7,
    "test_prompts::test_a_label_that_no_answer_reaches_is_refused": 4,
    "test_verbs::test_answers_to_lm_eval_do_not_depend_on_the_ranks": 0,
}
"""By name of a file and test: of its rows, the first and each n-th after it run in the first tier; 0: none."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag of `tests/golden.py`."""
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew instead of comparing")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the rows of the second tier, and all rows of a test but its first one."""
    seen: dict[str, int] = {}
    first = dict[str, pytest.Item]()
    for item in items:
        if first.setdefault(item.nodeid.partition("[")[0], item) is not item:
            item.add_marker("further")
        test = f"{item.path.stem}::{item.name.partition('[')[0]}"
        if (step := EVERY.get(test)) is not None:
            number = seen[test] = seen.get(test, -1) + 1
            if not step or number % step:
                item.add_marker("thorough")


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test of the second tier if the time that CI has for them is over."""
    end = os.environ.get("THOROUGH_UNTIL")
    if end and time.time() > float(end) and item.get_closest_marker("thorough"):
        pytest.skip("thorough, and the time that THOROUGH_UNTIL gives is over")
