"""The roofline: known limits, monotone in every field, also after learning."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.latency import HardwareProfile, ModelShape, RooflineLatencyModel, StepWork
from tests.latency.machines import CPU, GPU, LLAMA, MOE, TINY, random_work, work_of

GROWING = [f.name for f in dataclasses.fields(StepWork) if f.name != "recompute_share"]
PAIRS = [(LLAMA, GPU), (MOE, GPU), (TINY, CPU), (MOE, CPU)]
LAYER_WEIGHTS = LLAMA.layers * (LLAMA.attention_weights + LLAMA.expert_weights)
HEAD_WEIGHTS = LLAMA.hidden * LLAMA.vocabulary
FREE = dataclasses.replace(GPU, step_overhead_s=0.0, row_overhead_s=0.0)


def seconds(shape: ModelShape, profile: HardwareProfile, work: StepWork) -> float:
    return float(RooflineLatencyModel(shape, profile).step_seconds(work))


def test_one_decode_row_costs_reading_weights_and_kv_once() -> None:
    read = 2 * (LAYER_WEIGHTS + HEAD_WEIGHTS) + 500 * LLAMA.kv_bytes_per_token
    assert seconds(LLAMA, FREE, StepWork(1, 500)) == pytest.approx(read / FREE.device_bytes_per_s)


def test_a_long_prompt_costs_its_operations_and_logits_of_one_row() -> None:
    n = 8192
    work = StepWork(0, 0, prefill_rows=n, prefill_pairs=n * (n + 1) // 2)
    linear = 2 * (LAYER_WEIGHTS * n + HEAD_WEIGHTS) / FREE.flops
    pairs = 4 * LLAMA.layers * LLAMA.heads * LLAMA.head_dim * n * (n + 1) / 2
    assert seconds(LLAMA, FREE, work) == pytest.approx(linear + pairs / FREE.attention_flops)


def test_span_rows_are_free_while_weights_are_being_read() -> None:
    without = StepWork(8, 8 * 500)
    few = dataclasses.replace(without, restored_tokens=16)
    many = dataclasses.replace(without, restored_tokens=2048)
    attention = 8 * 4 * LLAMA.layers * LLAMA.heads * LLAMA.head_dim / GPU.attention_flops
    base = seconds(LLAMA, GPU, without)
    assert seconds(LLAMA, GPU, few) == pytest.approx(base + attention)
    assert seconds(LLAMA, GPU, many) > 1.5 * base


def test_rows_that_run_through_no_layer_cost_nothing() -> None:
    work = dataclasses.replace(work_of([500, 700], [200, 300]), recompute_share=0.0)
    assert seconds(LLAMA, GPU, work) == pytest.approx(seconds(LLAMA, GPU, StepWork(2, 1200)))


def test_turning_between_prompts_and_decoding_takes_its_own_time() -> None:
    profile = dataclasses.replace(CPU, phase_change_s=3e-3)
    steady = StepWork(4, 2000)
    turned = dataclasses.replace(steady, phase_changes=1)
    gap = seconds(TINY, profile, turned) - seconds(TINY, profile, steady)
    assert gap == pytest.approx(3e-3)
    assert seconds(TINY, CPU, turned) == seconds(TINY, CPU, steady)


def test_to_restore_anything_takes_a_time_of_its_own() -> None:
    profile = dataclasses.replace(CPU, restore_overhead_s=2e-3, fetch_share=0.0)
    none = StepWork(4, 2000)
    some = dataclasses.replace(none, restored_tokens=16, swap_tokens=16, recompute_share=0.0)
    gap = seconds(TINY, profile, some) - seconds(TINY, profile, none)
    assert gap == pytest.approx(2e-3)


def test_a_transfer_hides_behind_the_step_or_bounds_it() -> None:
    step = StepWork(4, 2000, recompute_share=0.25)
    alone = seconds(LLAMA, GPU, step)
    assert seconds(LLAMA, GPU, dataclasses.replace(step, swap_tokens=10)) == alone
    wire = 0.75 * 1e6 * LLAMA.kv_bytes_per_token / GPU.link_bytes_per_s
    swapped = seconds(LLAMA, GPU, dataclasses.replace(step, swap_tokens=1e6))
    assert swapped == pytest.approx(wire + GPU.link_latency_s)


def test_experts_read_are_those_that_even_choices_touch() -> None:
    rng = np.random.default_rng(0)
    rows, k, experts = 20, MOE.experts_per_token, MOE.experts
    touched = np.mean([
        len({int(e) for _ in range(rows) for e in rng.permutation(experts)[:k]})
        for _ in range(300)
    ])  # fmt: skip
    always = MOE.layers * MOE.attention_weights + MOE.hidden * MOE.vocabulary
    read = 2 * (always + MOE.layers * MOE.expert_weights * touched) / FREE.device_bytes_per_s
    assert seconds(MOE, FREE, StepWork(rows, 0)) == pytest.approx(read, rel=0.01)


def test_one_row_reads_just_its_experts_and_all_chosen_reads_all() -> None:
    dense = dataclasses.replace(MOE, experts_per_token=MOE.experts)
    always = MOE.layers * MOE.attention_weights + MOE.hidden * MOE.vocabulary
    for shape, touched in ((MOE, MOE.experts_per_token), (dense, MOE.experts)):
        read = 2 * (always + MOE.layers * MOE.expert_weights * touched) / FREE.device_bytes_per_s
        assert seconds(shape, FREE, StepWork(1, 0)) == pytest.approx(read)


@pytest.mark.parametrize(("shape", "profile"), PAIRS)
def test_arrays_give_what_each_entry_gives(shape: ModelShape, profile: HardwareProfile) -> None:
    rng = np.random.default_rng(1)
    works = [random_work(rng) for _ in range(50)]
    stacked = StepWork(**{
        f.name: np.array([getattr(w, f.name) for w in works])
        for f in dataclasses.fields(StepWork)
    })  # fmt: skip
    together = RooflineLatencyModel(shape, profile).step_seconds(stacked)
    assert together.dtype == np.float64
    np.testing.assert_allclose(together, [seconds(shape, profile, w) for w in works])


def test_fields_broadcast() -> None:
    model = RooflineLatencyModel(TINY, CPU)
    work = StepWork(np.arange(1, 4)[:, None], 100, restored_tokens=np.arange(5)[None])
    assert model.step_seconds(work).shape == (3, 5)


@given(
    st.sampled_from(PAIRS), st.integers(0, 2**16), st.sampled_from(GROWING),
    st.floats(0.1, 5000), st.floats(0, 1), st.integers(0, 30),
)  # fmt: skip
def test_more_work_never_takes_less(
    pair: Any, seed: int, field: str, more: float, share: float, learnt: int
) -> None:
    rng = np.random.default_rng(seed)
    model = RooflineLatencyModel(*pair)
    for _ in range(learnt):
        work = random_work(rng)
        model.observe(work, float(model.step_seconds(work)) * float(rng.lognormal(0, 1)))
    swapped = float(rng.choice([0, 1e3, 1e5]))
    work = dataclasses.replace(random_work(rng), recompute_share=share, swap_tokens=swapped)
    grown = dataclasses.replace(work, **{field: getattr(work, field) + more})
    before, after = float(model.step_seconds(work)), float(model.step_seconds(grown))
    assert before >= 0
    assert after >= before * (1 - 1e-12)


def test_predicting_changes_nothing_and_learning_does() -> None:
    model = RooflineLatencyModel(TINY, CPU)
    work = work_of([300] * 8, [64] * 8)
    first = float(model.step_seconds(work))
    assert float(model.step_seconds(work)) == first
    model.observe(work, 1.2 * first)
    assert first < float(model.step_seconds(work)) < 1.3 * first


def test_a_step_bound_by_its_transfer_teaches_nothing_about_the_rest() -> None:
    model = RooflineLatencyModel(LLAMA, GPU)
    step = StepWork(4, 2000, recompute_share=0.0)
    before = float(model.step_seconds(step))
    model.observe(dataclasses.replace(step, swap_tokens=1e6), 60.0)
    assert float(model.step_seconds(step)) == before
