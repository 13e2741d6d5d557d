"""2,000 lives of the memory plane: no stale read, no leak, and everything comes up."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.campaign import life_of, run
from tests.simulation.exercised import EVERYTHING
from tests.simulation.life import live

LIVES = 2000
SHARES = 8
"""Tests among which they are divided, for pytest-xdist."""


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_lives_read_what_was_written_and_leave_nothing_behind(share: int) -> None:
    size = LIVES // SHARES
    totals: Counter[str] = Counter()
    for found in run(range(share * size, (share + 1) * size), totals):
        if found is not None:
            pytest.fail(found.report(), pytrace=False)
    assert totals["lives"] == size
    missing = [name for name in EVERYTHING if not totals[name]]
    assert not missing, f"these lives no longer come by {missing}: change how they are drawn"


def test_a_seed_is_always_the_same_life() -> None:
    for seed in range(20):
        assert life_of(seed) == life_of(seed)
        assert live(*life_of(seed)) == live(*life_of(seed))
