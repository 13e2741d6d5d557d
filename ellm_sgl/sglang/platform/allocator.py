"""SGLang's paged allocator without its Triton kernels, for the CPU platform with eLLM off."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

from ellm_sgl.sglang.token_slots import Integers, PagedSlots


class CpuPagedAllocator(PagedSlots, PagedTokenToKVPoolAllocator):
    """Same pages, same order."""

    free_pages: torch.Tensor

    def take_pages(self, count: int) -> Integers | None:
        if count > len(self.free_pages):
            self.merge_and_sort_free()
        if count > len(self.free_pages):
            return None
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return pages.numpy()
