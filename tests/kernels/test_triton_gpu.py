"""The fused Triton kernel on a CUDA device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from ellm_sgl.kernels.experimental.triton.attention import FusedAttention
from tests.kernels.cpu_steps import BF16, F16, F32, Inputs, Sizes, make, sizes
from tests.kernels.on_device import CUDA, check_on_device, moved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIXED = Sizes(((2000, 1), (900, 70), (5, 1), (0, 90), (7000, 2)), 16, 2, 4, 128, BF16, BF16, 0.1)


def tolerance(inputs: Inputs) -> float:
    """As on the CPU, and twice that in 16 bits, where probabilities are rounded too; fp32 is made
    of three tf32 products, whose error is a few times fp32's own."""
    longest = max(request.new.end_position for request in inputs.layout.requests)
    return inputs.tolerance(longest) * (4 if inputs.q.dtype == F32 else 2)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("delta", [0.0, 0.03, 0.5, 1.0])
@settings(max_examples=12)  # nearly each is a kernel of its own, which takes seconds to compile
@given(sizes=sizes())
def test_agrees_with_the_reference_on_any_sizes(
    sizes: Sizes, dtype: torch.dtype, delta: float
) -> None:
    inputs = make(replace(sizes, row_type=dtype, pool_type=dtype))
    check_on_device(inputs, FusedAttention(CUDA), tolerance(inputs), delta=delta)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_delta_and_the_number_of_programs_change_no_bit(dtype: torch.dtype, group: int) -> None:
    inputs = make(replace(MIXED, group=group, row_type=dtype, pool_type=dtype))
    kernel = FusedAttention(CUDA)
    expected = check_on_device(inputs, kernel, tolerance(inputs))
    there = moved(inputs)
    for programs in (1, 5, kernel.programs):
        other = FusedAttention(CUDA, programs)
        for turn in range(33):  # every δ in steps of 32 of 1,024
            out, _, _ = there.run(other, delta=turn / 32)
            assert torch.equal(out, expected)


def test_the_same_to_the_bit_every_time() -> None:
    """Programs meet differently each time: a race would show here, not in the interpreter."""
    there = moved(make(MIXED))
    kernel = FusedAttention(CUDA)
    expected, _, _ = there.run(kernel)
    for _ in range(300):
        out, _, _ = there.run(kernel)
        assert torch.equal(out, expected)


def test_a_graph_replays_the_launch() -> None:
    there = moved(make(MIXED))
    kernel = FusedAttention(CUDA)
    expected, _, _ = there.run(kernel)
    prepared = kernel.prepare(there.layout, there.keys.shape[1], MIXED.group)
    keys, values = there.keys.clone(), there.values.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.run(
            there.q, there.k, there.v, keys, values, prepared, there.scale, expected.clone(), 0.5
        )
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
