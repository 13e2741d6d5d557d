"""SGLang's arguments that work with eLLM, those that it sets, and those without bearing on it."""

from __future__ import annotations

from ellm_sgl.sglang.arguments import adapted, no_bearing, works

_PRESSURE = "e2e/test_memory_pressure.py"
_ARGUMENTS = "e2e/test_arguments.py"
_TOGETHER = f"{_ARGUMENTS}::test_arguments_together_change_no_output"

_WORKS = (
    *works("model_path skip_tokenizer_init", "e2e/test_verify.py::test_tiny_model"),
    *works("dtype", "e2e/test_verify.py::test_demo_model_in_16_bits"),
    *works("tp_size", "e2e/test_tensor_parallel.py::test_ranks_evict_and_restore_alike"),
    *works("chunked_prefill_size enable_mixed_chunk", f"{_PRESSURE}::test_server_options"),
    *works("disable_radix_cache disable_overlap_schedule", f"{_PRESSURE}::test_server_options"),
    *works("random_seed", "e2e/test_features.py::test_seeded_sampling"),
    *works("constrained_json_disable_any_whitespace", "e2e/test_features.py::test_json_schema"),
    *works(
        "api_key admin_api_key",
        "e2e/test_policy_faults.py::test_only_an_administrator_may_switch_where_there_is_one",
    ),
    *works("max_total_tokens", f"{_ARGUMENTS}::test_sglang_says_how_large_the_pool_is"),
    *works(
        "context_length max_prefill_tokens max_running_requests max_queued_requests "
        "prefill_max_requests min_free_slots_delay pp_max_micro_batch_size "
        "schedule_conservativeness scheduler_recv_interval radix_eviction_policy "
        "enable_fp32_lm_head enable_dynamic_batch_tokenizer",
        _TOGETHER,
    ),
    *works(
        "default_priority_value disable_priority_preemption retraction_policy "
        "schedule_low_priority_values_first",
        _TOGETHER,
        "without preemption",
    ),
    *works("enable_metrics enable_mfu_metrics", f"{_ARGUMENTS}::test_metrics_are_told"),
    *works(
        "enable_return_hidden_states return_hidden_states_mode",
        f"{_ARGUMENTS}::test_hidden_states_are_those_of_a_full_cache",
    ),
    *works(
        "enable_custom_logit_processor",
        f"{_ARGUMENTS}::test_a_custom_logit_processor_sees_its_own_rows",
    ),
)

_ADAPTED = (
    *adapted("page_size", "a page is a block: --ellm-block-tokens"),
    *adapted("radix_cache_backend", "eLLM's prefix cache"),
    *adapted("attention_backend", "eLLM's attention"),
    *adapted("sampling_backend", "pytorch on a CPU host"),
    *adapted("grammar_backend", "llguidance on a CPU host, where xgrammar is refused"),
    *adapted("sleep_on_idle", "on, on a CPU host"),
    *adapted("mem_fraction_static", "half of what is free on a CPU host, unless given"),
    *adapted("disable_prefill_cuda_graph", "prompts are not captured"),
    *adapted("enforce_disable_flashinfer_allreduce_fusion", "on, on a CUDA host"),
)

_OF = "means nothing without {}, which is refused"

