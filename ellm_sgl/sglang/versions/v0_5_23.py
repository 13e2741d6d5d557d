"""SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ellm_sgl.sglang.versions.adapter import TreeCalls
from ellm_sgl.sglang.versions.v0_5_20 import Sglang0520

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchResult
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from torch import nn

    from ellm_sgl.step.separate import Through

_TREE = "sglang.srt.mem_cache.radix_cache.RadixCache"
_CHUNKS = "sglang.srt.mem_cache.chunk_cache.ChunkCache"


class TreeCalls0523(TreeCalls):
    """`release_kv_cache` asks the tree whether it keeps the row (never), inserts, frees what the
    tree has not taken, unlocks, and says so; the same `checkpoint` is called while a request runs.
    """

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        with self.whole():
            super().checkpoint(req, up_to=up_to, **kwargs)
        if not req.finished():
            self.stays(req)

    def claim_kv_row(self, req: Req) -> bool:
        self.leaves(req)
        return super().claim_kv_row(req)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self.has_left(req, req.owned_kv_len())


class Sglang0523(Sglang0520):
    """Matches say how long, and the tree which slots; what admission counts is an object that the
    allocator makes; ranks are the process's; residuals go from layer to layer beside the batch."""

    version = "0.5.23"
    moved: ClassVar[Mapping[str, str]] = {
        **Sglang0520.moved,
        f"{_TREE}.cache_unfinished_req": f"{_TREE}.checkpoint",
        f"{_TREE}.cache_finished_req": f"{_TREE}.on_release",
        f"{_CHUNKS}.__init__": f"{_TREE}.__init__",
        f"{_CHUNKS}.cache_finished_req": f"{_TREE}.claim_kv_row",
    }
    tree_calls = TreeCalls0523
    has_chunk_cache = False

    def resolved(self, args: Any) -> Any:
        from sglang.srt.arg_groups.model_override_base import resolving_view

        return resolving_view(args)

    def ranks(self, scheduler: Scheduler) -> Any:
        from sglang.srt.runtime_context import get_parallel

        return get_parallel()

    def charged(self, adder: PrefillAdder) -> float:
        return adder.memory_budget.total_offset

    def charge(self, adder: PrefillAdder, eventual: float, present: float) -> None:
        adder.memory_budget.total_offset += eventual
        adder.memory_budget.current_offset += present

    def prefix_tokens(self, req: Req) -> int:
        return req.prefix_len

    def release(self, req: Req, tree: BasePrefixCache) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(req, tree, checkpoint=True)

    @property
    def through_layers(self) -> Through:
        return _through_layers

    def matched(self, tree: RadixCache, result: MatchResult) -> torch.Tensor:
        return tree.path_device_indices(result.last_device_node)


def _through_layers(
    layers: Iterable[nn.Module],
    positions: torch.Tensor,
    hidden: torch.Tensor,
    batch: Any,
    rows: Callable[[int], int],
) -> None:
    """`Through`; residuals are beside the batch."""
    from sglang.srt.layers.layer_boundary.residual import batch as stack
    from sglang.srt.layers.layer_boundary.residual.add_norm import PLAIN_ADD
    from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream

    stack.start(batch)
    for index, layer in enumerate(layers):
        left = rows(index)
        hidden, residual = batch.residual_stream.export(hidden)
        hidden = hidden[:left]
        if residual is not None:
            hidden, batch.residual_stream = ResidualStream.from_handoff(
                hidden, residual[:left], PLAIN_ADD
            )
        hidden = layer(positions[:left], hidden, batch)


ADAPTER = Sglang0523()
