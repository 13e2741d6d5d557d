"""How many requests are between their first and their last token."""

from __future__ import annotations

from ellm_sgl.client.replay import Outcome, Request
from ellm_sgl.eval.bench.scenarios.rotation import Rotation, under_way


def outcome(*times: float) -> Outcome:
    return Outcome(Request(0.0, (1,), 4), token_s=list(times))


def test_most_and_mean():
    most, mean = under_way([outcome(0.0, 1.0, 4.0), outcome(2.0, 6.0), outcome()])
    assert most == 2 and mean == (2 * 1 + 2 * 2 + 2 * 1) / 6


def test_one_that_begins_as_another_ends_is_not_under_way_with_it():
    assert under_way([outcome(0.0, 2.0), outcome(2.0, 4.0)]) == (1, 1.0)


def test_a_load_repeats_by_seed():
    made = Rotation(requests=5, seconds=2.0)
    assert made.load("", seed=1) == made.load("", seed=1) != made.load("", seed=2)
