"""SGLang's paged allocator without its Triton kernels, for the CPU platform with eLLM off."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

from ellm_sgl.sglang.slots import extend_slots, pages_to_add


class CpuPagedAllocator(PagedTokenToKVPoolAllocator):
    """Same pages, same order; the slot arithmetic is PyTorch on the host."""

    free_pages: torch.Tensor

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        count = int(pages_to_add(prefix_lens_cpu, seq_lens_cpu, self.page_size).sum())
        if count > len(self.free_pages):
            self.merge_and_sort_free()
        if count > len(self.free_pages):
            return None
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return extend_slots(prefix_lens_cpu, seq_lens_cpu, last_loc, pages, self.page_size)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        return self.alloc_extend(
            seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, len(seq_lens)
        )
