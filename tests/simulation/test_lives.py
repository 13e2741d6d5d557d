"""2,000 lives of the memory plane: no stale read, no leak, and everything comes up."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

LIVES = 2000
SHARES = 8
"""Tests among which they are divided, for pytest-xdist."""


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_lives_read_what_was_written_and_leave_nothing_behind(simulation: Any, share: int) -> None:
    from tests.simulation.exercised import EVERYTHING

    size = LIVES // SHARES
    totals: Counter[str] = Counter()
    for found in simulation.run(range(share * size, (share + 1) * size), totals):
        if found is not None:
            pytest.fail(found.report(), pytrace=False)
    assert totals["lives"] == size
    missing = [name for name in EVERYTHING if not totals[name]]
    assert not missing, f"these lives no longer come by {missing}: change how they are drawn"


def test_a_seed_is_always_the_same_life(simulation: Any) -> None:
    for seed in range(20):
        assert simulation.life_of(seed) == simulation.life_of(seed)
        once, again = Counter[str](), Counter[str]()
        simulation.failure(*simulation.life_of(seed), totals=once)
        simulation.failure(*simulation.life_of(seed), totals=again)
        assert once == again and once["turns"]
