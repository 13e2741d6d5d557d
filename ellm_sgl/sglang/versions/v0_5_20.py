"""SGLang 0.5.20."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ellm_sgl.sglang.versions.v0_5_17 import Sglang0517

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import RadixKey

_ARGS = "sglang.srt.server_args.ServerArgs"


class Sglang0520(Sglang0517):
    """`ServerArgs` keeps what was given; `resolve_once` decides beside it. What a request has of
    memory is in `req.kv`."""

    version = "0.5.20"
    moved: ClassVar[Mapping[str, str]] = {f"{_ARGS}.__post_init__": f"{_ARGS}.resolve_once"}
    rows_field = "global_num_token_non_padded_cpu"
    times_out_alike = True

    def defaults(self) -> dict[str, Any]:
        import msgspec
        from sglang.srt.server_args import ServerArgs

        return {field.name: _default(field) for field in msgspec.structs.fields(ServerArgs)}

    def resolved(self, args: Any) -> Any:
        from sglang.srt.arg_groups.overrides import resolving_view

        return resolving_view(args)

    def resolve(self, args: Any) -> None:
        args.resolve_once()

    def is_resolved(self, args: Any) -> bool:
        return any(getattr(args, f"_resolution_{state}", False) for state in ("finished", "failed"))

    def model_config(self, args: Any) -> Any:
        from sglang.srt.arg_groups.model_override_base import model_config_of

        return model_config_of(args)

    def kv(self, req: Req) -> Any:
        return req.kv

    def rows(self, reqs: Sequence[Req]) -> list[int]:
        return [req.kv.req_pool_idx for req in reqs]

    def radix_key(self, tokens: Any, req: Req) -> RadixKey:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)

    def namespaces(self, req: Req) -> list[str | None]:
        return [req.extra_key, req.cache_salt]

    def holds_frees(self, allocator: Any) -> bool:
        return allocator.free_group is not None


def _default(field: Any) -> Any:
    import msgspec

    if field.default is not msgspec.NODEFAULT:
        return field.default
    factory = field.default_factory
    return None if factory is msgspec.NODEFAULT else factory()


ADAPTER = Sglang0520()
