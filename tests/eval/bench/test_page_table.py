"""The page table's cost by F, and what a batch found in the middle of its work looks like."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_sgl.eval.bench.page_table import RUNNING, _midway, measure_table


@pytest.mark.parametrize("group", [1, 4])
def test_fragmentation_is_below_the_papers_for_its_lengths(group):
    assert 0.0 < measure_table(group).fragmentation < 0.0128


def test_units_that_a_last_shorter_group_leaves_empty_count_as_fragmentation():
    # 40 layers in groups of 16: the third group's units are half empty.
    assert measure_table(16).fragmentation > 1 - 40 / 48


def test_long_answers_are_found_more_often_at_any_point():
    prompt = np.full(100, 50)
    last = prompt + np.where(np.arange(100) < 50, 10, 990)
    found = _midway(prompt, last, np.random.default_rng(0))
    assert len(found) == RUNNING
    assert sum(end == 1040 for _, end in found) > 0.9 * RUNNING
    assert all(50 <= now <= end for now, end in found)
