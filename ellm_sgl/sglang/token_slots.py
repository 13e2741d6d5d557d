"""Token slots of requests that grow by whole pages.

SGLang addresses KV by slot = page · page_size + offset; page 0 is never used. A request fills its
last page before it begins a new one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch

Integers = npt.NDArray[np.int64]


class PagedSlots(ABC):
    """The part of an SGLang allocator that hands out slots, without Triton kernels: the arithmetic
    is NumPy's, on the host. Comes before SGLang's class among the bases."""

    page_size: int
    device: str

    @abstractmethod
    def take_pages(self, count: int) -> Integers | None:
        """So many free pages, which are free no more; None if there are fewer."""

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
        """Slots for prompts; None if there are too few pages."""
        before, after = prefix_lens_cpu.numpy(), seq_lens_cpu.numpy()
        pages = self.take_pages(int(pages_to_add(before, after, self.page_size).sum()))
        if pages is None:
            return None
        slots = extend_slots(before, after, last_loc.cpu().numpy(), pages, self.page_size)
        return torch.from_numpy(slots).to(self.device)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot per request, likewise."""
        after = seq_lens_cpu.numpy()
        pages = self.take_pages(int(np.count_nonzero(begins_page(after, self.page_size))))
        if pages is None:
            return None
        slots = decode_slots(after, last_loc.cpu().numpy(), pages, self.page_size)
        return torch.from_numpy(slots).to(self.device)


def pages_to_add(before: Integers, after: Integers, page_size: int) -> Integers:
    """Pages that requests begin when they grow from `before` to `after` tokens, int64 [n]."""
    return (after + page_size - 1) // page_size - (before + page_size - 1) // page_size


def extend_slots(
    before: Integers, after: Integers, last_slot: Integers, pages: Integers, page_size: int
) -> Integers:
    """Slots of the tokens `before`..`after` of each request, one request after the other.

    Args:
        before, after: int64 [n], tokens of each request.
        last_slot: int64 [n], slot of token `before - 1`; ignored where that page is full.
        pages: int64 [sum(pages_to_add)], new pages in order.
        page_size: tokens per page.

    Returns:
        int64 [sum(after - before)].
    """
    counts = after - before
    added = pages_to_add(before, after, page_size)
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    position = np.arange(counts.sum()) - first[owner] + before[owner]
    offset = position % page_size
    # Page within the request's new pages; -1: still in the page of `last_slot`.
    page = position // page_size - (before[owner] + page_size - 1) // page_size
    first_page = np.cumsum(added) - added
    fresh = page >= 0
    slots = last_slot[owner] + 1 + position - before[owner]
    slots[fresh] = pages[(first_page[owner] + page)[fresh]] * page_size + offset[fresh]
    return slots


def decode_slots(after: Integers, last_slot: Integers, pages: Integers, page_size: int) -> Integers:
    """`extend_slots` by one token each, int64 [n]: what every decode step does.

    Args:
        after: int64 [n], tokens of each request, the new one counted.
        pages: int64, a new page for each request of which `begins_page` says so, in order.
    """
    slots = last_slot + 1
    if len(pages):
        slots[begins_page(after, page_size)] = pages * page_size
    return slots


def begins_page(after: Integers, page_size: int) -> npt.NDArray[np.bool_]:
    """Whether the last of so many tokens is the first of its page, bool [n]."""
    return np.asarray((after - 1) % page_size == 0)
