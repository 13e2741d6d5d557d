"""Every place where eLLM touches SGLang, in one table (its first rows are in `seams_serving.py`).

Each entry names the SGLang function, how it is hooked, and why. `tests/sglang/test_seams.py`
fails when one of them moves, and a server refuses to start when one cannot be applied. Beside
these, eLLM subclasses SGLang's base classes (`KVCache`, `BaseTokenToKVPoolAllocator`,
`RadixCache`, `ChunkCache`, `AttentionBackend`, `TorchNativeAttnBackend`, `SRTPlatform`) and
registers by name a radix cache backend and attention backends.
"""

from __future__ import annotations

import pkgutil

from ellm_sgl.sglang.hook import Seam, When
from ellm_sgl.sglang.hooks_serving import SERVING

SGLANG_VERSIONS = ("0.5.17",)
"""Those that the tests have run with. With another one eLLM does not start: a seam may be where
it was and mean something else, and outputs that are wrong are worse than none. (Seen: 0.5.20 has
every seam, but its prefix cache counts what eLLM's tree holds as a leak.)"""


_SRT = "sglang.srt"
_POOLS = f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_ALLOC = f"{_SRT}.mem_cache.allocation"
_BATCH = f"{_SRT}.managers.schedule_batch.ScheduleBatch"
_ADDER = f"{_SRT}.managers.schedule_policy.PrefillAdder"
_SCHEDULER = f"{_SRT}.managers.scheduler.Scheduler"
_UPDATER = f"{_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_RUNNER = f"{_SRT}.model_executor.model_runner.ModelRunner"
_OURS = "ellm_sgl.sglang"

