"""SGLang 0.5.17."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ellm_sgl.sglang.versions.adapter import Adapter

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import RadixKey


class Sglang0517(Adapter):
    """`ServerArgs` is a dataclass that resolves itself when it is made; a request has its row."""

    version = "0.5.17"

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

    def kv(self, req: Req) -> Any:
        return req

    def rows(self, reqs: Sequence[Req]) -> list[int]:
        return [req.req_pool_idx for req in reqs]

    def radix_key(self, tokens: Any, req: Req) -> RadixKey:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(tokens, req.extra_key)

    def holds_frees(self, allocator: Any) -> bool:
        return not allocator.is_not_in_free_group


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    factory = field.default_factory
    return None if factory is dataclasses.MISSING else factory()


ADAPTER = Sglang0517()
