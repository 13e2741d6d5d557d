"""What is learnt of output lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.policies import lengths
from ellm_sgl.policies.lengths import EDGES, OutputLengths, Seen

NOBODY = np.zeros(0, np.int64)
AHEAD = np.array([0, 50, 100, 300, 600, 1200, 3000])


def learnt(lengths: list[int], bound: int = 1 << 30) -> Seen:
    seen = Seen.nothing()
    for length in lengths:
        seen = seen.and_one(min(length, bound), cut_off=length >= bound)
    return seen


def survival(known: OutputLengths, generated: int = 0, priority: int = 0) -> np.ndarray:
    one = np.array([generated]), np.array([priority])
    return known.survival(*one, AHEAD)[:, 0]


def lognormal(mean: float, count: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return (1 + rng.lognormal(np.log(mean) - 0.32, 0.8, count)).astype(int).tolist()


@given(
    ended=st.lists(st.tuples(st.integers(1, 10**6), st.booleans()), max_size=30),
    running=st.lists(st.integers(0, 10**6), max_size=10),
    generated=st.integers(0, 10**7),
)
def test_it_is_a_survival_function(
    ended: list[tuple[int, bool]], running: list[int], generated: int
) -> None:
    seen = Seen.nothing()
    for tokens, cut_off in ended:
        seen = seen.and_one(tokens, cut_off)
    going_on = np.array(running, np.int64)
    known = OutputLengths(seen, {0: seen}, going_on, np.zeros_like(going_on))
    found = survival(known, generated)
    assert found[0] == 1.0
    assert (np.diff(found) <= 0).all()
    assert ((found > 0) & (found <= 1)).all()


@pytest.mark.parametrize("generated", [0, 200, 800])
def test_it_approaches_what_lengths_are(generated: int) -> None:
    others = np.array(lognormal(600, 200_000, seed=100))
    others = others[others > generated]
    true = np.array([(others > generated + ahead).mean() for ahead in AHEAD])
    known = (learnt(lognormal(600, 250, seed=seed)) for seed in range(20))
    found = np.array([survival(OutputLengths(k, {}, NOBODY, NOBODY), generated) for k in known])
    assert np.abs(found.mean(axis=0) - true).max() < 0.06
    assert found.std(axis=0).max() < 0.12


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=30))
def test_many_at_once_are_what_they_are_one_by_one_but_for_their_age(lengths: list[int]) -> None:
    seen, one_by_one = Seen.of(np.array(lengths)), [learnt([length]) for length in lengths]
    assert np.array_equal(seen.ended, sum(one.ended for one in one_by_one))
    assert np.array_equal(seen.spent, sum(one.spent for one in one_by_one))


def test_answers_that_go_on_count() -> None:
    """After 300 steps of 40 requests only the short ones have ended: 12, all below 300."""
    lengths = np.array(lognormal(600, 40))
    short = learnt(lengths[lengths <= 300].tolist())
    alone = OutputLengths(short, {}, NOBODY, NOBODY)
    together = OutputLengths(short, {}, np.full((lengths > 300).sum(), 300), NOBODY)
    true = (lengths > 300).mean()
    at_300 = AHEAD.tolist().index(300)
    assert survival(alone)[at_300] < true / 2
    assert abs(survival(together)[at_300] - true) < 0.1


def test_answers_cut_off_at_their_bound_say_nothing_of_their_end() -> None:
    known = OutputLengths(learnt([500] * 100, bound=200), {}, NOBODY, NOBODY)
    assert survival(known)[AHEAD.tolist().index(100)] > 0.97


def test_it_follows_a_shift() -> None:
    seen = learnt(lognormal(200, 400) + lognormal(1500, 400))
    at_600 = AHEAD.tolist().index(600)
    assert survival(OutputLengths(seen, {}, NOBODY, NOBODY))[at_600] > 0.6


def test_classes_are_told_apart_and_a_new_one_is_like_the_others() -> None:
    short, long = lognormal(60, 100), lognormal(900, 100)
    by_class = {0: learnt(short), 5: learnt(long)}
    pooled = learnt([x for pair in zip(short, long, strict=True) for x in pair])
    known = OutputLengths(pooled, by_class, NOBODY, NOBODY)
    at_300 = AHEAD.tolist().index(300)
    assert survival(known, priority=0)[at_300] < 0.1
    assert survival(known, priority=5)[at_300] > 0.75
    unknown = survival(known, priority=7)
    assert np.array_equal(unknown, survival(OutputLengths(pooled, {}, NOBODY, NOBODY)))


def test_what_is_looked_up_does_not_grow_with_classes_that_are_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients may number their requests by priority."""
    by_class = {kind: learnt(lognormal(60 * kind, 30)) for kind in (1, 2)}
    generated, priority = np.arange(300), np.arange(300)
    known = OutputLengths(learnt(lognormal(90, 60)), by_class, generated, priority)
    looked_up, between = [], lengths._between

    def counted(*given: Any) -> Any:
        looked_up.append(given)
        return between(*given)

    monkeypatch.setattr(lengths, "_between", counted)
    known.survival(generated, priority, AHEAD)
    assert len(looked_up) <= 1 + len(by_class)


def test_nothing_seen_is_taken_for_long() -> None:
    found = survival(OutputLengths.nothing())
    assert 0.2 < found[AHEAD.tolist().index(600)] < 0.8


def test_edges_ascend() -> None:
    assert EDGES[0] == 0
    assert (np.diff(EDGES) > 0).all()
