"""Every place where eLLM touches SGLang, in one table.

Each entry names the SGLang function, how it is hooked, and why; where it is elsewhere in a version,
that version's adapter says where (`versions/`). The parameters of each are recorded per version:
`tests/sglang/test_hooks.py` fails, and eLLM stays off, where they are different. Beside these, eLLM
subclasses SGLang's base classes (`KVCache`, `BaseTokenToKVPoolAllocator`,
`RadixCache`, `ChunkCache`, `AttentionBackend`, `TorchNativeAttnBackend`, `SRTPlatform`) and
registers by name a radix cache backend and attention backends. Where servers share a budget, eLLM
sends the scheduler requests over the socket of SGLang's own (`sizing.py`).
"""

from __future__ import annotations

import itertools
import pkgutil
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ellm_sgl.sglang.versions import VERSIONS, adapter_of


class When(Enum):
    """When a hook is installed, in every process that loads SGLang's plugins."""

    ANY_VERSION = "any version"
    """Inert unless a flag of eLLM's is given; where eLLM does not know the version, it says so."""
    ALWAYS = "always"
    """Inert unless eLLM is enabled, which arguments may do after plugins were loaded."""
    PLATFORM = "platform"
    """On hosts where the CPU platform is offered, with any version; where eLLM does not know it,
    only on functions that are as recorded (`unknown_version.py`)."""
    ENABLED = "enabled"
    """Where eLLM is enabled when plugins are loaded: SGLang's worker processes. Where those are
    copies of another process (`processes.py`), in that one, once its arguments enable eLLM."""
    COPIED = "copied"
    """In a process whose copies SGLang's worker processes may be."""


@dataclass(frozen=True)
class Hook:
    """One hook on SGLang."""

    target: str
    """Dotted path of the SGLang function: in the table that of the oldest version, from `hooks_of`
    that of the version asked for."""
    kind: str
    """`HookType` by name: BEFORE, AFTER or AROUND."""
    ours: str
    """As "module:function", the module in this folder."""
    when: When
    reason: str
    since: str = VERSIONS[0]
    """The oldest version that has it."""
    until: str = VERSIONS[-1]
    """The newest version that needs it."""

    def is_of(self, version: str) -> bool:
        """Whether a version, one of `VERSIONS`, has and needs it."""
        return is_since(version, self.since) and is_since(self.until, version)

    @property
    def function(self) -> Any:
        """Ours itself; imports its module."""
        return pkgutil.resolve_name(f"{__package__}.{self.ours}")


_ANY_VERSION, _ALWAYS, _PLATFORM, _ENABLED, _COPIED = When
_SRT = "sglang.srt"
_ARGS = f"{_SRT}.server_args.ServerArgs"
_TOKENIZER = f"{_SRT}.managers.tokenizer_manager.TokenizerManager"
_CONTROL = f"{_SRT}.managers.tokenizer_control_mixin.TokenizerControlMixin"
_ENGINE = f"{_SRT}.entrypoints.engine"
_POOLS = f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_ALLOC = f"{_SRT}.mem_cache.allocation"
_BATCH = f"{_SRT}.managers.schedule_batch.ScheduleBatch"
_QUEUE = f"{_SRT}.managers.schedule_policy.SchedulePolicy"
_ADDER = f"{_SRT}.managers.schedule_policy.PrefillAdder"
_SCHEDULER = f"{_SRT}.managers.scheduler.Scheduler"
_PARTS = f"{_SRT}.managers.scheduler_components"
_UPDATER = f"{_PARTS}.weight_updater.SchedulerWeightUpdaterManager"
_CHECKER = f"{_PARTS}.invariant_checker.SchedulerInvariantChecker"
_TREE = f"{_SRT}.mem_cache.radix_cache.RadixCache"
_RESIDUAL = f"{_SRT}.layers.layer_boundary.residual"
_EXECUTOR = f"{_SRT}.model_executor"
_FORWARD = f"{_EXECUTOR}.forward_batch_info.ForwardBatch"
_GRAPHS = f"{_EXECUTOR}.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_PROMPT_GRAPHS = f"{_EXECUTOR}.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"

