"""`SeparateRows`: the same outputs and the same KV as in one pass."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from ellm_sgl.kernels.torch_paged import mixed_attention
from ellm_sgl.memory import NONE, KVPool, PageTable, PoolShape
from ellm_sgl.step import NewTokens, StepPlan, plan_step
from ellm_sgl.step.separate import SeparateRows
from tests.step.tiny import (
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    SCALE,
    Attend,
    TinyDecoder,
    compute_fully,
)
from tests.steps import VOCABULARY, Step, recomputing, steps

SHAPE = PoolShape(num_layers=5, layer_group=2, block_tokens=4)


def make(shape: PoolShape = SHAPE) -> tuple[TinyDecoder, SeparateRows, list[str]]:
    """A decoder, its rows, and the list that notes when fetching begins again."""
    torch.manual_seed(0)
    decoder = TinyDecoder(shape.num_layers, VOCABULARY)
    restarts: list[str] = []
    return decoder, SeparateRows(decoder, shape, lambda: restarts.append("again")), restarts


def attend_separately(plan: StepPlan, pool: KVPool, separate: SeparateRows) -> Attend:
    """Attention as eLLM's backend computes it where fusion is off."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        layout = plan.groups[pool.shape.group_of(layer)]
        layout, (k, v) = separate.attend(layer, layout, (k, v))
        assert len(k) == layout.rows
        keys, values = pool.keys(layer), pool.values(layer)
        return mixed_attention(q, k, v, keys, values, layout, SCALE, len(q))

    return attend


def empty_pool(table: PageTable) -> KVPool:
    pool = KVPool(table.shape, table.num_units, KV_HEADS, HEAD_DIM, torch.float32, "cpu")
    pool.buffer.fill_(torch.nan)
    return pool


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@settings(max_examples=60)
@given(step=steps())
def test_new_rows_equal_the_full_computation_and_the_pool_gets_what_was_recomputed(
    step: Step,
) -> None:
    decoder, separate, _ = make(step.table.shape)
    pool, expected_pool = empty_pool(step.table), empty_pool(step.table)
    expected, tokens, positions = [], [], []
    for i, (request, known) in enumerate(zip(step.requests, step.tokens, strict=True)):
        hidden, kv = compute_fully(decoder, known)
        expected.append(hidden[request.start :])
        tokens.append(known[request.start :])
        positions.append(np.arange(request.start, request.end))
        for position in range(request.end):
            block, offset = step.place_of(i, position)
            for layer, pair in enumerate(kv):
                group = step.table.shape.group_of(layer)
                for units, at in ((step.resident, pool), (step.table.units, expected_pool)):
                    known_before = at is expected_pool or position < request.start
                    if units[block, group] != NONE and known_before:
                        at.keys(layer)[units[block, group], offset] = pair[0][position]
                        at.values(layer)[units[block, group], offset] = pair[1][position]
    plan = step.plan()
    with separate.running(plan):
        out = decoder(
            torch.as_tensor(np.concatenate(tokens)),
            torch.as_tensor(np.concatenate(positions)),
            attend_separately(plan, pool, separate),
        )
    torch.testing.assert_close(out, torch.cat(expected), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        pool.buffer[1:], expected_pool.buffer[1:], rtol=0, atol=1e-5, equal_nan=True
    )


def one_request(missing: int = 2) -> tuple[StepPlan, KVPool]:
    """The plan to decode token 10 of a request that lacks its first `missing` blocks."""
    table = PageTable(SHAPE, num_blocks=3, num_units=9)
    blocks = table.allocate(3)
    table.place(blocks)
    table.map(0, blocks, 11)
    for groups, block in enumerate(blocks[:missing].tolist(), start=1):
        table.evict(block, slice(0, groups))
    new = NewTokens(0, 10, 11)
    plan = plan_step(table, [new], recomputing(table, blocks), lambda _, a, b: np.arange(a, b))
    return plan, empty_pool(table)


def run(decoder: TinyDecoder, separate: SeparateRows, plan: StepPlan, pool: KVPool) -> torch.Tensor:
    with separate.running(plan):
        out: torch.Tensor = decoder(
            torch.tensor([10]), torch.tensor([10]), attend_separately(plan, pool, separate)
        )
    return out


def test_each_pass_sees_its_rows_and_the_first_ends_with_the_last_kv_needed() -> None:
    plan, pool = one_request()
    decoder, separate, restarts = make()
    seen: list[int] = []
    for layer in decoder.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(len(args[1])))
    mlps: list[int] = []
    for layer in decoder.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: mlps.append(len(args[0])))  # type: ignore[union-attr]
    run(decoder, separate, plan, pool)
    assert seen == [8, 8, 4, 4, *[1] * 5]
    assert mlps == [8, 8, 4, *[1] * 5]
    assert restarts == ["again"]


def test_a_step_without_spans_has_one_pass() -> None:
    plan, pool = one_request(missing=0)
    pool.buffer.zero_()
    decoder, separate, restarts = make()
    run(decoder, separate, plan, pool)
    assert restarts == []


def test_after_an_exception_nothing_is_kept() -> None:
    plan, pool = one_request()
    decoder, separate, _ = make()
    attend, kept = attend_separately(plan, pool, separate), list[int]()

    def fail(layer: int, *rows: torch.Tensor) -> torch.Tensor:
        if layer == 1:
            kept.extend(separate._kept)
            raise RuntimeError("out of memory")
        return attend(layer, *rows)

    with pytest.raises(RuntimeError, match="out of memory"), separate.running(plan):
        decoder(torch.tensor([10]), torch.tensor([10]), fail)
    assert kept == [0]
    assert not separate._kept and separate._plan is None and not separate._first_pass
    assert run(decoder, separate, plan, pool).shape == (1, HIDDEN)
