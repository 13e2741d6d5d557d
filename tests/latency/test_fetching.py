"""With a host tier, what is restored is fetched."""

from __future__ import annotations

import pytest

from ellm_sgl.latency import FetchingLatencyModel, RooflineLatencyModel, StepWork
from ellm_sgl.policies.testing.generate import PROFILES, SHAPES


def test_restoring_costs_a_transfer_instead_of_computation() -> None:
    inner = RooflineLatencyModel(SHAPES["llama2-7b"], PROFILES["h100"])
    model = FetchingLatencyModel(inner)
    work = StepWork(
        decode_rows=16, decode_tokens=16_000, restored_tokens=8_000, restored_squares=4e6
    )
    fetched = StepWork(16, 16_000, 8_000, 4e6, swap_tokens=8_000, recompute_share=0.0)
    assert model.step_seconds(work) == inner.step_seconds(fetched) < inner.step_seconds(work)


def test_steps_that_restore_nothing_are_as_before() -> None:
    inner = RooflineLatencyModel(SHAPES["llama2-7b"], PROFILES["h100"])
    work = StepWork(decode_rows=16, decode_tokens=16_000)
    assert FetchingLatencyModel(inner).step_seconds(work) == inner.step_seconds(work)


def test_it_is_not_the_one_that_learns() -> None:
    model = FetchingLatencyModel(RooflineLatencyModel(SHAPES["llama2-7b"], PROFILES["h100"]))
    with pytest.raises(TypeError):
        model.observe(StepWork(1, 1), 1.0)