HOOKS: tuple[Hook, ...] = (
    # the process that serves clients: arguments are read and requests come in
    Hook(f"{_ARGS}.add_cli_args", "AFTER", "server_args:add_flags",
         _ANY_VERSION, "the --ellm-* flags, also for plain sglang.launch_server"),
    Hook(f"{_ARGS}.from_cli_args", "AROUND", "server_args:read_flags",
         _ANY_VERSION, "turn the flags into settings before SGLang checks its own arguments"),
    Hook(f"{_ARGS}.__post_init__", "AROUND", "server_args:check_arguments",
         _ALWAYS, "page size = block size, our prefix cache; refuse what is not supported"),
    Hook(f"{_ARGS}.check_server_args", "BEFORE", "server_args:check_adapted",
         _ALWAYS, "arguments resolved before plugins were loaded went past the check above"),
    Hook(f"{_TOKENIZER}.__init__", "AFTER", "http:serve_routes",
         _ALWAYS, "GET /ellm/state; the app is imported by now, and importing it elsewhere takes "
                  "0.5 s"),
    Hook(f"{_SRT}.utils.auth.add_api_key_middleware", "AFTER", "http:open_page",
         _ALWAYS, "browsers send no key: the live page's files come before SGLang's check, and ask "
                  "for it"),
    Hook(f"{_TOKENIZER}.generate_request", "BEFORE", "requests:check_form",
         _ALWAYS, "SGLang would answer 500 where a field of one request is a list"),
    Hook(f"{_TOKENIZER}._validate_one_request", "BEFORE", "requests:check_request",
         _ALWAYS, "refuse what eLLM cannot serve, and token ids that would end the server"),
    Hook(f"{_CONTROL}.release_memory_occupation", "AROUND", "occupation_asked:release",
         _ALWAYS, "asked for memory other than KV's, the scheduler would end; and new weights "
                  "would wait for requests that cannot go on"),
    Hook(f"{_CONTROL}.resume_memory_occupation", "AROUND", "occupation_asked:resume",
         _ALWAYS, "same, and who came meanwhile goes on"),
    Hook(f"{_TOKENIZER}.pause_generation", "AROUND", "occupation_asked:pause",
         _ALWAYS, "a pause that comes while memory is released outlasts that"),
    Hook(f"{_TOKENIZER}.continue_generation", "AROUND", "occupation_asked:go_on",
         _ALWAYS, "while memory is released nobody goes on"),
    Hook(f"{_ENGINE}.Engine._launch_scheduler_processes", "AFTER", "watchdog:watch_replicas",
         _ALWAYS, "SGLang does not notice that a replica was killed"),
    # the CPU platform
    Hook(f"{_SRT}.utils.numa_utils.init_threads_binding", "AFTER", "platform.cores:bind",
         _PLATFORM, "SGLang binds a rank's threads only where its AMX backend is installed"),
    Hook(f"{_SRT}.utils.common.support_triton", "AROUND", "platform.attention:no_triton",
         _PLATFORM, "the CPU platform's attention backend has a name SGLang does not know"),
    Hook(f"{_ALLOC}.get_last_loc", "AROUND", "platform.attention:last_locations",
         _PLATFORM, "same: it has a list of its own"),
    Hook(f"{_SRT}.layers.quantization.unquant.UnquantizedLinearMethod.apply", "AROUND",
         "platform.linear:apply", _PLATFORM,
         "products of few rows by kernels that read weights at memory speed, of many by oneDNN"),
    Hook(f"{_SRT}.layers.logits_processor.LogitsProcessor._compute_lm_head", "AROUND",
         "platform.linear:lm_head", _PLATFORM, "same, of the language model's head"),
    Hook(f"{_SRT}.layers.layernorm.RMSNorm.forward_native", "AROUND", "platform.operators:norm",
         _PLATFORM, "one kernel in place of eight of PyTorch's operators"),
    Hook(f"{_SRT}.layers.rotary_embedding.base.RotaryEmbedding.forward_native", "AROUND",
         "platform.operators:rope", _PLATFORM, "same, in place of some twenty"),
    Hook(f"{_SRT}.layers.activation.SiluAndMul.forward_native", "AROUND",
         "platform.operators:silu_and_mul", _PLATFORM, "same, in place of four"),
    # the process of `ellm-sgl serve`
    Hook(f"{_ENGINE}._set_envs_and_config", "AFTER", "processes:fork_if_alone",
         _COPIED, "worker processes as copies of this one, which has imported all that they need"),
    # memory: the pool, and who owns which block
    Hook(f"{_POOLS}._resolve_memory_pool_config", "AFTER", "memory:widen_logical_capacity",
         _ENABLED, "SGLang hands out more token slots than the device holds"),
    Hook(f"{_POOLS}._build_token_to_kv_pool", "AROUND", "memory:build_pool",
         _ENABLED, "the token- and layer-aware pool in place of SGLang's"),
    Hook(f"{_POOLS}._build_token_to_kv_pool_allocator", "AROUND", "memory:build_allocator",
         _ENABLED, "slots backed by the page table"),
    Hook(f"{_ALLOC}.alloc_for_extend", "AFTER", "decode_memory:map_extended",
         _ENABLED, "the page table learns which request owns which block"),
    Hook(f"{_ALLOC}.alloc_for_decode", "AFTER", "decode_memory:map_decoded",
         _ENABLED, "same, for the token each request is about to decode"),
    # scheduling: who runs, who is admitted
    Hook(f"{_BATCH}.check_decode_mem", "AROUND", "decode_memory:check_decode_memory",
         _ENABLED, "evict blocks where SGLang would retract a request"),
    Hook(f"{_BATCH}.retract_decode", "AFTER", "decode_memory:count_retractions",
         _ENABLED, "retractions_total"),
    Hook(f"{_BATCH}.prepare_for_decode", "BEFORE", "decode_memory:prepare_decode",
         _ENABLED, "who is paused for the step, and everybody's ratio; once per step, mixed ones "
                   "too"),
    Hook(f"{_BATCH}.mix_with_running", "AFTER", "decode_memory:place_decoded",
         _ENABLED, "positions in a mixed step, of requests that sat out the one before, too; later "
                   "versions have them so", until="0.5.17"),
    Hook(f"{_ADDER}.__init__", "AFTER", "admission:limit_admission",
         _ENABLED, "admission counts device memory, not logical slots"),
    Hook(f"{_ADDER}.add_one_req", "AROUND", "admission:admit",
         _ENABLED, "the policy says who is admitted; a request larger than the device is when "
                   "it is alone"),
    Hook(f"{_ADDER}.add_chunked_req", "AROUND", "admission:continue_chunked",
         _ENABLED, "its later chunks are not limited by device memory either"),
    Hook(f"{_SCHEDULER}.__init__", "AFTER", "start:start_loop",
         _ENABLED, "calibrate the machine and start the closed loop, before the first request"),
    Hook(f"{_SCHEDULER}.__init__", "AROUND", "start:end_in_a_sentence",
         _ENABLED, "a setting that turns out to make no sense ends the server with one line; "
                   "stands around `start_loop`, since it comes after it"),
    # each iteration: requests arrive, the policy decides, paused ones come back
    Hook(f"{_SCHEDULER}.handle_generate_request", "AROUND", "requests:take_request",
         _ENABLED, "the same look for requests that were tokenized in a process without our hooks"),
    Hook(f"{_SCHEDULER}._abort_on_queued_limit", "AROUND", "queue_full:turn_away",
         _ENABLED, "who comes back to a full queue in the midst of its answer would be ended"),
    Hook(f"{_SCHEDULER}.get_new_batch_prefill", "BEFORE", "scheduler:decide",
         _ENABLED, "ask the policy, once per iteration"),
    Hook(f"{_QUEUE}.calc_priority", "AFTER", "scheduler:order_waiting",
         _ENABLED, "requests that the policy admits come first"),
    Hook(f"{_SCHEDULER}.process_input_requests", "BEFORE", "resting:rest",
         _ENABLED, "SGLang's loops do not sleep while generation is paused; stands first, since it "
                   "comes last"),
    Hook(f"{_SCHEDULER}.process_input_requests", "BEFORE", "scheduler:resume_paused",
         _ENABLED, "paused requests are back before anybody may abort or count them",
         until="0.5.17"),
    Hook(f"{_SCHEDULER}.ingest_requests", "BEFORE", "scheduler:resume_paused",
         _ENABLED, "same; it also looks for those that have run too long", since="0.5.20"),
    Hook(f"{_SCHEDULER}.process_input_requests", "BEFORE", "scheduler:resize",
         _ENABLED, "the pool shrinks and grows between two steps, in turns that all ranks share"),
    Hook(f"{_CHECKER}.self_check_during_busy", "BEFORE", "scheduler:resume_paused",
         _ENABLED, "SGLang's own memory check counts every running request"),
    Hook(f"{_CHECKER}._get_total_uncached_sizes", "AFTER", "scheduler:count_waiting_chunk",
         _ENABLED, "same, and a prompt between two chunks; later versions do", until="0.5.17"),
    # new weights
    Hook(f"{_SCHEDULER}.pause_generation", "AROUND", "weights:pause",
         _ENABLED, "requests go back to the queue here too, and the pause is no step's time"),
    *(
        Hook(f"{_UPDATER}.update_weights_from_{source}", "AROUND", "weights:update",
             _ENABLED, "KV of the old weights must not be completed with KV of the new")
        for source in ("disk", "tensor", "distributed", "ipc")
    ),
    *(
        Hook(f"{_UPDATER}.{end}_weight_update", "AROUND", "weights:update",
             _ENABLED, "weights that are packed are unpacked and packed again", since="0.5.23")
        for end in ("begin", "end")
    ),
    Hook(f"{_UPDATER}.check_weights", "AROUND", "weights:check",
         _ENABLED, "one of its actions overwrites the weights"),
    Hook(f"{_UPDATER}.flush_cache_after_weight_update", "AROUND", "weights:flush",
         _ENABLED, "its assertion ends the scheduler while retracted requests wait"),
    # memory given back on request
    Hook(f"{_UPDATER}.release_memory_occupation", "AROUND", "occupation:release",
         _ENABLED, "KV's memory goes, also while requests are under way"),
    Hook(f"{_UPDATER}.resume_memory_occupation", "AROUND", "occupation:resume",
         _ENABLED, "and comes back"),
    Hook(f"{_SCHEDULER}.continue_generation", "AROUND", "occupation:go_on",
         _ENABLED, "but not without memory"),
    # a step of the model
    Hook(f"{_SRT}.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", "AFTER",
         "retracted:count_again", _ENABLED,
         "a retracted request's penalties would begin anew: SGLang counts decoded tokens alone"),
    Hook(f"{_PARTS}.batch_result_processor.SchedulerBatchResultProcessor"
         "._append_prefill_hidden_states", "AFTER", "retracted:keep_one_state", _ENABLED,
         "a retracted request would have the hidden states of all its positions twice"),
    Hook(f"{_FORWARD}.init_new", "AFTER", "model:note_requests",
         _ENABLED, "whose rows a step has, from the host's copy of the indices"),
    Hook(f"{_GRAPHS}.can_run_graph", "AROUND", "cuda:may_replay",
         _ENABLED, "CUDA graphs only for decode steps that recompute nothing"),
    Hook(f"{_PROMPT_GRAPHS}.can_run_graph", "AROUND", "cuda:may_replay_prompt",
         _ENABLED, "and only for prompts beside which nothing is recomputed"),
    Hook(f"{_SRT}.layers.logprob_processor.get_token_ids_logprobs", "AROUND",
         "requests:name_no_token", _ENABLED,
         "a request with token_ids_logprob would end the scheduler beside others without",
         until="0.5.20"),
    Hook(f"{_SRT}.models.utils.enable_fused_set_kv_buffer", "AROUND", "cuda:keep_writes",
         _ENABLED, "on CUDA some models would write KV by slot, past the attention backend"),
    Hook(f"{_SRT}.layers.radix_attention.padded_extend_real_tokens", "AROUND",
         "attention:no_padding", _ENABLED,
         "rows beyond SGLang's own are those recomputed, not padding", since="0.5.23"),
    Hook(f"{_EXECUTOR}.model_runner.ModelRunner.forward", "AROUND", "model:run_step",
         _ENABLED, "plan the step, and take its recomputed rows through the model"),
    # state
    Hook(f"{_SCHEDULER}.get_internal_state", "AFTER", "state:report",
         _ENABLED, "eLLM's state, through SGLang's own channel between processes"),
    Hook(f"{_SCHEDULER}.set_internal_state", "AROUND", "state:adjust",
         _ENABLED, "change ratio and pool size of a running server"),
    Hook(f"{_SCHEDULER}.handle_dumper_control", "AROUND", "state:control",
         _ENABLED, "ask for state and steps, switch policies: the one request that carries names "
                   "and JSON"),
)  # fmt: skip


