"""Every place where eLLM touches SGLang, in one table.

Each entry names the SGLang function, how it is hooked, and why. `tests/sglang/test_seams.py`
fails when one of them moves, and a server refuses to start when one cannot be applied. Beside
these, eLLM subclasses SGLang's base classes (`KVCache`, `BaseTokenToKVPoolAllocator`,
`RadixCache`, `ChunkCache`, `AttentionBackend`, `TorchNativeAttnBackend`, `SRTPlatform`) and
registers by name a radix cache backend and attention backends.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from enum import Enum

SGLANG_VERSIONS = ("0.5.17",)
"""Those that the tests have run with. With another one eLLM does not start: a seam may be where
it was and mean something else, and outputs that are wrong are worse than none. (Seen: 0.5.20 has
every seam, but its prefix cache counts what eLLM's tree holds as a leak.)"""


class When(Enum):
    """In which processes a hook is installed."""

    MAIN = "main"
    """In the process that parses the arguments and serves HTTP; inert unless eLLM is enabled."""
    PLATFORM = "platform"
    """Everywhere, on hosts where the CPU platform is offered."""
    ENABLED = "enabled"
    """Everywhere, but only where eLLM is enabled."""


@dataclass(frozen=True)
class Seam:
    """One hook on SGLang."""

    target: str
    """Dotted path of the SGLang function."""
    kind: str
    """`HookType` by name: BEFORE, AFTER or AROUND."""
    hook: str
    """Ours, as "module:function"."""
    when: When
    reason: str


_SRT = "sglang.srt"
_ARGS = f"{_SRT}.server_args.ServerArgs"
_POOLS = f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_ALLOC = f"{_SRT}.mem_cache.allocation"
_BATCH = f"{_SRT}.managers.schedule_batch.ScheduleBatch"
_ADDER = f"{_SRT}.managers.schedule_policy.PrefillAdder"
_SCHEDULER = f"{_SRT}.managers.scheduler.Scheduler"
_RUNNER = f"{_SRT}.model_executor.model_runner.ModelRunner"
_OURS = "ellm_sgl.sglang"

SEAMS: tuple[Seam, ...] = (
    Seam(
        f"{_ARGS}.add_cli_args",
        "AFTER",
        f"{_OURS}.server_args:add_flags",
        When.MAIN,
        "the --ellm-* flags, also for plain sglang.launch_server",
    ),
    Seam(
        f"{_ARGS}.from_cli_args",
        "AROUND",
        f"{_OURS}.server_args:read_flags",
        When.MAIN,
        "turn the flags into settings before SGLang checks its own arguments",
    ),
    Seam(
        f"{_ARGS}.__post_init__",
        "AROUND",
        f"{_OURS}.server_args:check_arguments",
        When.MAIN,
        "page size = block size, our prefix cache; refuse what is not supported",
    ),
    Seam(
        f"{_SRT}.entrypoints.http_server.launch_server",
        "BEFORE",
        f"{_OURS}.http:add_routes",
        When.MAIN,
        "GET /ellm/state",
    ),
    Seam(
        f"{_SRT}.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        "BEFORE",
        f"{_OURS}.http:check_request",
        When.MAIN,
        "refuse what eLLM cannot serve, and token ids that would end the server",
    ),
    Seam(
        f"{_SRT}.utils.common.support_triton",
        "AROUND",
        f"{_OURS}.cpu_attention:no_triton",
        When.PLATFORM,
        "the CPU platform's attention backend has a name SGLang does not know",
    ),
    Seam(
        f"{_ALLOC}.get_last_loc",
        "AROUND",
        f"{_OURS}.cpu_attention:last_locations",
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
        f"{_OURS}.scheduling:map_extended",
        When.ENABLED,
        "the page table learns which request owns which block",
    ),
    Seam(
        f"{_ALLOC}.alloc_for_decode",
        "AFTER",
        f"{_OURS}.scheduling:map_decoded",
        When.ENABLED,
        "same, for the token each request is about to decode",
    ),
    Seam(
        f"{_BATCH}.check_decode_mem",
        "AROUND",
        f"{_OURS}.scheduling:check_decode_memory",
        When.ENABLED,
        "evict blocks where SGLang would retract a request",
    ),
    Seam(
        f"{_BATCH}.retract_decode",
        "AFTER",
        f"{_OURS}.scheduling:count_retractions",
        When.ENABLED,
        "retractions_total",
    ),
    Seam(
        f"{_BATCH}.prepare_for_decode",
        "BEFORE",
        f"{_OURS}.scheduling:apply_targets",
        When.ENABLED,
        "bring running requests to the policy's ratio, once per step",
    ),
    Seam(
        f"{_ADDER}.__init__",
        "AFTER",
        f"{_OURS}.scheduling:limit_admission",
        When.ENABLED,
        "admission counts device memory, not logical slots",
    ),
    Seam(
        f"{_ADDER}.add_one_req",
        "AROUND",
        f"{_OURS}.scheduling:admit",
        When.ENABLED,
        "the policy says who joins; a request larger than the device joins when it is alone",
    ),
    Seam(
        f"{_ADDER}.add_chunked_req",
        "AROUND",
        f"{_OURS}.scheduling:continue_chunked",
        When.ENABLED,
        "its later chunks are not limited by device memory either",
    ),
    Seam(
        f"{_SCHEDULER}.__init__",
        "AFTER",
        f"{_OURS}.starting:start_loop",
        When.ENABLED,
        "calibrate the machine and start the closed loop, before the first request",
    ),
    Seam(
        f"{_SCHEDULER}.get_new_batch_prefill",
        "BEFORE",
        f"{_OURS}.deciding:decide",
        When.ENABLED,
        "ask the policy, once per iteration",
    ),
    Seam(
        f"{_SRT}.managers.schedule_policy.SchedulePolicy.calc_priority",
        "AFTER",
        f"{_OURS}.deciding:order_waiting",
        When.ENABLED,
        "requests that the policy lets join come first",
    ),
    Seam(
        f"{_SCHEDULER}.update_running_batch",
        "AROUND",
        f"{_OURS}.deciding:step_out",
        When.ENABLED,
        "requests that the policy pauses sit out this step",
    ),
    Seam(
        f"{_SCHEDULER}.process_input_requests",
        "BEFORE",
        f"{_OURS}.deciding:rejoin",
        When.ENABLED,
        "paused requests are back before anybody may abort or count them",
    ),
    Seam(
        f"{_SRT}.managers.scheduler_components.invariant_checker"
        ".SchedulerInvariantChecker.self_check_during_busy",
        "BEFORE",
        f"{_OURS}.deciding:rejoin",
        When.ENABLED,
        "SGLang's own memory check counts every running request",
    ),
    Seam(
        f"{_SRT}.model_executor.forward_batch_info.ForwardBatch.init_new",
        "AFTER",
        f"{_OURS}.forwarding:note_requests",
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
        f"{_OURS}.forwarding:run_step",
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
