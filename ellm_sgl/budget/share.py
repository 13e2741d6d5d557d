"""Who may have how much of a budget: max-min fair, between what each is promised and wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """Of one server, in bytes."""

    floor: int
    """What it is promised, whether it wants it or not."""
    want: int
    """What it could use."""
    held: int = 0
    """What it has: more than it wants it keeps as long as nobody else wants it."""


def fair_shares(budget: int, claims: Sequence[Claim]) -> list[int]:
    """The share of each, in bytes.

    Everybody has the floor. Wants are filled from the smallest share upward, all alike, so that
    nobody can have more without somebody else, who has no more than that, having less. Then, from
    what is left, those who have more than they want keep it. Nothing is left over while somebody
    wants, or has, more than the share. The same claims have the same shares; where a byte cannot
    be divided, the first come first.

    Raises:
        ValueError: the floors alone are more than the budget.
    """
    shares = [claim.floor for claim in claims]
    if sum(shares) > budget:
        raise ValueError(f"floors of {sum(shares)} bytes in a budget of {budget}")
    shares = _fill(budget, shares, [claim.want for claim in claims])
    return _fill(budget, shares, [claim.held for claim in claims])


def _fill(budget: int, low: Sequence[int], high: Sequence[int]) -> list[int]:
    """Shares from `low`, raised towards `high` as far as the budget goes, the smallest first."""
    high = [max(pair) for pair in zip(low, high, strict=True)]
    ends = list(zip(low, high, strict=True))

    def at(level: int) -> list[int]:
        return [min(max(level, least), most) for least, most in ends]

    reached, beyond = 0, budget + 1  # the level, by bisection
    while beyond - reached > 1:
        middle = (reached + beyond) // 2
        if sum(at(middle)) <= budget:
            reached = middle
        else:
            beyond = middle
    shares, next_ones = at(reached), at(reached + 1)
    rest = budget - sum(shares)
    for i, more in enumerate(next_ones):
        step = min(more - shares[i], rest)
        shares[i] += step
        rest -= step
    return shares
