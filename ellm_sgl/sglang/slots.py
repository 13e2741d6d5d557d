"""Token slots of requests that grow by whole pages: arithmetic only.

SGLang addresses KV by slot = page · page_size + offset; page 0 is never used. A request fills its
last page before it begins a new one.
"""

from __future__ import annotations

import torch


def pages_to_add(before: torch.Tensor, after: torch.Tensor, page_size: int) -> torch.Tensor:
    """Pages that requests begin when they grow from `before` to `after` tokens, int64 [n]."""
    return (after + page_size - 1) // page_size - (before + page_size - 1) // page_size


def extend_slots(
    before: torch.Tensor,
    after: torch.Tensor,
    last_slot: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
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
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    first = torch.cumsum(counts, 0) - counts
    position = torch.arange(int(counts.sum())) - first[owner] + before[owner]
    offset = position % page_size
    # Page within the request's new pages; -1: still in the page of `last_slot`.
    page = position // page_size - (before[owner] + page_size - 1) // page_size
    first_page = torch.cumsum(added, 0) - added
    fresh = page >= 0
    slots = last_slot[owner] + 1 + position - before[owner]
    slots[fresh] = pages[(first_page[owner] + page)[fresh]] * page_size + offset[fresh]
    return slots
