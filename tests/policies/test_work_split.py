"""(l1, l2) and δ, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.latency import HardwareProfile, ModelShape, StepWork
from ellm_sgl.policies import SystemState
from ellm_sgl.policies.checks import check_split
from ellm_sgl.policies.testing import make_state, random_state, requests
from ellm_sgl.policies.work_split import plan_split

# One layer: 8 x 2 x (2 x 4 + 2 x 2) = 192 weights of projections, 3 x 8 x 16 = 384 of the MLP.
# A row of a layer: 2 x 576 = 1,152 FLOPs; a (row, token) pair of a layer: 4 x 4 x 2 = 32 FLOPs.
# A token of KV: 2 x 10 x 2 x 2 x 2 = 160 bytes in all ten layers.
SHAPE = ModelShape(
    layers=10, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocabulary=1000
)
HARDWARE = HardwareProfile(
    name="by hand", flops=1152.0, device_bytes_per_s=1e3, link_bytes_per_s=160.0,
    link_latency_s=0.0, step_overhead_s=0.0, row_overhead_s=0.0, attention_flops=1e30,
)  # fmt: skip


def state_on(hardware: HardwareProfile, model: ModelShape = SHAPE) -> SystemState:
    return make_state(requests([64]), device_tokens=256, model=model, hardware=hardware)


def step(rows: int, restored: int = 0, fetched: int = 0) -> StepWork:
    """No tokens and no pairs: the linear layers only."""
    return StepWork(
        decode_rows=rows,
        decode_tokens=-rows,  # cancels the one pair of each row with itself
        restored_tokens=restored,
        restored_squares=-restored,
        swap_tokens=fetched,
    )


@pytest.mark.parametrize(
    ("link_tokens_per_s", "layers"),
    # 100 tokens: recomputing takes 100 s a layer, decoding 10 s. Fetching takes
    # 100 / speed / 10 s a layer; (1 - share) of it, rather than 10 + share x 100, is the step.
    [(1.1, (1, 0)), (0.8, (1, 0)), (0.25, (3, 1)), (0.15, (2, 1)), (0.12, (3, 2)),
     (0.08, (1, 1)), (0.04, (1, 2)), (1e-6, (0, 1))],
)  # fmt: skip
def test_the_step_is_the_shortest_there_is(
    link_tokens_per_s: float, layers: tuple[int, int]
) -> None:
    hardware = replace(HARDWARE, link_bytes_per_s=160 * link_tokens_per_s)
    split = plan_split(state_on(hardware), step(10, restored=100, fetched=100))
    assert (split.swap_layers, split.recompute_layers) == layers


def test_what_the_host_lacks_is_no_choice() -> None:
    # Recomputing takes 100 s a layer, and fetching half of the tokens 50 s, beside the other half's
    # recomputation. As if all 100 could be fetched, (1, 1) would seem shorter: 60 s against 100.
    hardware = replace(HARDWARE, link_bytes_per_s=16.0)
    split = plan_split(state_on(hardware), step(10, restored=100, fetched=100))
    assert (split.swap_layers, split.recompute_layers) == (1, 1)
    split = plan_split(state_on(hardware), step(10, restored=100, fetched=50))
    assert (split.swap_layers, split.recompute_layers) == (1, 0)


def test_the_latency_of_the_link_counts() -> None:
    # Eq. (6): (α k + β) l1 / L. One layer: 1 token at 1 token/s and β = 239 s make 24 s, while
    # decoding takes 10 s and recomputing the token's row 1 s.
    split = plan_split(state_on(HARDWARE), step(10, restored=1, fetched=1))
    assert (split.swap_layers, split.recompute_layers) == (1, 0)
    hardware = replace(HARDWARE, link_latency_s=239.0)
    split = plan_split(state_on(hardware), step(10, restored=1, fetched=1))
    assert (split.swap_layers, split.recompute_layers) == (1, 2)


def test_all_is_recomputed_if_nothing_is_fetched() -> None:
    split = plan_split(state_on(HARDWARE), step(10, restored=100))
    assert (split.swap_layers, split.recompute_layers) == (0, 1)


@pytest.mark.parametrize(
    ("rows", "restored", "delta"),
    # l1 = 0, l2 = 1: V_K1 : V_K2 = restored : rows.
    [(10, 10, 512), (30, 10, 256), (10, 30, 768), (100, 30, 224), (1, 10**6, 992), (10**6, 1, 32),
     (10, 0, 32)],
)  # fmt: skip
def test_threads_are_shared_out_by_work(rows: int, restored: int, delta: int) -> None:
    assert plan_split(state_on(HARDWARE), step(rows, restored)).delta == delta


def test_decoding_goes_through_the_fetched_layers_too() -> None:
    # (l1, l2) = (1, 1): V_K1 : V_K2 = 20 x 1 : 10 x 2. Fetching half of 20 tokens' layers takes
    # 20 s a layer, as long as decoding and recomputing the other half.
    hardware = replace(HARDWARE, link_bytes_per_s=8.0)
    split = plan_split(state_on(hardware), step(10, restored=20, fetched=20))
    assert (split.swap_layers, split.recompute_layers, split.delta) == (1, 1, 512)


def test_attention_counts_for_both_sides() -> None:
    # V_K1 = 1,152 x 8 + 32 x (0 + (64 + 8) / 2) = 10,368;
    # V_K2 = 1,152 x 4 + 32 x (176 + 4) = 10,368.
    work = StepWork(decode_rows=4, decode_tokens=176, restored_tokens=8, restored_squares=64)
    assert plan_split(state_on(HARDWARE), work).delta == 512


def test_a_row_goes_through_its_own_experts_only() -> None:
    moe = replace(SHAPE, intermediate=8, experts=8, experts_per_token=2)  # 2 x 192 = 384 weights
    work = StepWork(decode_rows=4, decode_tokens=176, restored_tokens=8, restored_squares=64)
    assert plan_split(state_on(HARDWARE, moe), work).delta == 512


@given(
    seed=st.integers(0, 50),
    rows=st.integers(0, 1024),
    restored=st.integers(0, 10**6),
    fetched=st.integers(0, 10**6),
)
def test_every_answer_is_one_that_can_be_applied(
    seed: int, rows: int, restored: int, fetched: int
) -> None:
    state = random_state(np.random.default_rng(seed))
    work = StepWork(rows, 300 * rows, restored, 100 * restored, 50 * restored, swap_tokens=fetched)
    check_split(plan_split(state, work))
