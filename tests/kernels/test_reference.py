"""The reference is causal attention over complete sequences, wherever their KV comes from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch.nn.functional import scaled_dot_product_attention

from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, RowRange
from ellm_sgl.kernels.reference import mixed_attention
from tests.kernels.attention_inputs import HEADS, AttentionInputs, Heads, attention_inputs
from tests.steps import rows_of

FLOAT64 = ((torch.float64, torch.float64),)


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of one sequence, [tokens, heads, head_dim], by PyTorch."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_prefill_of_a_whole_prompt_is_full_attention(sizes: Heads) -> None:
    torch.manual_seed(0)
    tokens, block_tokens, units = 10, 4, [3, 1, 2]
    new = RowRange(row=0, position=0, size=tokens)
    layout = GroupLayout.of(
        rows=tokens,
        requests=(RequestLayout(new, spans=(), blocks=slice(0, 3), unstored_new=False),),
        units=torch.tensor(units),
        write_rows=slice(0, tokens),
        write_units=torch.tensor(units).repeat_interleave(block_tokens)[:tokens],
        write_offsets=torch.arange(tokens) % block_tokens,
    )
    q = torch.randn(tokens, sizes.heads, sizes.head_dim, dtype=torch.float64)
    k, v = torch.randn(2, tokens, sizes.kv_heads, sizes.head_dim, dtype=torch.float64)
    keys, values = torch.full((2, 4, block_tokens, *k.shape[1:]), torch.nan, dtype=torch.float64)
    out = mixed_attention(q, k, v, keys, values, layout, scale=0.2)
    torch.testing.assert_close(out, full_attention(q, k, v, scale=0.2))


@settings(max_examples=60)
@given(inputs=attention_inputs(FLOAT64))
def test_any_step_is_full_attention_at_the_rows_asked_for(inputs: AttentionInputs) -> None:
    out, _, _ = inputs.run(mixed_attention)
    assert len(out) == (inputs.out_rows or inputs.layout.rows)
    for i, rows in rows_of(inputs.layout):
        if rows.row < len(out):
            sequence = inputs.sequences[i]
            full = full_attention(sequence.q, sequence.k, sequence.v, inputs.scale)
            here = out[rows.row : rows.end_row]
            torch.testing.assert_close(here, full[rows.position : rows.end_position])


@settings(max_examples=60)
@given(inputs=attention_inputs(FLOAT64))
def test_afterwards_the_pool_holds_every_token_that_has_a_unit(inputs: AttentionInputs) -> None:
    _, keys, values = inputs.run(mixed_attention)
    expected_keys, expected_values = inputs.stored(inputs.step.table.units)
    torch.testing.assert_close(keys, expected_keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)
