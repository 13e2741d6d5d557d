"""What eLLM keeps in one scheduler process: pool, page table, elastic memory, the step's plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ellm_sgl.config import EllmConfig
from ellm_sgl.control import ElasticMemory
from ellm_sgl.forward import NewTokens, StepPlan, plan_step
from ellm_sgl.kv import KVPool, PageTable

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache


class Runtime:
    """One per scheduler process. A request's `seq_id` is its row in SGLang's `req_to_token`."""

    def __init__(
        self, config: EllmConfig, table: PageTable, pool: KVPool, elastic: ElasticMemory
    ) -> None:
        self.config = config
        self.table = table
        self.pool = pool
        self.elastic = elastic
        self.prefix_cache: BasePrefixCache | None = None
        self.plan: StepPlan | None = None
        """The step being computed; None between steps."""
        self._requests: dict[int, Req] = {}

    # -- requests ---------------------------------------------------------------------------

    def map_request(self, req: Req, row: npt.NDArray[np.int32], length: int) -> None:
        """Take note of a request's blocks. `row`: its slots in token order, at least `length`."""
        seq_id = _seq_id(req)
        block_tokens = self.table.shape.block_tokens
        self.table.map(seq_id, row[:length:block_tokens] // block_tokens, length)
        self._requests[seq_id] = req

    def forget_request(self, req: Req) -> None:
        """A request leaves its row (finished, aborted or retracted)."""
        seq_id = _seq_id(req)
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

    # -- steps ------------------------------------------------------------------------------

    def plan_decode(self, seq_ids: Sequence[int]) -> StepPlan:
        """Plan one more token for each request, restoring blocks where there is room."""
        lengths = [self.table.length_of(s) for s in seq_ids]
        new = [NewTokens(s, n - 1, n) for s, n in zip(seq_ids, lengths, strict=True)]
        return self._plan(new, restore=True)

    def plan_extend(self, seq_ids: Sequence[int], counts: Sequence[int]) -> StepPlan:
        """Plan the last `counts` tokens of each request (a prompt, or a chunk of one)."""
        lengths = [self.table.length_of(s) for s in seq_ids]
        new = [NewTokens(s, n - c, n) for s, n, c in zip(seq_ids, lengths, counts, strict=True)]
        return self._plan(new, restore=False)

    def _plan(self, new: list[NewTokens], restore: bool) -> StepPlan:
        table = self.table
        depths = [table.depth(table.blocks_of(n.seq_id)) for n in new]
        if restore:
            self.elastic.restore([n.seq_id for n in new])
        plan = plan_step(table, new, depths, self.token_ids, self.pool.buffer.device)
        self.elastic.totals.recomputed_tokens += plan.span_rows
        return plan

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


def _seq_id(req: Req) -> int:
    return int(req.req_pool_idx)
