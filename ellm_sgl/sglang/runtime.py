"""What eLLM keeps in one scheduler process: pool, page table, elastic memory, the step's plan."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ellm_sgl.config import EllmConfig
from ellm_sgl.latency import HardwareProfile
from ellm_sgl.memory import ElasticMemory, KVPool, PageTable
from ellm_sgl.policies import Threads
from ellm_sgl.policies.work_split import ALL_THREADS
from ellm_sgl.sglang.projections import Projections
from ellm_sgl.step import (
    AnyStreamer,
    Capture,
    GroupTransfer,
    HiddenStates,
    Missing,
    MixedRows,
    NativeStreamer,
    NewTokens,
    Restoration,
    SeparateRows,
    StepPlan,
    Streamer,
    plan_capture,
    plan_restoration,
    plan_step,
)

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.model_executor.model_runner import ModelRunner

    from ellm_sgl.sglang.deciding import Deciding


class Runtime:
    """One per scheduler process. A request's `seq_id` is its row in SGLang's `req_to_token`."""

    def __init__(
        self,
        config: EllmConfig,
        table: PageTable,
        pool: KVPool,
        elastic: ElasticMemory,
        streamer: AnyStreamer | None,
        hidden: HiddenStates | None = None,
    ) -> None:
        self.config = config
        self.table = table
        self.pool = pool
        self.elastic = elastic
        self.streamer = streamer
        """Fetches units from the host tier; None without one."""
        self.hidden = hidden
        """Keeps hidden states on the host; None where it keeps only KV."""
        self.prefix_cache: BasePrefixCache | None = None
        self.deciding: Deciding | None = None
        """Set once the scheduler exists."""
        self.hardware: HardwareProfile | None = None
        """As calibrated at start-up."""
        self.policy_name = config.policy
        self.threads: Threads | None = None
        """How the policy divides the next step."""
        self.plan: StepPlan | None = None
        """The step being computed; None between steps."""
        self._requests: dict[int, Req] = {}
        self.separate: SeparateRows | None = None
        """Recomputes in a pass of its own, where fusion is off."""
        self._rows: MixedRows | SeparateRows | None = None
        self._restoration: Restoration | None = None
        self._ahead: GroupTransfer | None = None
        """What the step fetches for a later one."""
        self._keeping_books = False
        self._capture: Capture | None = None

    # -- requests ---------------------------------------------------------------------------

    def map_request(self, req: Req, row: npt.NDArray[np.int32], length: int) -> None:
        """Take note of a request's blocks. `row`: its slots in token order, at least `length`."""
        seq_id = row_of(req)
        block_tokens = self.table.shape.block_tokens
        self.table.map(seq_id, row[:length:block_tokens] // block_tokens, length)
        self._requests[seq_id] = req

    def forget_request(self, req: Req) -> None:
        """A request leaves its row (finished, aborted or retracted)."""
        seq_id = row_of(req)
        self._requests.pop(seq_id, None)
        self.elastic.forget(seq_id)

    def token_ids(self, seq_id: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """Token ids of positions [start, end) of a request; all of them are known."""
        req = self._requests[seq_id]
        prompt = len(req.origin_input_ids)
        ids = np.concatenate(
            [
                np.asarray(req.origin_input_ids[start:end], np.int64),
                np.asarray(req.output_ids[max(start - prompt, 0) : max(end - prompt, 0)], np.int64),
            ]
        )
        if len(ids) != end - start:
            raise RuntimeError(
                f"request {req.rid}: tokens {start}..{end} asked for, {len(ids)} known"
            )
        return ids

    @contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Counts the time of the work in this context; within another such context, once."""
        if self._keeping_books:
            yield
            return
        self._keeping_books, began = True, time.perf_counter()
        try:
            yield
        finally:
            self._keeping_books = False
            self.elastic.totals.page_table_s += time.perf_counter() - began

    # -- steps ------------------------------------------------------------------------------

    def plan_decode(self, seq_ids: Sequence[int]) -> StepPlan:
        """Plan one more token for each request, restoring blocks where there is room; and fetch
        what requests that sit the step out will need when they come back."""
        new = [NewTokens(s, n - 1, n) for s in seq_ids for n in (self.table.length_of(s),)]
        with self.bookkeeping():
            plan = self._plan(new, restore=True)
            self.table.note_computed(seq_ids, [1] * len(new))
            self._ahead = self._fetch_ahead(len(new))
        return plan

    def plan_extend(self, seq_ids: Sequence[int], counts: Sequence[int]) -> StepPlan:
        """Plan the last `counts` tokens of each request (a prompt, or a chunk of one)."""
        lengths = self.table.lengths_of(seq_ids).tolist()
        new = [NewTokens(s, n - c, n) for s, n, c in zip(seq_ids, lengths, counts, strict=True)]
        with self.bookkeeping():
            plan = self._plan(new, restore=False)
            self.table.note_computed(seq_ids, counts)
        return plan

    def _plan(self, new: list[NewTokens], restore: bool) -> StepPlan:
        table, seq_ids = self.table, [n.seq_id for n in new]
        if table.none_units:
            missing = Missing.of(table, seq_ids)
            if restore:
                self.elastic.restore(seq_ids, missing.blocks)
            self._restoration = self._plan_restoration(missing)
        plan = plan_step(table, new, self._restoration, self.token_ids, self.pool.buffer.device)
        self.elastic.totals.recomputed_tokens += plan.span_rows
        if self.hidden is not None:
            self._capture = plan_capture(table, seq_ids, plan)
        return plan

    def _plan_restoration(self, missing: Missing) -> Restoration:
        table, totals = self.table, self.elastic.totals
        planned = plan_restoration(table, missing, self._recompute_share(), self.elastic.slots)
        totals.fetched_units += planned.fetched_units
        totals.borrowed_units += len(planned.borrowed)
        totals.projected_units += planned.projected_units
        return planned

    def _fetch_ahead(self, decoding: int) -> GroupTransfer | None:
        """As much as the link brings in the time that the decision gives it."""
        if self.streamer is None or self.deciding is None or self.hardware is None:
            return None
        if self.hidden is not None:  # projected by the step that needs them
            return None
        resting = self.deciding.sitting_out()
        if not resting:
            return None
        seconds = self.deciding.fetch_ahead_s
        most = int(seconds * self.hardware.link_bytes_per_s / self.pool.unit_bytes)
        sources, targets = self.elastic.fetch_ahead(resting, decoding, most)
        if not len(sources):
            return None
        return GroupTransfer.of(sources, targets)

    def _recompute_share(self) -> float:
        """φ = l2 / (l1 + l2), as the policy answered the threads question."""
        if self.threads is None:
            return 0.0
        l1, l2 = self.threads.swap_layers, self.threads.recompute_layers
        return l2 / (l1 + l2)

    def delta(self) -> float:
        """δ as a share of the processor, 0..1, as the policy answered the threads question."""
        return 0.5 if self.threads is None else self.threads.delta / ALL_THREADS

    @contextmanager
    def running(self, runner: ModelRunner, plan: StepPlan) -> Iterator[None]:
        """The forward pass inside this context follows `plan`."""
        self.plan = plan
        ahead, self._ahead = self._ahead, None
        streamer, rows = self.streamer, self.mixed_rows(runner)
        streaming = streamer.running(plan.transfers, ahead) if streamer else nullcontext()
        capturing = self.hidden.capturing(self._capture) if self.hidden else nullcontext()
        try:
            with streaming, capturing, rows.running(plan):
                yield
        finally:
            self.plan = None
            if self._restoration is not None:
                self.table.return_units(self._restoration.borrowed)
                self._restoration = None
            if self.streamer is not None:
                self._count_stall(self.streamer.stall_s)

    def _count_stall(self, seconds: float) -> None:
        """The step under way has waited so long for units from the host tier."""
        self.elastic.totals.swap_stall_s += seconds
        if self.deciding is not None:
            self.deciding.loop.steps.stalled(seconds)

    def mixed_rows(self, runner: ModelRunner) -> MixedRows | SeparateRows:
        """The hooks on this process's model; installed when first asked for."""
        if self._rows is None:
            decoder = runner.model.model
            if self.config.fusion:
                self._rows = MixedRows(decoder, self.table.shape)
            else:
                streamer, shape = self.streamer, self.table.shape
                if isinstance(streamer, NativeStreamer | Streamer):
                    self.separate = SeparateRows(decoder, shape, streamer.restart)
                else:
                    self.separate = SeparateRows(decoder, shape)
                self._rows = self.separate
            if self.hidden is not None:
                projections = Projections(decoder, self.hidden.num_layers)
                self.hidden.attach(projections.inputs, projections)
        return self._rows

    # -- memory -----------------------------------------------------------------------------

    def reclaim(self, tokens: int) -> int:
        """Free about `tokens` tokens of cached prefixes that nobody uses."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        if self.prefix_cache is None:
            return 0
        evicted: Any = self.prefix_cache.evict(EvictParams(num_tokens=tokens))
        return int(evicted.num_tokens_evicted)


_runtime: Runtime | None = None


def install(runtime: Runtime) -> None:
    """Make `runtime` this process's; a worker process has exactly one."""
    global _runtime
    _runtime = runtime


def current() -> Runtime:
    """This process's runtime. Hooks call it only after the pool has been built."""
    assert _runtime is not None, "eLLM is enabled, but SGLang did not build its pool"
    return _runtime


def row_of(req: Req) -> int:
    """A request's row in `req_to_token`: what identifies it as a sequence."""
    holder = req if hasattr(req, "req_pool_idx") else req.kv  # in `kv` from SGLang 0.5.20 on
    return int(holder.req_pool_idx)


def rows_of(reqs: Sequence[Req]) -> list[int]:
    """`row_of` of each, for what is done in every step."""
    try:
        return [req.req_pool_idx for req in reqs]
    except AttributeError:
        return [row_of(req) for req in reqs]
