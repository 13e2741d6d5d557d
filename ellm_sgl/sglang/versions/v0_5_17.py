"""SGLang 0.5.17."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ellm_sgl.sglang.versions.adapter import Adapter, TreeCalls

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchResult
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    from ellm_sgl.step.separate import Through


class TreeCalls0517(TreeCalls):
    """One call when a prompt, or a chunk of it, is computed, and one when the request goes."""

    def cache_unfinished_req(self, req: Req, chunked: bool = False) -> None:
        with self.whole():
            super().cache_unfinished_req(req, chunked)
        self.stays(req)

    def cache_finished_req(
        self, req: Req, is_insert: bool = True, *, kv_len_to_handle: int
    ) -> None:
        self.leaves(req)
        super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)
        self.has_left(req, kv_len_to_handle)


class Sglang0517(Adapter):
    """`ServerArgs` is a dataclass that resolves itself when it is made; a request has its row."""

    version = "0.5.17"
    tree_calls = TreeCalls0517
    rows_field = "num_token_non_padded_cpu"
    has_chunk_cache = True
    times_out_alike = False

    def defaults(self) -> dict[str, Any]:
        from sglang.srt.server_args import ServerArgs

        return {field.name: _default(field) for field in dataclasses.fields(ServerArgs)}

    def resolved(self, args: Any) -> Any:
        return args

    def resolve(self, args: Any) -> None:
        pass

    def is_resolved(self, args: Any) -> bool:
        return False

    def model_config(self, args: Any) -> Any:
        return args.get_model_config()

    def ranks(self, scheduler: Scheduler) -> Any:
        return scheduler.ps

    def charged(self, adder: PrefillAdder) -> float:
        return adder.rem_total_token_offset

    def charge(self, adder: PrefillAdder, eventual: float, present: float) -> None:
        adder.rem_total_token_offset += eventual
        adder.cur_rem_token_offset += present

    def kv(self, req: Req) -> Any:
        return req

    def rows(self, reqs: Sequence[Req]) -> list[int]:
        return [req.req_pool_idx for req in reqs]

    def radix_key(self, tokens: Any, req: Req) -> RadixKey:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(tokens, req.extra_key)

    def namespaces(self, req: Req) -> list[str | None]:
        return [req.extra_key]

    def prefix_tokens(self, req: Req) -> int:
        return len(req.prefix_indices)

    def release(self, req: Req, tree: BasePrefixCache) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(req, tree)

    @property
    def through_layers(self) -> Through:
        from ellm_sgl.step.separate import through_layers

        return through_layers

    def matched(self, tree: RadixCache, result: MatchResult) -> torch.Tensor:
        return result.device_indices

    def holds_frees(self, allocator: Any) -> bool:
        return not allocator.is_not_in_free_group


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    factory = field.default_factory
    return None if factory is dataclasses.MISSING else factory()


ADAPTER = Sglang0517()
