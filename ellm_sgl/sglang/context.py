"""What eLLM has in one scheduler process, and how hooks find it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ellm_sgl.config import EllmConfig
from ellm_sgl.engine import Iteration
from ellm_sgl.latency import HardwareProfile
from ellm_sgl.memory import ElasticMemory, KVPool, PageTable
from ellm_sgl.memory.eviction import Save
from ellm_sgl.memory.host_tier import Has
from ellm_sgl.sglang.known_tokens import ids_of
from ellm_sgl.sglang.projections import Projections
from ellm_sgl.sglang.sizing import Sizing
from ellm_sgl.sglang.step_memory import StepMemory
from ellm_sgl.sglang.versions import adapter
from ellm_sgl.step import AnyStreamer, Executor, HiddenStates, Planner

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

    from ellm_sgl.sglang.kv_store import StoredPrefixes


class Compiled(Protocol):
    """`compiled_layers.CompiledLayers`, as far as others ask it."""

    steps: int
    """That have run so."""

    def aside(self) -> AbstractContextManager[None]: ...


class Context:
    """One per scheduler process. A request's `seq_id` is its row in SGLang's `req_to_token`.

    Args:
        max_restored: most tokens that a step can recompute.
        slots: layer groups whose fetched units a step holds at once.
        streamer: fetches units from the host tier; None without one.
        hidden: keeps hidden states on the host; None where it keeps only KV.
        ranks: of this server.
    """

    def __init__(
        self,
        settings: EllmConfig,
        table: PageTable,
        pool: KVPool,
        max_restored: int,
        slots: int = 2,
        streamer: AnyStreamer | None = None,
        hidden: HiddenStates | None = None,
        ranks: int = 1,
    ) -> None:
        self.settings = settings
        self.table = table
        self.pool = pool
        save: Save | None = None if streamer is None else streamer.save
        self.elastic = ElasticMemory(table, max_restored, self.reclaim_memory, save, slots)
        table.host.make_way = self._drop_idle_copies
        self.planner = Planner(
            self.elastic, self.token_ids, pool.buffer.device, captures=hidden is not None
        )
        self.executor = Executor(table, streamer, hidden, settings.fusion, adapter().through_layers)
        self.prefix_cache: BasePrefixCache | None = None
        self.iteration: Iteration | None = None
        """The loop, once SGLang's scheduler exists,"""
        self.scheduler: object = None
        """and what drives it (`scheduler.scheduler_of`)."""
        self.compiled: Compiled | None = None
        """Has steps of few rows go through all layers in one call, where it can."""
        self.sizing: Sizing | None = None
        """Where others have a say in the pool's size."""
        kept = 0 if streamer is None else (table.host.kv_units + 1) * pool.unit_bytes
        states = 0 if hidden is None else hidden.nbytes
        self.memory = StepMemory(
            table,
            pool,
            self.elastic.room,
            kept,
            states,
            kept * (settings.host_path is not None) + states * settings.hidden_in_file,
            ranks,
        )
        self.stored: StoredPrefixes | None = None
        """Prefixes on disk, where there is a store."""
        self.may_evict = True
        """Whether blocks that a step begins may take the place of others: not those of prompts,
        while requests decode."""
        self.hardware: HardwareProfile | None = None
        """As calibrated at start-up."""
        self.policy_name = settings.policy
        self._requests: dict[int, Req] = {}

    # -- requests ---------------------------------------------------------------------------

    def map_request(self, req: Req, req_to_token: torch.Tensor, length: int) -> None:
        """Take note of a request's blocks. `req_to_token`: SGLang's, slots in token order."""
        seq_id, block_tokens = row_of(req), self.table.shape.block_tokens
        slots = req_to_token[seq_id, :length:block_tokens].cpu().numpy()
        self.table.map(seq_id, slots // block_tokens, length)
        self._requests[seq_id] = req

    def forget_request(self, req: Req) -> None:
        """A request leaves its row (finished, aborted or retracted)."""
        self._requests.pop(row_of(req), None)
        self.elastic.forget(row_of(req))

    def token_ids(self, seq_id: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """Token ids of positions [start, end) of a request; all of them are known."""
        req = self._requests[seq_id]
        ids = ids_of(req, start, end)
        if len(ids) != end - start:
            raise RuntimeError(
                f"request {req.rid}: tokens {start}..{end} asked for, {len(ids)} known"
            )
        return ids

    # -- model and memory -------------------------------------------------------------------

    def attach(self, decoder: nn.Module) -> None:
        """Run steps on this decoder stack from now on; once."""
        if self.executor.attached:
            return
        self.executor.attach(decoder)
        if (hidden := self.executor.hidden) is not None:
            projections = Projections(decoder, hidden.num_layers)
            hidden.attach(projections.inputs, projections)

    def reclaim(self, tokens: int) -> int:
        """Free about `tokens` slots of cached prefixes that nobody uses."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        if self.prefix_cache is None:
            return 0
        evicted: Any = self.prefix_cache.evict(EvictParams(num_tokens=tokens))
        return int(evicted.num_tokens_evicted)

    def reclaim_memory(self, tokens: int) -> int:
        """Free device memory of about `tokens` tokens, of cached prefixes that nobody uses; what
        only the host has of them stays. Returns tokens freed."""
        table, cache = self.table, self.prefix_cache
        if cache is None or not cache.evictable_size() or not table.any_idle_unit():
            return 0
        before = table.used_units
        most = before - table.shape.blocks_for(tokens) * table.shape.num_groups
        cache.drop_idle(table.holds_units, lambda: table.used_units <= most)
        return table.shape.tokens_in(before - table.used_units)

    def _drop_idle_copies(self, has: Has, enough: Callable[[], bool]) -> None:
        """`HostTier.make_way`: drop cached prefixes that nobody uses and only the host has."""
        table, cache = self.table, self.prefix_cache
        if cache is not None and cache.evictable_size() and table.idle_missing_units():
            cache.drop_idle(lambda blocks: table.misses_units(blocks) & has(blocks), enough)


def context_of(owner: Any) -> Context:
    """The context of the process that `owner` lives in: anything of SGLang's that holds its KV
    allocator (scheduler, batch, prefill adder, model runner, prefix cache, ...)."""
    context: Context = owner.token_to_kv_pool_allocator.ellm
    return context


def rows_of(reqs: Sequence[Req]) -> list[int]:
    """Their rows in `req_to_token`: what identifies them as sequences."""
    return adapter().rows(reqs)


def row_of(req: Req) -> int:
    """A request's row; it has KV."""
    row: int = adapter().kv(req).req_pool_idx
    return row
