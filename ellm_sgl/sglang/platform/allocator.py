"""SGLang's paged allocator without its Triton kernels, for the CPU platform with eLLM off."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

from ellm_sgl.sglang.token_slots import (
    Integers,
    begins_page,
    decode_slots,
    extend_slots,
    pages_to_add,
)


class CpuPagedAllocator(PagedTokenToKVPoolAllocator):
    """Same pages, same order; the slot arithmetic is NumPy."""

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
        before, after = prefix_lens_cpu.numpy(), seq_lens_cpu.numpy()
        pages = self._take(int(pages_to_add(before, after, self.page_size).sum()))
        if pages is None:
            return None
        slots = extend_slots(before, after, last_loc.numpy(), pages, self.page_size)
        return torch.from_numpy(slots)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        after = seq_lens_cpu.numpy()
        pages = self._take(int(begins_page(after, self.page_size).sum()))
        if pages is None:
            return None
        return torch.from_numpy(decode_slots(after, last_loc.numpy(), pages, self.page_size))

    def _take(self, count: int) -> Integers | None:
        """So many free pages; None if there are fewer."""
        if count > len(self.free_pages):
            self.merge_and_sort_free()
        if count > len(self.free_pages):
            return None
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return pages.numpy()
