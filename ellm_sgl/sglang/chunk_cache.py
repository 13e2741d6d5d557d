"""SGLang's cache for `--disable-radix-cache`, in the versions that have one for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.chunk_cache import ChunkCache

from ellm_sgl.sglang.context import context_of
from ellm_sgl.sglang.scheduler import note_end

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class EllmChunkCache(ChunkCache):
    """No sharing; a finished request's blocks are free at once."""

    def cache_finished_req(
        self, req: Req, is_insert: bool = True, *, kv_len_to_handle: int
    ) -> None:
        context_of(self).forget_request(req)
        note_end(self, req)
        super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)