USED = (
    f"{_SRT}.mem_cache.memory_pool.KVCache.__init__",
    f"{_SRT}.mem_cache.allocator.BaseTokenToKVPoolAllocator.__init__",
    f"{_SRT}.mem_cache.allocator.BaseTokenToKVPoolAllocator.free",
    f"{_SRT}.mem_cache.allocator.BaseTokenToKVPoolAllocator.free_segment",
    f"{_SRT}.mem_cache.allocator.PagedTokenToKVPoolAllocator.alloc_extend",
    f"{_SRT}.mem_cache.allocator.PagedTokenToKVPoolAllocator.alloc_decode",
    f"{_EXECUTOR}.runner_backend_utils.breakable_cuda_graph.context.is_in_breakable_cuda_graph",
    f"{_GRAPHS}.execute",
    f"{_PROMPT_GRAPHS}.execute",
    f"{_SRT}.mem_cache.common.release_kv_cache",
    f"{_TREE}.__init__",
    f"{_TREE}.match_prefix",
    f"{_TREE}.insert",
    f"{_TREE}.evict",
    f"{_TREE}.evictable_size",
    f"{_TREE}.inc_lock_ref",
    f"{_TREE}.dec_lock_ref",
    f"{_TREE}.cache_unfinished_req",
    f"{_TREE}.cache_finished_req",
    f"{_TREE}._match_prefix_helper",
    f"{_TREE}._delete_leaf",
    f"{_TREE}._split_node",
    f"{_TREE}.update_eviction_metrics",
    f"{_SRT}.mem_cache.radix_cache.RadixKey.__init__",
    f"{_SRT}.mem_cache.chunk_cache.ChunkCache.__init__",
    f"{_SRT}.mem_cache.chunk_cache.ChunkCache.cache_finished_req",
    f"{_SRT}.mem_cache.registry.register_radix_cache_backend",
    f"{_SRT}.layers.attention.attention_registry.register_attention_backend",
    f"{_SRT}.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata",
    f"{_SRT}.layers.attention.base_attn_backend.AttentionBackend.forward_decode",
    f"{_SRT}.layers.attention.base_attn_backend.AttentionBackend.forward_extend",
    f"{_SRT}.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_decode",
    f"{_SRT}.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend",
    f"{_BATCH}.filter_batch",
    f"{_BATCH}.merge_batch",
    f"{_BATCH}.new_tokens_required_next_decode",
    f"{_SRT}.managers.schedule_batch.Req.__init__",
    f"{_SRT}.managers.schedule_batch.Req.set_finish_with_abort",
    f"{_SCHEDULER}._add_request_to_queue",
    f"{_SCHEDULER}.init_req_max_new_tokens",
    f"{_SCHEDULER}.maybe_sleep_on_idle",
    f"{_SRT}.managers.io_struct.sock_send",
    f"{_SRT}.utils.broadcast_pyobj",
    f"{_SRT}.models.llama.LlamaModel.forward",
    f"{_SRT}.models.qwen2.Qwen2Model.forward",
)
"""What eLLM overrides, or calls by its name, and whose parameters count as much as a hook's."""

