"""Fair shares: what must hold of them whatever the claims."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.budget import Claim, fair_shares

BYTES = st.integers(0, 40)
CLAIMS = st.lists(st.builds(Claim, BYTES, BYTES, BYTES), max_size=6)
LARGE = st.integers(0, 2**62)


def budget_for(claims: list[Claim], room: int) -> int:
    return sum(claim.floor for claim in claims) + room


@given(CLAIMS, st.integers(0, 120))
def test_no_byte_is_given_twice_and_none_is_left_while_somebody_wants_it(
    claims: list[Claim], room: int
) -> None:
    budget = budget_for(claims, room)
    shares = fair_shares(budget, claims)
    assert sum(shares) == min(budget, sum(max(c.floor, c.want, c.held) for c in claims))
    assert all(share >= claim.floor for share, claim in zip(shares, claims, strict=True))


@given(CLAIMS, st.integers(0, 120))
def test_who_has_less_than_wanted_has_no_less_than_others(claims: list[Claim], room: int) -> None:
    """Max-min: another's share is larger only by what it is promised, or by an odd byte."""
    shares = fair_shares(budget_for(claims, room), claims)
    for share, claim in zip(shares, claims, strict=True):
        if share < claim.want:
            others = zip(shares, claims, strict=True)
            assert all(other <= max(share + 1, theirs.floor) for other, theirs in others)


@given(CLAIMS, st.integers(0, 120))
def test_what_is_held_beyond_the_want_is_kept_only_while_nobody_wants_it(
    claims: list[Claim], room: int
) -> None:
    shares = fair_shares(budget_for(claims, room), claims)
    short = any(s < c.want for s, c in zip(shares, claims, strict=True))
    for share, claim in zip(shares, claims, strict=True):
        assert share <= max(claim.floor, claim.want, 0 if short else claim.held)


@given(st.lists(st.tuples(LARGE, LARGE), min_size=1, max_size=4), LARGE)
def test_the_order_of_the_rows_moves_an_odd_byte_at_most(
    pairs: list[tuple[int, int]], room: int
) -> None:
    claims = [Claim(floor, want) for floor, want in pairs]
    budget = budget_for(claims, room)
    shares = fair_shares(budget, claims)
    assert shares == fair_shares(budget, claims)
    for mine, theirs in zip(shares[::-1], fair_shares(budget, claims[::-1]), strict=True):
        assert abs(mine - theirs) <= 1


@pytest.mark.parametrize(
    ("claims", "shares"),
    [
        ([Claim(10, 100), Claim(10, 100)], [50, 50]),
        ([Claim(10, 20), Claim(10, 100)], [20, 80]),
        ([Claim(70, 100), Claim(10, 100)], [70, 30]),
        ([Claim(10, 0, held=90), Claim(10, 5)], [90, 10]),
        ([Claim(10, 0, held=90), Claim(10, 60)], [40, 60]),
        ([Claim(10, 0), Claim(10, 0)], [10, 10]),
    ],
    ids=["alike", "one wants less", "one is promised more", "kept", "given up", "idle"],
)
def test_examples(claims: list[Claim], shares: list[int]) -> None:
    assert fair_shares(100, claims) == shares


def test_floors_beyond_the_budget_are_refused() -> None:
    with pytest.raises(ValueError, match="floors of 110 bytes in a budget of 100"):
        fair_shares(100, [Claim(60, 0), Claim(50, 0)])
