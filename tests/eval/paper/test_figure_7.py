"""The paper's two examples on the real page table."""

from __future__ import annotations

import pytest

from ellm_sgl.eval.paper.figure_7 import EXAMPLES, REQUESTS, SHAPE, example, transient_units


@pytest.mark.parametrize(("name", "units"), [("A", 2), ("B", 4)])
def test_an_examples_uncached_tokens_take_the_papers_number_of_units(name, units):
    found = example(name)
    assert len(found.transient) == units
    held = found.table.units[[b for r in REQUESTS for b in found.table.blocks_of(r)]]
    assert set(found.transient.tolist()).isdisjoint(held[held >= 0].tolist())


def test_the_first_four_tokens_are_uncached_and_the_rest_is_not():
    table = example("A").table
    for request in REQUESTS:
        first, *rest = table.units[table.blocks_of(request)].tolist()
        assert first == [-1] * SHAPE.num_groups
        assert all(unit >= 0 for units in rest for unit in units)
    assert table.uncached_tokens(REQUESTS).tolist() == [SHAPE.block_tokens] * len(REQUESTS)


def test_restoring_all_layers_of_a_block_at_once_takes_the_whole_block():
    """Example B's transient units are as many as were evicted; A's are half of them."""
    evicted = SHAPE.num_groups
    assert transient_units(*EXAMPLES["B"], SHAPE) == evicted
    assert transient_units(*EXAMPLES["A"], SHAPE) == evicted / 2
