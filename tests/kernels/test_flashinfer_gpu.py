"""FlashInfer itself, on a CUDA device: it takes our plans and computes attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from ellm_sgl.kernels.experimental.flashinfer import FlashInferAttention
from tests.kernels.cpu_steps import BF16, Sizes, make, sizes
from tests.kernels.on_device import CUDA, check_on_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def kernel() -> FlashInferAttention:
    pytest.importorskip("flashinfer")
    return FlashInferAttention(CUDA)


@settings(max_examples=60)
@given(sizes=sizes())
def test_agrees_with_the_reference(kernel: FlashInferAttention, sizes: Sizes) -> None:
    """Blocks of 16, as it is compiled for few sizes; two roundings more than ours, at the merge."""
    shape = replace(sizes, row_type=BF16, pool_type=BF16, head_dim=128, block_tokens=16)
    inputs = make(replace(shape, group=4 if sizes.group > 1 else 1, missing=0.05))
    longest = max(request.new.end_position for request in inputs.layout.requests)
    check_on_device(inputs, kernel, 4 * inputs.tolerance(longest))
