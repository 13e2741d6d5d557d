"""FlashInfer is told the right thing: its plans, carried out in plain PyTorch, are attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings

from ellm_sgl.kernels import reference
from ellm_sgl.kernels.experimental.flashinfer import FlashInferAttention, divide
from tests.kernels import flashinfer_stand_in
from tests.kernels.attention_inputs import AttentionInputs, attention_inputs
from tests.kernels.cpu_steps import F32, Sizes, make, sizes

kernel = FlashInferAttention(torch.device("cpu"), flashinfer_stand_in)
TOLERANCE = 1e-5
"""fp32 values of a few units, partial results and log-sum-exps rounded to fp32."""


@settings(max_examples=30)
@given(inputs=attention_inputs(((F32, F32),)))
def test_agrees_with_the_reference_on_random_steps(inputs: AttentionInputs) -> None:
    expected, *expected_pool = inputs.run(reference.mixed_attention)
    out, *pool = inputs.run(kernel)
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(pool, expected_pool, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=25)
@given(sizes=sizes())
def test_agrees_with_the_reference_on_any_sizes(sizes: Sizes) -> None:
    inputs = make(replace(sizes, row_type=F32, pool_type=F32, head_dim=32, missing=0.1))
    expected, _, _ = inputs.run(reference.mixed_attention)
    out, _, _ = inputs.run(kernel)
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)


def test_a_decoded_token_with_nothing_missing_needs_only_pages() -> None:
    layout = make(Sizes(((40, 1), (16, 1), (15, 1)), 16, 1, 1, 32, F32, F32, 0.0)).layout
    division = divide(layout, 16, 3)
    assert division.decode_rows.tolist() == [0, 1, 2]
    assert division.decode.indptr.tolist() == [0, 3, 5, 6]
    assert division.decode.last_tokens.tolist() == [9, 1, 16]
    assert len(division.rows) == division.resident_rows == 0
