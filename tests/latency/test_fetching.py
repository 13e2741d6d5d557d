"""With a host tier, what the host has or can take is fetched, and the rest is recomputed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.latency import (
    FetchingLatencyModel,
    HostCopies,
    LatencyModel,
    RooflineLatencyModel,
    StepWork,
)
from ellm_sgl.policies.testing.generate import PROFILES, SHAPES

ALL_FITS = HostCopies(uncached=0, held=0, capacity=1 << 30)
WORK = StepWork(decode_rows=16, decode_tokens=16_000, restored_tokens=8_000, restored_squares=4e6)


def inner() -> LatencyModel:
    return RooflineLatencyModel(SHAPES["llama2-7b"], PROFILES["h100"])


def test_restoring_costs_a_transfer_instead_of_computation() -> None:
    fetched = StepWork(16, 16_000, 8_000, 4e6, swap_tokens=8_000, recompute_share=0.0)
    seconds = FetchingLatencyModel(inner(), ALL_FITS).step_seconds(WORK)
    assert seconds == inner().step_seconds(fetched) < inner().step_seconds(WORK)


def test_what_a_full_host_tier_does_not_have_is_recomputed() -> None:
    full = HostCopies(uncached=8_000, held=0, capacity=0)
    assert FetchingLatencyModel(inner(), full).step_seconds(WORK) == inner().step_seconds(WORK)
    half = FetchingLatencyModel(inner(), HostCopies(uncached=8_000, held=6_000, capacity=6_000))
    in_part = StepWork(16, 16_000, 8_000, 4e6, swap_tokens=8_000, recompute_share=0.25)
    assert half.step_seconds(WORK) == inner().step_seconds(in_part)


@pytest.mark.parametrize(
    ("restored", "fetched"),
    # 100 are missing, 60 of them on the host, which holds 80.
    [(0, 0), (50, 50), (60, 60), (100, 60), (110, 70), (120, 80), (500, 80)],
)
def test_the_host_gives_what_it_has_and_takes_what_fits(restored: int, fetched: int) -> None:
    assert HostCopies(uncached=100, held=60, capacity=80).fetched(restored) == fetched


@given(
    uncached=st.integers(0, 20_000), held=st.floats(0, 1), capacity=st.integers(0, 20_000)
)  # fmt: skip
def test_restoring_more_never_costs_less(uncached: int, held: float, capacity: int) -> None:
    copies = HostCopies(uncached, min(int(held * uncached), capacity), capacity)
    restored = np.arange(0, 20_000, 500)
    work = StepWork(16, 16_000, restored, 500 * restored)
    seconds = FetchingLatencyModel(inner(), copies).step_seconds(work)
    assert (np.diff(seconds) >= -1e-12).all()
    assert np.max(copies.fetched(restored)) <= capacity


def test_steps_that_restore_nothing_are_as_before() -> None:
    work = StepWork(decode_rows=16, decode_tokens=16_000)
    model = FetchingLatencyModel(inner(), ALL_FITS)
    assert model.step_seconds(work) == inner().step_seconds(work)


def test_it_is_not_the_one_that_learns() -> None:
    with pytest.raises(TypeError):
        FetchingLatencyModel(inner(), ALL_FITS).observe(StepWork(1, 1), 1.0)
