"""The request table: columns that follow requests through their lives."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from ellm_sgl.engine import Arrival, RequestTable
from ellm_sgl.engine.answers import MOST_CLASSES
from ellm_sgl.engine.request_table import entries_array
from ellm_sgl.policies import EndedRequest

ARRIVAL = Arrival(
    tokens=10, prompt_tokens=10, max_new_tokens=5, arrival_s=1.0, priority=3,
    tpot_slo_s=0.05, ttft_slo_s=math.inf,
)  # fmt: skip


def one(book: RequestTable, slot: int, length: int, now: float) -> float:
    zeros = np.zeros(1, np.int64)
    view = book.running(entries_array([slot]), np.array([length]), zeros, zeros, zeros, now)
    return float(view.tpot_s[0])


def test_a_waiting_request_as_a_policy_sees_it() -> None:
    book = RequestTable()
    view = book.waiting(entries_array([book.add(ARRIVAL, now_s=2.0)]), now_s=5.0)
    assert view.tokens.tolist() == [10] and view.priority.tolist() == [3]
    assert view.waited_s.tolist() == [3.0] and view.arrival_s.tolist() == [1.0]
    assert view.tpot_slo_s.tolist() == [0.05] and np.isinf(view.ttft_slo_s).all()
    assert np.isnan(view.tpot_s).all() and view.uncached_tokens.tolist() == [0]


def test_ids_grow_with_arrival_and_are_never_used_again() -> None:
    book = RequestTable()
    first = book.add(ARRIVAL, 0.0)
    book.remove(first)
    slots = entries_array([book.add(ARRIVAL, 0.0) for _ in range(3)])
    assert first in slots
    assert sorted(book.waiting(slots, 0.0).request_id.tolist()) == [2, 3, 4]


def test_it_grows_and_keeps_what_it_knows() -> None:
    book = RequestTable()
    slots = entries_array([book.add(ARRIVAL, float(i)) for i in range(200)])
    assert len(set(slots.tolist())) == 200
    assert book.waiting(slots, 200.0).waited_s.tolist() == [200.0 - i for i in range(200)]


def test_time_per_output_token_is_counted_from_the_second_on() -> None:
    book = RequestTable()
    slot = book.add(ARRIVAL, 0.0)
    for step, now in enumerate([10.0, 10.5, 12.0]):
        book.decoded(entries_array([slot]), np.array([11 + step]), now)
        tpot = one(book, slot, 11 + step, now)
        assert math.isnan(tpot) if step == 0 else tpot == pytest.approx((now - 10) / step)


def test_a_request_that_sits_out_waits_for_its_next_token() -> None:
    book = RequestTable()
    slots = entries_array([book.add(ARRIVAL, 0.0), book.add(ARRIVAL, 0.0)])
    book.decoded(slots, np.array([11, 11]), 1.0)
    book.decoded(slots[:1], np.array([12]), 2.0)
    zeros = np.zeros(2, np.int64)
    view = book.running(slots, np.array([12, 11]), zeros, zeros, zeros, now_s=2.5)
    assert view.waited_s.tolist() == [0.5, 1.5]


def test_a_request_that_sits_out_from_the_start_waits_since_it_was_seen_to_run() -> None:
    """Its first token came with its prompt."""
    book = RequestTable()
    slots = entries_array([book.add(ARRIVAL, 0.0)])
    zeros = np.zeros(1, np.int64)
    views = [book.running(slots, zeros + 11, zeros, zeros, zeros, now) for now in (7.0, 7.5, 9.0)]
    assert [view.waited_s.tolist() for view in views] == [[0.0], [0.5], [2.0]]


def test_a_retracted_request_waits_from_then_on_with_its_output() -> None:
    book = RequestTable()
    slot = book.add(ARRIVAL, 0.0)
    book.wait_again(slot, tokens=14, now_s=9.0)
    view = book.waiting(entries_array([slot]), now_s=10.0)
    assert view.tokens.tolist() == [14] and view.waited_s.tolist() == [1.0]


def test_a_slot_used_again_does_not_remember() -> None:
    book = RequestTable()
    slot = book.add(ARRIVAL, 0.0)
    book.decoded(entries_array([slot]), np.array([11]), 1.0)
    book.decoded(entries_array([slot]), np.array([12]), 2.0)
    book.remove(slot)
    assert book.add(ARRIVAL, 3.0) == slot
    assert math.isnan(one(book, slot, 10, 3.0))


def test_an_ended_request_is_told_of_once_and_its_length_is_learnt() -> None:
    book = RequestTable()
    slot = book.add(ARRIVAL, 0.0)
    seen_before = book.answers.seen.spent.sum()
    assert book.end(slot, output_tokens=4, aborted=False) == EndedRequest(1, 4, False)
    assert book.answers.seen.ended.sum() == 1 and book.answers.seen.spent.sum() == seen_before + 3
    assert book.remove(slot) is None and book.answers.seen.ended.sum() == 1


def test_who_leaves_without_having_ended_was_aborted() -> None:
    book = RequestTable()
    waited, retracted = book.add(ARRIVAL, 0.0), book.add(ARRIVAL, 0.0)
    book.wait_again(retracted, tokens=ARRIVAL.tokens + 3, now_s=1.0)
    assert book.remove(waited) == EndedRequest(1, 0, True)
    assert book.remove(retracted) == EndedRequest(2, 3, True)
    assert book.answers.seen.ended.sum() == 1, (
        "an answer that is cut off makes room as one that ends"
    )
    assert book.remove(book.add(ARRIVAL, 3.0)) == EndedRequest(3, 0, True)


def test_lengths_are_kept_of_the_latest_classes_alone() -> None:
    book = RequestTable()
    for priority in (*range(100), 3):
        slot = book.add(dataclasses.replace(ARRIVAL, priority=priority), 0.0)
        book.end(slot, output_tokens=4, aborted=False)
        book.remove(slot)
    assert list(book.answers.by_class) == [*range(100 - MOST_CLASSES + 1, 100), 3]


def test_policies_cannot_write_to_it() -> None:
    book = RequestTable()
    view = book.waiting(entries_array([book.add(ARRIVAL, 0.0)]), 1.0)
    for array in vars(view).values():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7


def test_the_time_to_the_second_token_counts_where_the_first_was_seen() -> None:
    """It comes with the prompt; then others' prompts hold it up."""
    book = RequestTable()
    slot = book.add(ARRIVAL, 0.0)
    assert math.isnan(one(book, slot, 10, now=10.0))
    for length, now in ((11, 14.0), (12, 14.5)):
        book.decoded(entries_array([slot]), np.array([length]), now)
        assert one(book, slot, length, now) == pytest.approx((now - 10) / (length - 10))
    assert book.measured(slot, 14.5).tpot_s == pytest.approx(2.25)


def test_the_first_token_of_one_that_was_not_looked_at_comes_with_its_first_step() -> None:
    """As where a decision stands after a prompt's last chunk."""
    book = RequestTable()
    slot = book.add(ARRIVAL, 0.0)
    for length, now in ((11, 10.0), (12, 11.0)):
        book.decoded(entries_array([slot]), np.array([length]), now)
    arrival_s = book.waiting(entries_array([slot]), 0.0).arrival_s[0]
    assert book.measured(slot, 60.0).ttft_s == 10.0 - arrival_s


def test_ids_of_requests_that_are_made_up_are_those_of_no_other() -> None:
    book = RequestTable(first_id=-2)
    entries = entries_array([book.add(ARRIVAL, 0.0) for _ in range(2)])
    assert book.request_ids(entries).tolist() == [-2, -1]