SEAMS: tuple[Seam, ...] = (
    *SERVING,
    Seam(
        f"{_SRT}.utils.common.support_triton",
        "AROUND",
        f"{_OURS}.platform.attention:no_triton",
        When.PLATFORM,
        "the CPU platform's attention backend has a name SGLang does not know",
    ),
    Seam(
        f"{_ALLOC}.get_last_loc",
        "AROUND",
        f"{_OURS}.platform.attention:last_locations",
        When.PLATFORM,
        "same: it has a list of its own",
    ),
    Seam(
        f"{_POOLS}._resolve_memory_pool_config",
        "AFTER",
        f"{_OURS}.memory:widen_logical_capacity",
        When.ENABLED,
        "SGLang hands out more token slots than the device holds",
    ),
    Seam(
        f"{_POOLS}._build_token_to_kv_pool",
        "AROUND",
        f"{_OURS}.memory:build_pool",
        When.ENABLED,
        "the token- and layer-aware pool in place of SGLang's",
    ),
    Seam(
        f"{_POOLS}._build_token_to_kv_pool_allocator",
        "AROUND",
        f"{_OURS}.memory:build_allocator",
        When.ENABLED,
        "slots backed by the page table",
    ),
    Seam(
        f"{_ALLOC}.alloc_for_extend",
        "AFTER",
        f"{_OURS}.decode_memory:map_extended",
        When.ENABLED,
        "the page table learns which request owns which block",
    ),
    Seam(
        f"{_ALLOC}.alloc_for_decode",
        "AFTER",
        f"{_OURS}.decode_memory:map_decoded",
        When.ENABLED,
        "same, for the token each request is about to decode",
    ),
    Seam(
        f"{_BATCH}.check_decode_mem",
        "AROUND",
        f"{_OURS}.decode_memory:check_decode_memory",
        When.ENABLED,
        "evict blocks where SGLang would retract a request",
    ),
    Seam(
        f"{_BATCH}.retract_decode",
        "AFTER",
        f"{_OURS}.decode_memory:count_retractions",
        When.ENABLED,
        "retractions_total",
    ),
    Seam(
        f"{_BATCH}.prepare_for_decode",
        "BEFORE",
        f"{_OURS}.decode_memory:prepare_decode",
        When.ENABLED,
        "who sits the step out, and everybody's ratio; once per step, also of mixed ones",
    ),
    Seam(
        f"{_ADDER}.__init__",
        "AFTER",
        f"{_OURS}.admission:limit_admission",
        When.ENABLED,
        "admission counts device memory, not logical slots",
    ),
    Seam(
        f"{_ADDER}.add_one_req",
        "AROUND",
        f"{_OURS}.admission:admit",
        When.ENABLED,
        "the policy says who joins; a request larger than the device joins when it is alone",
    ),
    Seam(
        f"{_ADDER}.add_chunked_req",
        "AROUND",
        f"{_OURS}.admission:continue_chunked",
        When.ENABLED,
        "its later chunks are not limited by device memory either",
    ),
    Seam(
        f"{_SCHEDULER}.__init__",
        "AFTER",
        f"{_OURS}.start:start_loop",
        When.ENABLED,
        "calibrate the machine and start the closed loop, before the first request",
    ),
    Seam(
        f"{_SCHEDULER}.__init__",
        "AROUND",
        f"{_OURS}.start:end_in_a_sentence",
        When.ENABLED,
        "a setting that turns out to make no sense ends the server with one line; stands around "
        "`start_loop`, since it comes after it",
    ),
    Seam(
        f"{_SCHEDULER}.handle_generate_request",
        "AROUND",
        f"{_OURS}.requests:take_request",
        When.ENABLED,
        "the same look for requests that were tokenized in a process without our hooks",
    ),
    Seam(
        f"{_SCHEDULER}.get_new_batch_prefill",
        "BEFORE",
        f"{_OURS}.scheduler:decide",
        When.ENABLED,
        "ask the policy, once per iteration",
    ),
    Seam(
        f"{_SRT}.managers.schedule_policy.SchedulePolicy.calc_priority",
        "AFTER",
        f"{_OURS}.scheduler:order_waiting",
        When.ENABLED,
        "requests that the policy lets join come first",
    ),
    Seam(
        f"{_SCHEDULER}.process_input_requests",
        "BEFORE",
        f"{_OURS}.scheduler:resume_paused",
        When.ENABLED,
        "paused requests are back before anybody may abort or count them",
    ),
    Seam(
        f"{_SRT}.managers.scheduler_components.invariant_checker"
        ".SchedulerInvariantChecker.self_check_during_busy",
        "BEFORE",
        f"{_OURS}.scheduler:resume_paused",
        When.ENABLED,
        "SGLang's own memory check counts every running request",
    ),
    Seam(
        f"{_SCHEDULER}.pause_generation",
        "AROUND",
        f"{_OURS}.weights:pause",
        When.ENABLED,
        "requests go back to the queue here too, and the pause is no step's time",
    ),
    *(
        Seam(
            f"{_UPDATER}.update_weights_from_{source}",
            "AROUND",
            f"{_OURS}.weights:update",
            When.ENABLED,
            "KV of the old weights must not be completed with KV of the new",
        )
        for source in ("disk", "tensor", "distributed", "ipc")
    ),
    Seam(
        f"{_UPDATER}.check_weights",
        "AROUND",
        f"{_OURS}.weights:check",
        When.ENABLED,
        "one of its actions overwrites the weights",
    ),
    Seam(
        f"{_UPDATER}.flush_cache_after_weight_update",
        "AROUND",
        f"{_OURS}.weights:flush",
        When.ENABLED,
        "its assertion ends the scheduler while retracted requests wait",
    ),
    Seam(
        f"{_SRT}.model_executor.forward_batch_info.ForwardBatch.init_new",
        "AFTER",
        f"{_OURS}.model:note_requests",
        When.ENABLED,
        "whose rows a step has, from the host's copy of the indices",
    ),
    Seam(
        f"{_SRT}.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
        ".can_run_graph",
        "AROUND",
        f"{_OURS}.cuda:may_replay",
        When.ENABLED,
        "CUDA graphs only for decode steps with nothing missing",
    ),
    Seam(
        f"{_SRT}.models.utils.enable_fused_set_kv_buffer",
        "AROUND",
        f"{_OURS}.cuda:keep_writes",
        When.ENABLED,
        "on CUDA some models would write KV by slot, past the attention backend",
    ),
    Seam(
        f"{_RUNNER}.forward",
        "AROUND",
        f"{_OURS}.model:run_step",
        When.ENABLED,
        "plan the step, and take its span rows through the model",
    ),
    Seam(
        f"{_SCHEDULER}.get_internal_state",
        "AFTER",
        f"{_OURS}.state:report",
        When.ENABLED,
        "eLLM's state, through SGLang's own channel between processes",
    ),
    Seam(
        f"{_SCHEDULER}.set_internal_state",
        "AROUND",
        f"{_OURS}.state:adjust",
        When.ENABLED,
        "change ratio and pool size of a running server",
    ),
    Seam(
        f"{_SCHEDULER}.handle_dumper_control",
        "AROUND",
        f"{_OURS}.state:control",
        When.ENABLED,
        "ask for state and steps, switch policies: the one request that carries names and JSON",
    ),
)


def moved_seams() -> list[str]:
    """Targets that the installed SGLang does not have. Imports the parts of SGLang named."""
    missing = []
    for seam in SEAMS:
        try:
            pkgutil.resolve_name(seam.target)
        except (ImportError, AttributeError):
            missing.append(seam.target)
    return missing