_NO_BEARING = (
    *no_bearing(
        "tokenizer_path tokenizer_mode tokenizer_backend detokenizer_worker_num "
        "dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout "
        "enable_tokenizer_batch_encode disable_tokenizer_batch_decode allow_auto_truncate",
        "text to tokens and back; each request is checked between",
    ),
    *no_bearing(
        "load_format model_loader_extra_config trust_remote_code revision model_config_parser "
        "json_model_override_args custom_weight_loader weight_loader_disable_mmap "
        "weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads "
        "weight_loader_drop_cache_after_load download_dir model_checksum "
        "delete_ckpt_after_loading decrypted_config_file "
        "remote_instance_weight_loader_seed_instance_ip "
        "remote_instance_weight_loader_seed_instance_service_port "
        "remote_instance_weight_loader_send_weights_group_ports "
        "remote_instance_weight_loader_backend "
        "remote_instance_weight_loader_start_seed_via_transfer_engine "
        "engine_info_bootstrap_port modelexpress_config "
        "checkpoint_engine_wait_weights_before_ready",
        "where the model comes from; what was loaded is checked",
    ),
    *no_bearing(
        "host port fastapi_root_path grpc_port sidecar sidecar_args enable_http2 ssl_keyfile "
        "ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh skip_server_warmup "
        "warmups served_model_name weight_version chat_template hf_chat_template_name "
        "completion_template file_storage_path enable_cache_report reasoning_parser "
        "default_chat_template_kwargs tool_call_parser tool_server sampling_defaults "
        "asr_max_buffer_seconds asr_max_concurrent_sessions preferred_sampling_params "
        "stream_interval batch_notify_size stream_response_default_include_usage "
        "incremental_streaming_output",
        "between clients and the process that tokenizes",
    ),
    *no_bearing(
        "enable_strict_thinking constrained_json_whitespace_pattern disable_outlines_disk_cache",
        "which tokens may be sampled, from the logits of SGLang's own rows",
    ),
    *no_bearing(
        "log_level log_level_http log_requests log_requests_level log_requests_format "
        "log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost "
        "smg_http_sidecar_port enable_metrics_for_all_schedulers load_snapshot_publish_interval "
        "tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels "
        "extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency "
        "bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets "
        "gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging "
        "enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name "
        "enable_trace trace_modules otlp_traces_endpoint export_metrics_to_file "
        "export_metrics_to_file_dir stat_loggers enable_layerwise_nvtx_marker",
        "logs, metrics and traces",
    ),
    *no_bearing(
        "base_gpu_id gpu_id_step numa_node gc_threshold watchdog_timeout "
        "soft_watchdog_timeout custom_sigquit_handler nccl_port dist_timeout dist_init_addr "
        "enable_p2p_check pre_warm_nccl disable_custom_all_reduce",
        "the processes, where they run and how they find each other",
    ),
    *no_bearing("abort_on_priority_when_disabled", "requests are turned away before they wait"),
    *no_bearing("priority_scheduling_preemption_threshold", "preemption is refused"),
    *no_bearing("num_continuous_decode_steps", "SGLang 0.5.17 does not read it"),
    *no_bearing("strip_thinking_cache", "a finished request leaves less in the prefix cache"),
    *no_bearing(
        "cuda_graph_max_bs_decode cuda_graph_bs_decode cuda_graph_max_bs_prefill "
        "cuda_graph_bs_prefill cuda_graph_tc_compiler disable_decode_cuda_graph "
        "disable_cuda_graph disable_cuda_graph_padding enable_profile_cuda_graph "
        "enable_cudagraph_gc",
        "which decode steps are captured: those that recompute run layer by layer",
    ),
    *no_bearing(
        "triton_attention_reduce_in_fp32 triton_attention_num_kv_splits "
        "triton_attention_split_tile_size flashinfer_mla_disable_ragged",
        "attention backends that eLLM's replaces",
    ),
    *no_bearing(
        "bf16_gemm_backend fp8_gemm_runner_backend fp4_gemm_runner_backend "
        "disable_flashinfer_autotune flashinfer_autotune_skip_ops",
        "which kernel multiplies rows that are its own business each",
    ),
    *no_bearing(
        "enable_multimodal mm_attention_backend enable_broadcast_mm_inputs_process "
        "enable_prefix_mm_cache mm_enable_dp_encoder mm_process_config mm_processor_worker_num "
        "mm_io_worker_num limit_mm_data_per_request enable_mm_global_cache "
        "disable_fast_image_processor mm_feature_transport keep_mm_feature_on_device "
        "enable_precise_embedding_interpolation encoder_transfer_backend encoder_urls "
        "encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder",
        "images, video and sound: the architectures that eLLM supports take text",
    ),
    *no_bearing(
        "swa_full_tokens_ratio disable_hybrid_swa_memory disable_chunked_prefix_cache "
        "dsa_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend dsa_topk_backend "
        "enable_deepseek_v4_fp4_indexer enable_scattered_sconv disable_shared_experts_fusion "
        "enforce_shared_experts_fusion mamba_backend max_mamba_cache_size mamba_ssm_dtype "
        "mamba_max_states_per_path enable_mamba_cache_stochastic_rounding "
        "mamba_cache_philox_rounds mamba_full_memory_ratio mamba_radix_cache_strategy "
        "uses_mamba_radix_cache mamba_track_interval enable_int8_mamba_checkpoint "
        "int8_mamba_ckpt_size linear_attn_backend linear_attn_decode_backend "
        "linear_attn_prefill_backend linear_attn_verify_backend enable_linear_replayssm "
        "linear_replayssm_cache_len enable_linear_replayssm_spec",
        "architectures that eLLM refuses",
    ),
    *no_bearing("quantization_param_path", _OF.format("quantised KV")),
    *no_bearing(
        "modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path",
        _OF.format("ModelOpt"),
    ),
    *no_bearing("enable_dynamic_chunking pp_async_batch_depth", _OF.format("pipeline parallelism")),
    *no_bearing(
        "load_balance_method enable_dp_attention_local_control_broadcast enable_dp_lm_head "
        "prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark "
        "prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets "
        "prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms",
        _OF.format("data parallelism"),
    ),
    *no_bearing(
        "dcp_comm_backend dcp_replicate_q_proj cp_strategy dsa_prefill_cp_mode prefill_cp_mode "
        "enable_cp_decode_attn_tp",
        _OF.format("context parallelism"),
    ),
    *no_bearing("node_rank", _OF.format("a second node")),
    *no_bearing("disable_attn_tp_gather", _OF.format("scattered attention input")),
    *no_bearing(
        "flashinfer_mxfp4_moe_precision deepep_mode fuseep_mode deepep_dispatcher_output_dtype "
        "eplb_algorithm "
        "eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk "
        "eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_buffer_size "
        "deepep_config enable_elastic_expert_backup mooncake_ib_device ep_join_mode "
        "ep_join_rank_offset elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout "
        "elastic_ep_rejoin disable_flashinfer_cutlass_moe_fp4_allgather kt_method kt_cpuinfer "
        "kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token",
        _OF.format("expert parallelism"),
    ),
    *no_bearing(
        "speculative_draft_model_path speculative_draft_model_revision "
        "speculative_draft_load_format speculative_num_steps speculative_eagle_topk "
        "speculative_num_draft_tokens speculative_dflash_block_size speculative_dspark_block_size "
        "speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path "
        "speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single "
        "speculative_accept_threshold_acc speculative_use_rejection_sampling "
        "speculative_token_map speculative_attention_mode speculative_draft_attention_backend "
        "speculative_draft_window_size speculative_moe_runner_backend speculative_moe_a2a_backend "
        "speculative_draft_model_quantization speculative_skip_dp_mlp_sync speculative_adaptive "
        "speculative_adaptive_config decoupled_spec_bind_endpoint "
        "decoupled_spec_connect_endpoints decoupled_spec_rank spec_trace_dir "
        "speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth "
        "speculative_ngram_match_type speculative_ngram_max_trie_depth "
        "speculative_ngram_capacity speculative_ngram_external_corpus_path "
        "speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens "
        "decrypted_draft_config_file enable_draft_weights_cpu_backup",
        _OF.format("speculative decoding"),
    ),
    *no_bearing(
        "hicache_ratio hicache_size hicache_write_policy hicache_io_backend hicache_mem_layout "
        "hicache_storage_backend hicache_storage_prefetch_policy "
        "hicache_storage_backend_extra_config hisparse_config lmcache_config_file "
        "flexkv_config_file",
        _OF.format("SGLang's host caches"),
    ),
    *no_bearing(
        "enable_lora_overlap_loading max_lora_rank lora_target_modules max_loaded_loras "
        "max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size "
        "experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading "
        "lora_drain_wait_threshold",
        _OF.format("LoRA"),
    ),
    *no_bearing("tbo_token_distribution_threshold", _OF.format("two-batch overlap")),
    *no_bearing(
        "offload_num_in_group offload_prefetch_step offload_mode", _OF.format("offloading")
    ),
    *no_bearing("dllm_algorithm_config dllm_fdfo", _OF.format("diffusion models")),
    *no_bearing(
        "disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device "
        "disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache "
        "num_reserved_decode_tokens disaggregation_decode_extra_slots "
        "disaggregation_decode_polling_interval optimistic_prefill_attempts",
        _OF.format("PD disaggregation"),
    ),
    *no_bearing("pdmux_config_path sm_group_num", _OF.format("PD multiplexing")),
    *no_bearing("kv_canary_real_data kv_canary_sweep_interval", _OF.format("the canary")),
    *no_bearing("debug_tensor_dump_layers", _OF.format("dumping tensors")),
    *no_bearing("enable_weights_cpu_backup", _OF.format("the memory saver")),
    *no_bearing("weight_cache_socket weight_cache_timeout", _OF.format("the weight cache")),
    *no_bearing(
        "enable_torch_compile_debug_mode torch_compile_max_bs", _OF.format("torch.compile")
    ),
)

ROWS = (*_WORKS, *_ADAPTED, *_NO_BEARING)
