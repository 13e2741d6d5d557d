"""From ratios to whole blocks, and to the work of the step that they lead to."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_sgl.policies import Batch, Ratios
from ellm_sgl.policies.planned import evictable_tokens, planned_tokens, select, step_work
from ellm_sgl.policies.testing import make_state, requests


@pytest.mark.parametrize(
    ("tokens", "shared", "expected"),
    [
        (1, 0, 0),
        (16, 0, 0),  # the last block stays, full or not
        (17, 0, 16),
        (100, 0, 96),
        (100, 32, 64),
        (32, 32, 0),
    ],
)
def test_the_last_block_and_shared_ones_stay(tokens: int, shared: int, expected: int) -> None:
    assert evictable_tokens(requests([tokens], shared_tokens=[shared]), 16).tolist() == [expected]


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0.0, 0), (0.159, 0), (0.16, 16), (0.5, 48), (0.999, 96)]
)
def test_ratios_are_rounded_down_to_blocks(ratio: float, expected: int) -> None:
    assert planned_tokens(requests([100]), np.array([ratio]), 16).tolist() == [expected]


def test_select_keeps_the_order_asked_for() -> None:
    chosen = select(requests([10, 20, 30], priority=[1, 2, 3]), (2, 0))
    assert chosen.tokens.tolist() == [30, 10] and chosen.priority.tolist() == [3, 1]
    assert len(select(chosen, ())) == 0


def test_work_counts_who_runs_and_who_is_admitted() -> None:
    state = make_state(
        requests([100, 200, 300], shared_tokens=[32, 0, 0]),
        requests([50, 400]),
        device_tokens=4096,
    )
    batch = Batch(admit=(1,), pause=(1,))
    work = step_work(state, batch, Ratios(np.array([0.5, 0.5, 0.0]), np.array([0.1])))
    assert work.decode_rows == 3  # 100, 300 and 400
    assert work.decode_tokens == 800
    assert work.restored_tokens == 48 + 0 + 32
    assert work.restored_squares == 48**2 + 32**2
    assert work.restored_prefix == 48 * 32
    assert work.swap_tokens == 0


@pytest.mark.parametrize(
    ("host_tokens", "on_host", "fetched"), [(4096, 0, 16), (4096, 32, 48), (16, 16, 16), (0, 0, 0)]
)
def test_what_the_host_has_or_can_take_is_fetched(
    host_tokens: int, on_host: int, fetched: int
) -> None:
    running = requests([100], uncached_tokens=32, uncached_on_host=on_host)
    state = make_state(running, device_tokens=4096, host_tokens=host_tokens)
    work = step_work(state, Batch(admit=()), Ratios(np.array([0.5]), np.zeros(0)))
    assert (work.restored_tokens, work.swap_tokens) == (48, fetched)
