"""Slot arithmetic against a loop over tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.sglang.token_slots import begins_page, decode_slots, extend_slots, pages_to_add

UNUSED = -1
"""`last_slot` of a request whose last page is full: never looked at."""

growths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5)
"""(tokens before, tokens to add) of each request."""


def slots_one_by_one(
    growth: list[tuple[int, int]], last_slots: list[int], pages: list[int], page_size: int
) -> list[int]:
    """A token goes behind the one before it, or to the begin of the next new page."""
    fresh = iter(pages)
    slots = []
    for (before, added), slot in zip(growth, last_slots, strict=True):
        for position in range(before, before + added):
            slot = next(fresh) * page_size if position % page_size == 0 else slot + 1
            slots.append(slot)
    assert next(fresh, None) is None
    return slots


@given(growth=growths, page_size=st.integers(1, 17))
def test_pages_are_added_where_a_token_begins_one(
    growth: list[tuple[int, int]], page_size: int
) -> None:
    before, added = np.array(growth).T
    expected = [sum(t % page_size == 0 for t in range(b, b + a)) for b, a in growth]
    assert pages_to_add(before, before + added, page_size).tolist() == expected


@given(growth=growths, page_size=st.integers(1, 17), data=st.data())
def test_slots_are_those_of_filling_page_after_page(
    growth: list[tuple[int, int]], page_size: int, data: st.DataObject
) -> None:
    before, added = np.array(growth).T
    count = int(pages_to_add(before, before + added, page_size).sum())
    pages = data.draw(st.permutations(range(1, len(growth) + count + 1)), "pages")
    held, new = pages[: len(growth)], pages[len(growth) :]
    last_slots = [
        page * page_size + (tokens - 1) % page_size if tokens % page_size else UNUSED
        for page, (tokens, _) in zip(held, growth, strict=True)
    ]
    slots = extend_slots(
        before, before + added, np.array(last_slots), np.array(new, np.int64), page_size
    )
    assert slots.tolist() == slots_one_by_one(growth, last_slots, new, page_size)
    assert len(set(slots.tolist())) == len(slots)


@given(before=st.lists(st.integers(0, 40), min_size=1, max_size=8), page_size=st.integers(1, 17))
def test_a_token_more_is_an_extension_by_one(before: list[int], page_size: int) -> None:
    tokens = np.array(before)
    begun = begins_page(tokens + 1, page_size)
    assert begun.tolist() == pages_to_add(tokens, tokens + 1, page_size).tolist()
    last = np.arange(1, len(before) + 1) * page_size + (tokens - 1) % page_size
    pages = np.arange(100, 100 + int(begun.sum()))
    slots = decode_slots(tokens + 1, last, pages, page_size)
    assert slots.tolist() == extend_slots(tokens, tokens + 1, last, pages, page_size).tolist()
