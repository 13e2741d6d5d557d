"""`torch_paged` agrees with the reference, and reads nothing that it must not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings

from ellm_sgl.kernels import reference, torch_paged
from ellm_sgl.memory import NONE
from tests.kernels.attention_inputs import AttentionInputs, attention_inputs, make_inputs

FLOAT32 = (torch.float32, torch.float32)
BFLOAT16 = (torch.bfloat16, torch.bfloat16)
BFLOAT16_POOL = (torch.float32, torch.bfloat16)


def tolerance(inputs: AttentionInputs) -> float:
    """How far a kernel may be from the reference, which rounds only its result.

    bf16 rounds each probability, by half an epsilon of it, and the result: together at most one
    epsilon of the largest value; one more for what PyTorch's kernels do in between. Sums are
    fp32 in both: up to 64 products and 80 tokens, whose roundings add up like a random walk.
    """
    epsilons = 2 if inputs.q.dtype == torch.bfloat16 else 2 + (64 + 80) ** 0.5
    largest = max(float(sequence.v.abs().max()) for sequence in inputs.sequences)
    return epsilons * torch.finfo(inputs.q.dtype).eps * largest


@given(inputs=attention_inputs((FLOAT32, BFLOAT16, BFLOAT16_POOL)))
def test_agrees_with_the_reference(inputs: AttentionInputs) -> None:
    expected, _, _ = inputs.run(reference.mixed_attention)
    out, _, _ = inputs.run(torch_paged.mixed_attention)
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance(inputs))


@settings(max_examples=60)
@given(inputs=attention_inputs((FLOAT32, BFLOAT16, BFLOAT16_POOL)))
def test_writes_the_pool_as_the_reference_does(inputs: AttentionInputs) -> None:
    _, *expected = inputs.run(reference.mixed_attention)
    _, *pool = inputs.run(torch_paged.mixed_attention)
    torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=60)
@given(inputs=attention_inputs((FLOAT32, BFLOAT16, BFLOAT16_POOL)))
def test_new_rows_come_out_the_same_to_the_bit_as_with_nothing_missing(
    inputs: AttentionInputs,
) -> None:
    step = inputs.step
    table = step.table
    everything = np.flatnonzero(table.references(range(table.num_blocks + 1)))
    table.place(everything.tolist())
    complete = replace(
        step, resident=table.units.copy(), depths=tuple(np.zeros_like(d) for d in step.depths)
    )
    assert not (table.units[everything] == NONE).any()
    cached = make_inputs(complete, inputs.group, inputs.heads, inputs.q.dtype, inputs.keys.dtype)
    new_rows = cached.layout.rows
    out, _, _ = inputs.run(torch_paged.mixed_attention)
    expected, _, _ = cached.run(torch_paged.mixed_attention)
    assert torch.equal(out[:new_rows], expected)
