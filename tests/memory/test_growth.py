"""A pool grows as far as the machine has memory beside a step's activations."""

from __future__ import annotations

import pytest

from ellm_sgl.memory import Outcome
from tests.engine.scene import GROUPS
from tests.memory.fake_arena import small_steps
from tests.memory.test_resize import UNIT, Server


@pytest.mark.parametrize(("blocks", "outcome"), [(3, Outcome.CEILING), (8, Outcome.APPLIED)])
def test_growth_leaves_the_next_step_its_activations(blocks: int, outcome: Outcome) -> None:
    """The machine has room for 3 more blocks, or for as many as are asked for."""
    server = Server(start=4, spare=lambda: (blocks * GROUPS + 1) * UNIT)
    server.ask(12)
    assert server.steps()
    assert server.resizer.outcome is outcome
    assert server.table.unit_limit <= (4 + blocks) * GROUPS


def test_growth_ends_where_others_take_what_was_there() -> None:
    """There is room for all when it begins, and for nothing after two blocks."""
    left = [100 * GROUPS * UNIT] * 3
    server = Server(start=4, spare=lambda: left.pop() if left else 0)
    with small_steps(GROUPS * UNIT):
        server.ask(12)
        assert server.steps()
    assert server.resizer.outcome is Outcome.CEILING
    assert server.table.unit_limit == 6 * GROUPS


def test_who_asks_again_for_what_there_is_not_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(start=2)
    server.arena.room = server.arena.committed
    for blocks, told in ((6, 1), (6, 1), (7, 2)):
        server.ask(blocks)
        assert server.end() is Outcome.CEILING
        assert caplog.text.count("no memory to grow further") == told