USED_SINCE: dict[str, tuple[str, ...]] = {
    "0.5.23": (
        f"{_TREE}.path_device_indices",
        f"{_SRT}.mem_cache.prefill_budget.PrefillBudget.reserve",
        f"{_RESIDUAL}.batch.start",
        f"{_RESIDUAL}.stream.ResidualStream.export",
        f"{_RESIDUAL}.stream.ResidualStream.from_handoff",
    ),
}
"""What it uses beside that from a version on."""


def is_since(version: str, since: str) -> bool:
    """Whether a version is `since` or a later one; both of `VERSIONS`."""
    return VERSIONS.index(version) >= VERSIONS.index(since)


def hooks_of(version: str) -> tuple[Hook, ...]:
    """The table's hooks that a version has, with each target where it has that. One that eLLM does
    not know is taken for the newest that it does."""
    known = version if version in VERSIONS else VERSIONS[-1]
    moved = adapter_of(known).moved
    return tuple(
        replace(hook, target=moved.get(hook.target, hook.target))
        for hook in HOOKS
        if hook.is_of(known)
    )


def used_by(version: str) -> tuple[str, ...]:
    """What of a version eLLM uses beside its hooks, each where that version has it."""
    moved = adapter_of(version).moved
    later = (used for since, used in USED_SINCE.items() if is_since(version, since))
    return (*(moved.get(used, used) for used in USED), *itertools.chain(*later))
