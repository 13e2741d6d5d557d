"""Tensors for one attention call of a random step, with everything unreadable set to NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from ellm_sgl.kernels.layout import GroupLayout
from ellm_sgl.memory import NONE
from tests.steps import Step, rows_of, steps


@dataclass(frozen=True)
class Heads:
    """Sizes of one layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int


HEADS = (
    Heads(heads=4, kv_heads=4, head_dim=8),
    Heads(heads=6, kv_heads=2, head_dim=16),
    Heads(heads=2, kv_heads=1, head_dim=32),
    Heads(heads=3, kv_heads=3, head_dim=64),
    Heads(heads=8, kv_heads=2, head_dim=64),
)


@dataclass(frozen=True)
class Sequence:
    """Q, K and V of all tokens of a request in one layer, [tokens, heads, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class AttentionInputs:
    """Arguments of `mixed_attention`, and what they were cut from."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    layout: GroupLayout
    heads: Heads
    sequences: tuple[Sequence, ...]
    step: Step
    group: int
    out_rows: int | None = None
    """Rows whose output is asked for; None: all."""

    @property
    def scale(self) -> float:
        return float(self.heads.head_dim**-0.5)

    def run(self, kernel: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(output, keys, values) of a kernel on copies of the pool."""
        keys, values = self.keys.clone(), self.values.clone()
        out = kernel(
            self.q, self.k, self.v, keys, values, self.layout, self.scale, out_rows=self.out_rows
        )
        return out, keys, values

    def stored(self, units: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a pool that holds all tokens with a unit in `units`; the rest NaN."""
        keys, values = torch.full_like(self.keys, torch.nan), torch.full_like(self.keys, torch.nan)
        for i, sequence in enumerate(self.sequences):
            for position in range(len(sequence.k)):
                block, offset = self.step.place_of(i, position)
                if (unit := units[block, self.group]) != NONE:
                    keys[unit, offset] = sequence.k[position].to(keys.dtype)
                    values[unit, offset] = sequence.v[position].to(values.dtype)
        return keys, values


def make_inputs(
    step: Step, group: int, heads: Heads, dtype: torch.dtype, pool_dtype: torch.dtype
) -> AttentionInputs:
    """The pool holds what it can as the step begins: no new token, no block placed since."""
    layout = step.plan().groups[group]
    sequences = _sequences(step, heads, dtype)
    q = torch.full((layout.rows, heads.heads, heads.head_dim), torch.nan, dtype=dtype)
    k = torch.full((layout.rows, heads.kv_heads, heads.head_dim), torch.nan, dtype=dtype)
    v = k.clone()
    for i, rows in rows_of(layout):
        here, tokens = slice(rows.row, rows.end_row), slice(rows.position, rows.end_position)
        q[here], k[here], v[here] = (x[tokens] for x in _parts(sequences[i]))
    units, block_tokens = step.table.num_units + 1, step.table.shape.block_tokens
    pool = torch.empty(units, block_tokens, heads.kv_heads, heads.head_dim, dtype=pool_dtype)
    inputs = AttentionInputs(q, k, v, pool, pool, layout, heads, sequences, step, group)
    keys, values = inputs.stored(step.resident)
    for i, request in enumerate(step.requests):
        for position in range(request.start, request.end):
            block, offset = step.place_of(i, position)
            if (unit := step.resident[block, group]) != NONE:
                keys[unit, offset] = values[unit, offset] = torch.nan
    return replace(inputs, keys=keys, values=values)


@st.composite
def attention_inputs(
    draw: st.DrawFn, dtypes: tuple[tuple[torch.dtype, torch.dtype], ...]
) -> AttentionInputs:
    """One layer group of a random step. `dtypes`: pairs (of the rows, of the pool)."""
    step = draw(steps())
    group = draw(st.integers(0, step.table.shape.num_groups - 1), "group")
    dtype, pool_dtype = draw(st.sampled_from(dtypes))
    inputs = make_inputs(step, group, draw(st.sampled_from(HEADS)), dtype, pool_dtype)
    needed_above = step.plan().rows_in(group + 1)
    return replace(inputs, out_rows=draw(st.sampled_from([None, needed_above]), "out_rows"))


def _parts(sequence: Sequence) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return sequence.q, sequence.k, sequence.v


def _sequences(step: Step, heads: Heads, dtype: torch.dtype) -> tuple[Sequence, ...]:
    """Random values; tokens in a block that requests share have the same in all of them."""
    generator = torch.Generator().manual_seed(0)

    def random(tokens: int, count: int) -> torch.Tensor:
        return torch.randn(tokens, count, heads.head_dim, generator=generator).to(dtype)

    sequences: list[Sequence] = []
    for i, request in enumerate(step.requests):
        counts = heads.heads, heads.kv_heads, heads.kv_heads
        sequence = Sequence(*(random(request.end, count) for count in counts))
        if i:
            shared = _shared_tokens(step, i)
            for own, first in zip(_parts(sequence), _parts(sequences[0]), strict=True):
                own[:shared] = first[:shared]
        sequences.append(sequence)
    return tuple(sequences)


def _shared_tokens(step: Step, seq_id: int) -> int:
    own, first = set(step.table.blocks_of(seq_id)), set(step.table.blocks_of(0))
    return len(own & first) * step.table.shape.block_tokens
