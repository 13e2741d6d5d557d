"""FlashInfer itself, on a CUDA device: it takes our plans and computes attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from ellm_sgl.kernels.experimental.cuda import DividedAttention
from ellm_sgl.kernels.experimental.flashinfer.attention import FlashInferAttention
from ellm_sgl.kernels.experimental.flashinfer.graph import FlashInferGraphSteps
from ellm_sgl.kernels.experimental.triton.attention import FusedAttention
from tests.kernels.cpu_steps import BF16, Inputs, Sizes, in_two_groups, make, sizes
from tests.kernels.on_device import CUDA, check_on_device, moved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def ragged() -> FlashInferAttention:
    pytest.importorskip("flashinfer")
    return FlashInferAttention(CUDA)


def tolerance(inputs: Inputs) -> float:
    """Two roundings more than ours, at the merge."""
    longest = max(request.new.end_position for request in inputs.layout.requests)
    return 4 * inputs.tolerance(longest)


def few_kernels(sizes: Sizes, missing: float) -> Sizes:
    """Sizes that FlashInfer compiles one kernel each for."""
    shape = replace(sizes, row_type=BF16, pool_type=BF16, head_dim=128, block_tokens=16)
    return replace(shape, group=4 if sizes.group > 1 else 1, missing=missing)


@settings(max_examples=60)
@given(sizes=sizes())
def test_agrees_with_the_reference(ragged: FlashInferAttention, sizes: Sizes) -> None:
    inputs = make(few_kernels(sizes, missing=0.0))
    check_on_device(inputs, ragged, tolerance(inputs))


@settings(max_examples=60)
@given(sizes=sizes())
def test_the_fused_kernel_takes_the_rest(ragged: FlashInferAttention, sizes: Sizes) -> None:
    inputs = make(few_kernels(sizes, missing=0.05))
    check_on_device(inputs, DividedAttention(ragged, FusedAttention(CUDA)), tolerance(inputs))


@pytest.mark.parametrize("group", [1, 4])
def test_layer_groups_share_a_plan(ragged: FlashInferAttention, group: int) -> None:
    requests = (40, 1), (50, 20), (0, 9)
    for inputs, layout in in_two_groups(Sizes(requests, 16, 2, group, 128, BF16, BF16, 0.0)):
        here = replace(inputs, layout=layout)
        check_on_device(here, ragged, tolerance(here))


@pytest.mark.parametrize("group", [1, 4])
def test_a_graph_replays_other_steps(ragged: FlashInferAttention, group: int) -> None:
    """Captured for four rows of one token; replayed for fewer rows of many."""
    decoding = Sizes(((700, 1), (33, 1), (0, 1)), 16, 2, group, 128, BF16, BF16, 0.0)
    other = replace(decoding, requests=((20, 1), (530, 1)))
    steps = [in_two_groups(decoding), in_two_groups(other)]
    pool = moved(steps[0][0][0].keys)
    graph_steps = FlashInferGraphSteps(ragged, 2, 4, len(pool), pool, heads=2 * group)
    graph_steps.capture(4)
    q, k, v = (torch.zeros(4, heads, 128, dtype=BF16, device=CUDA) for heads in (2 * group, 2, 2))
    pools = [(torch.zeros_like(pool), torch.zeros_like(pool)) for _ in range(2)]
    graph, scale = torch.cuda.CUDAGraph(), steps[0][0][0].scale
    with torch.cuda.graph(graph):
        outs = [
            graph_steps.run(q, k, v, *pools[i], layer_group=i, first_layer=True, scale=scale)
            for i in range(2)
        ]
    for step in (*steps, steps[0]):
        graph_steps.load(moved(step[0][1].stacked).layouts(), 4)
        # Both groups are given the same rows, so their outputs are looked at in turn.
        for (inputs, layout), pool_of_group, out in zip(step, pools, outs, strict=True):
            here = replace(inputs, layout=layout)
            expected = check_on_device(here, ragged, tolerance(here))
            given = here.q, here.k, here.v, here.keys, here.values
            for target, source in zip((q, k, v, *pool_of_group), given, strict=True):
                target[: len(source)].copy_(source)
            graph.replay()
            atol = 2 * tolerance(here)
            torch.testing.assert_close(out[: layout.rows], expected, rtol=0, atol=atol)
