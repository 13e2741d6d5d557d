"""SGLang's scheduler without its processes: its own loops, queues, batches and results, over the
memory plane of one rank. What is not SGLang's own here is named where it stands.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    SetInternalStateReq,
)
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.scheduler_components.flush_wrapper import SchedulerFlushWrapper
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_server_args
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from ellm_sgl.sglang import model as step_hooks
from tests.simulation import accounting
from tests.simulation.configuration import VOCABULARY
from tests.simulation.model import ForwardPass
from tests.simulation.plane import Plane
from tests.simulation.stamps import END, Transcript

Receive = Callable[[], list[Any]]
"""What the loop is told at its top: what `SchedulerRequestReceiver.recv_requests` gives."""


class Nothing:
    """Stands for what only reports: every method does nothing, every counter counts."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class SimulatedScheduler(Scheduler):
    """A `Scheduler` of which only the parts exist that move requests and memory.

    Args:
        plane: memory.
        receive: called at the top of each turn.
        rank: of `ranks`.
    """

    def __init__(self, plane: Plane, receive: Receive, rank: int) -> None:
        configuration = plane.configuration
        self.plane = plane
        self.transcripts: dict[str, Transcript] = {}
        """Of the requests that have arrived, by `rid`."""
        self.reqs: dict[str, Req] = {}
        self.observer: Any = Nothing()
        """Is told of each step before it runs."""
        self._init_components(receive, rank)
        self._init_settings()
        # init_running_status
        self.waiting_queue: list[Req] = []
        self.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        self.deciding = self.running_batch
        """Who decodes, as the turn's decision finds it."""
        self.last_batch: ScheduleBatch | None = None
        self.cur_batch_for_debug = None
        self.forward_ct = 0
        self.gracefully_exit = False
        self._engine_paused = False
        # init_chunked_prefill
        self.chunked_prefill_size = configuration.chunk
        self.is_mixed_chunk = configuration.mixed
        self.chunked_req = None
        self._pending_chunked_abort_req = None
        # init_schedule_policy
        self.policy = SchedulePolicy("fcfs", self.tree_cache, False, False, False)
        self.new_token_ratio_tracker = NewTokenRatioTracker.from_server_args(
            SimpleNamespace(schedule_conservativeness=configuration.conservativeness)
        )
        self.flush_wrapper = SchedulerFlushWrapper(
            flush_cache=lambda: self.flush_cache(empty_cache=False),  # collects no garbage
            is_fully_idle=self.is_fully_idle,
            ipc_channels=self.ipc_channels,
        )
        self._init_results()

    def _init_components(self, receive: Receive, rank: int) -> None:
        plane, ranks = self.plane, self.plane.configuration.ranks
        self.server_args = get_server_args()
        self.model_config = SimpleNamespace(
            vocab_size=VOCABULARY,
            is_encoder_decoder=False,
            is_multimodal=False,
            hf_eos_token_id={END},
            think_end_ids=None,
        )
        self.req_to_token_pool = plane.req_to_token_pool
        self.token_to_kv_pool_allocator = plane.allocator
        self.tree_cache = plane.tree
        self.ps = ParallelState.trivial(tp_rank=rank, tp_size=ranks)
        self.tp_group = SimpleNamespace(rank=rank, ranks=list(range(ranks)), cpu_group=None)
        self.request_receiver = SimpleNamespace(recv_requests=receive)
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=Nothing(), recv_from_rpc=None)
        self.session_controller = Nothing(sessions={})
        self.grammar_manager = Nothing(grammar_queue=[])
        self.metrics_reporter = Nothing(
            num_generated_tokens=0,
            forward_ct_decode=0,
            enable_metrics=False,
            current_scheduler_metrics_enabled=False,
            is_stats_logging_rank=False,
        )
        self.kv_events_publisher = Nothing()
        self.output_streamer = Nothing()
        self.load_inquirer = SimpleNamespace(_get_num_pending_tokens=lambda chunk_deduct: 0)
        first: Callable[..., Any] = lambda batch, **_: batch  # noqa: E731
        self.dp_attn_adapter = SimpleNamespace(maybe_prepare_mlp_sync_batch=first)
        self.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=first)
        runner = SimpleNamespace(prefill_aware_swa=False)
        self.tp_worker = self.model_worker = SimpleNamespace(model_runner=runner)

    def _init_settings(self) -> None:
        configuration = self.plane.configuration
        self.enable_overlap = configuration.overlap
        self.page_size = configuration.block_tokens
        self.max_running_requests = configuration.max_running
        self.max_prefill_tokens = configuration.max_prefill
        self.max_total_num_tokens = self.plane.logical_tokens
        self.max_req_len = configuration.context - 1
        self.max_new_tokens_limit = None
        self.max_prefill_bs = 0.0
        self.is_generation = True
        self.schedule_low_priority_values_first = False
        self.priority_scheduling_preemption_threshold = 0
        self.spec_algorithm = SpeculativeAlgorithm.NONE
        self.disaggregation_mode = DisaggregationMode.NULL
        self.result_queue: Any = deque()
        self.return_health_check_ipcs: Any = deque()
        self.dllm_manager = SimpleNamespace(any_staging_reqs=lambda: False)
        for name in (
            "dllm_config",
            "draft_worker",
            "external_corpus_manager",
            "hisparse_coordinator",
            "decode_offload_manager",
            "metrics_collector",
            "min_free_slots_delayer",
            "prefill_delayer",
            "rust_server",
            "truncation_align_size",
        ):
            setattr(self, name, None)
        for name in (
            "abort_on_priority_when_disabled",
            "enable_dynamic_chunking",
            "enable_fpm",
            "enable_hicache_storage",
            "enable_hierarchical_cache",
            "enable_hisparse",
            "enable_lora",
            "enable_overlap_mlx",
            "enable_priority_preemption",
            "enable_priority_scheduling",
            "enable_unified_memory",
            "is_hybrid_swa",
            "require_mlp_sync",
            "_war_barrier_enabled",
        ):
            setattr(self, name, False)
        self.max_queued_requests = None

    def _init_results(self) -> None:
        self.batch_result_processor = SchedulerBatchResultProcessor(
            is_generation=True,
            disaggregation_mode=self.disaggregation_mode,
            enable_overlap=self.enable_overlap,
            enable_overlap_mlx=False,
            server_args=self.server_args,
            model_config=self.model_config,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            tree_cache=self.tree_cache,
            hisparse_coordinator=None,
            req_to_token_pool=self.req_to_token_pool,
            decode_offload_manager=None,
            metrics_collector=None,
            metrics_reporter=self.metrics_reporter,
            draft_worker=None,
            model_worker=self.model_worker,
            logprob_result_processor=None,
            output_streamer=self.output_streamer,
            abort_request=self.abort_request,
        )

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> Any:
        """Notes who decodes. SGLang's, and ours around it."""
        self.deciding = running_batch
        return super().get_new_batch_prefill(running_batch)

    # -- instead of SGLang's ----------------------------------------------------------------

    def get_num_allocatable_reqs(self, running_bs: int) -> int:
        """Without pipeline stages."""
        return min(self.max_running_requests - running_bs, self.req_to_token_pool.available_size())

    def _request_dispatcher(self, request: Any) -> None:
        """As `init_request_dispatcher` maps kinds of requests to methods."""
        if isinstance(request, Req):  # handle_generate_request, with the `Req` made already
            self.init_req_max_new_tokens(request)
            self._add_request_to_queue(request)
        elif isinstance(request, AbortReq):
            self.abort_request(request)
        elif isinstance(request, FlushCacheReqInput):
            self.flush_wrapper.handle(request)
        elif isinstance(request, PauseGenerationReqInput):
            self.pause_generation(request)
        elif isinstance(request, ContinueGenerationReqInput):
            self.continue_generation(request)
        else:
            assert isinstance(request, SetInternalStateReq), request
            self.set_internal_state(request)

    def run_batch(self, batch: ScheduleBatch, pp_proxy_tensors: Any = None) -> Any:
        """`Scheduler.run_batch` and below it `ModelRunner.forward`, on the stamp model."""
        self.observer.step(batch)
        self.forward_ct += 1
        batch.forward_iter = self.forward_ct
        forward_batch: Any = SimpleNamespace(
            forward_mode=batch.forward_mode,
            extend_seq_lens_cpu=batch.extend_lens,
            batch_size=len(batch.reqs),
            return_logprob=False,
        )
        step_hooks.note_requests(forward_batch, type(batch), batch)
        step_hooks.run_step(lambda *_: self._forward(batch), self.plane.runner, forward_batch)
        batch.input_ids = batch.prefill_input_ids_cpu = batch.mix_running_indices = None
        tokens = [
            self.transcripts[req.rid].next_token(length)
            for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)
        ]
        done = None
        if self.plane.device is not None:
            done = self.plane.device.Event()
            done.record()
        return GenerationBatchResult(next_token_ids=torch.tensor(tokens), copy_done=done)

    def _forward(self, batch: ScheduleBatch) -> None:
        plan = self.plane.context.executor.plan
        assert plan is not None
        transcripts = [self.transcripts[req.rid] for req in batch.reqs]
        prefilled = batch.prefill_input_ids_cpu
        tokens = [] if prefilled is None else prefilled.tolist()
        positions: list[int] = []
        for transcript, request in zip(transcripts, plan.groups[0].requests, strict=True):
            new = request.new
            positions += range(new.position, new.end_position)
            if len(tokens) < len(positions):  # the future map's: sampled by the step before
                tokens += transcript.tokens[new.position : new.end_position]
        accounting.check_positions(plan, batch)
        accounting.check_rows(self.plane, plan, batch)
        self.plane.poison()
        step = ForwardPass(self.plane, plan, transcripts)
        decoder = self.plane.runner.model.model
        decoder(torch.tensor(tokens), torch.tensor(positions), step)

    def publish_load_snapshot(self, force: bool = False) -> None:
        pass

    def _record_step_counters(self, batch: ScheduleBatch, result: Any) -> None:
        pass

    def maybe_sleep_on_idle(self) -> None:
        """Nobody waits for the clock here."""

    def on_idle(self) -> None:
        """SGLang checks its pools here; `accounting` does, always."""
        if self.is_fully_idle():
            self.new_token_ratio_tracker.reset()

    # -- requests ---------------------------------------------------------------------------

    def request(self, rid: str, prompt: list[int], output: int, name: int, salt: int) -> Req:
        """A request that the tokenizer's process sends."""
        sampling = SamplingParams(max_new_tokens=output, stop_token_ids={END})
        sampling.normalize(None)
        req = Req(
            rid=rid,
            origin_input_text="",
            origin_input_ids=array("q", prompt),
            sampling_params=sampling,
            eos_token_ids={END},
            vocab_size=VOCABULARY,
            priority=name,
        )
        self.transcripts[rid] = Transcript(prompt, salt)
        self.reqs[rid] = req
        return req
