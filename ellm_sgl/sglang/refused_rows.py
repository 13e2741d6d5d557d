"""SGLang's arguments with which eLLM does not start, and why."""

from __future__ import annotations

from typing import Any

from ellm_sgl.sglang.arguments import refused
from ellm_sgl.sglang.cuda import available

_MEMORY = "it manages KV memory by itself, and so does eLLM"
_PARTS = "processes would share requests in a way that eLLM's page table does not know"
_ENTRY = "requests would come through processes that have neither eLLM's checks nor its routes"
_TWO = "it computes two batches at once, and eLLM plans one step at a time"
_DRAFTS = "drafts are rows that are taken back, and eLLM recomputes what stays"
_ATTENTION = "eLLM brings its own attention"
_LAYERS = "it reaches into the model's layers, where eLLM adds rows and takes them away"
_ROWS = "it counts on a step having SGLang's rows and no others"
_SCALES = (
    "a scale for all activations of a step would change with the rows that eLLM adds, and other "
    "requests' outputs with it; only methods that quantise weights alone are supported"
)
_UNPROVED = "nobody has shown that outputs stay exact with it"

WEIGHTS_ALONE = ("awq", "awq_marlin", "gptq", "gptq_marlin", "gguf", "moe_wna16", "unquant")
PLAIN_KV = ("bfloat16", "bf16", "float16", "float32")
_TORCHAO = ("int8wo", "fp8wo", *(f"int4wo-{size}" for size in (32, 64, 128, 256)))


def _preempts(args: Any) -> bool:
    return bool(args.enable_priority_scheduling and not args.disable_priority_preemption)


REFUSED = (
    # KV memory and the prefix cache
    *refused("enable_hierarchical_cache enable_lmcache enable_flexkv enable_hisparse", _MEMORY),
    *refused("enable_unified_memory enable_page_major_kv_layout enable_memory_saver", _MEMORY),
    *refused("enable_session_radix_cache enable_streaming_session", _MEMORY),
    *refused("prefill_only_disable_kv_cache", _MEMORY),
    *refused("kv_cache_dtype", "recomputed KV would be quantised by other scales", *PLAIN_KV),
    *refused("kv_events_config", "its events tell of whole blocks, and eLLM evicts parts of them"),
    *refused("kv_canary", "it looks for KV by slot, and eLLM keeps it elsewhere"),
    # the scheduler
    *refused(
        "enable_priority_scheduling",
        "SGLang loses the requests it preempts when eLLM's policy lets nobody join for them",
        remedy="add --disable-priority-preemption",
        when=_preempts,
    ),
    *refused(
        "schedule_policy",
        "each rank draws lots of its own",
        remedy="give another",
        when=lambda args: args.schedule_policy == "random",
    ),
    *refused("enable_two_batch_overlap enable_pdmux", _TWO),
    *refused("enable_prefill_delayer", "it belongs to data-parallel attention"),
    *refused("is_embedding", "it has no decoding"),
    *refused("dllm_algorithm", "a diffusion model computes a block more than once"),
    *refused("speculative_algorithm enable_multi_layer_eagle", _DRAFTS),
    *refused("decoupled_spec_role", _DRAFTS),
    # several processes
    *refused("pp_size", _PARTS, option="--pipeline-parallel-size"),
    *refused("dp_size", _PARTS, option="--data-parallel-size"),
    *refused("dcp_size attn_cp_size moe_dp_size dwdp_size ep_size nnodes", _PARTS),
    *refused("enable_dp_attention enable_prefill_cp enable_prefill_context_parallel", _PARTS),
    *refused("enable_dsa_prefill_context_parallel enable_dsa_cache_layer_split", _PARTS),
    *refused("disaggregation_mode encoder_only language_only", _PARTS),
    *refused("smg_grpc_mode grpc_mode tokenizer_worker_num", _ENTRY),
    *refused(
        "device",
        "eLLM runs on the device that this host has",
        when=lambda args: args.device not in (None, "cuda" if available() else "cpu"),
    ),
    *refused("use_ray", "Ray's workers do not get eLLM's settings"),
    # attention and captured steps
    *refused("prefill_attention_backend decode_attention_backend", _ATTENTION, given_only=True),
    *refused("enable_mis enable_deterministic_inference rl_on_policy_target", _ATTENTION),
    *refused("cuda_graph_config", "eLLM says which steps are captured", given_only=True),
    *refused(
        "cuda_graph_backend_prefill",
        "a captured prompt cannot recompute what is missing",
        "disabled",
        given_only=True,
    ),
    *refused(
        "cuda_graph_backend_decode",
        "eLLM's attention is captured whole or not at all",
        "full",
        "disabled",
        given_only=True,
    ),
    *refused("debug_cuda_graph", "eLLM's attention is captured whole or not at all"),
    *refused("enable_torch_compile", "compiled layers have no place where rows join"),
    # the model's layers
    *refused("model_impl", "other implementations have layers of other names", "sglang"),
    *refused("quantization", _SCALES, *WEIGHTS_ALONE),
    *refused("torchao_config", _SCALES, *_TORCHAO),
    *refused("modelopt_quant quantize_and_serve rl_quant_profile", _SCALES),
    *refused("enable_quant_communications", _SCALES),
    *refused("enable_lora lora_paths", "KV depends on the adapter", False, []),
    *refused("cpu_offload_gb offload_group_size enable_single_batch_overlap", _LAYERS),
    *refused("forward_hooks msprobe_dump_config kt_weight_path", _LAYERS),
    *refused("debug_tensor_dump_output_folder debug_tensor_dump_input_file", _LAYERS),
    *refused(
        "enable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend "
        "enable_aiter_allreduce_fusion",
        "it goes past the norms where eLLM takes rows away",
    ),
    *refused("moe_dense_tp_size enable_attn_tp_input_scattered", _ROWS),
    *refused("moe_a2a_backend enable_waterfill enable_eplb", _ROWS),
    *refused("elastic_ep_backend", _ROWS, "none"),
    *refused("enable_return_routed_experts enable_return_indexer_topk", _ROWS),
    *refused("expert_distribution_recorder_mode enable_expert_distribution_metrics", _ROWS),
    *refused("moe_runner_backend", _UNPROVED, "triton", given_only=True),
    *refused("enable_tf32_matmul enable_fused_qk_norm_rope weight_cache_mode", _UNPROVED),
    *refused("enable_symm_mem enable_torch_symm_mem enable_nccl_nvls enable_mscclpp", _UNPROVED),
    *refused("enable_fused_moe_sum_all_reduce ep_num_redundant_experts", _UNPROVED),
    *refused("ep_dispatch_algorithm init_expert_location", _UNPROVED),
)
