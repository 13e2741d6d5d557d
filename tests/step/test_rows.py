"""`MixedRows`: recomputed rows go through the model unseen, and what it computes stays the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from ellm_sgl.memory import NONE, KVPool, PageTable, PoolShape
from ellm_sgl.step import NewTokens, StepPlan, plan_step
from ellm_sgl.step.rows import MixedRows
from tests.step.tiny import (
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    TinyDecoder,
    attend_paged,
    compute_fully,
)
from tests.steps import VOCABULARY, Step, recomputing, recomputing_to, steps

SHAPE = PoolShape(num_layers=5, layer_group=2, block_tokens=4)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make_decoder(shape: PoolShape = SHAPE) -> tuple[TinyDecoder, MixedRows]:
    torch.manual_seed(0)
    decoder = TinyDecoder(shape.num_layers, VOCABULARY)
    return decoder, MixedRows(decoder, shape)


def empty_pool(table: PageTable) -> KVPool:
    pool = KVPool(table.shape, table.num_units, KV_HEADS, HEAD_DIM, torch.float32, "cpu")
    pool.buffer.fill_(torch.nan)
    return pool


def run(
    decoder: TinyDecoder, mixed: MixedRows, plan: StepPlan, pool: KVPool, tokens: Any, at: Any
) -> torch.Tensor:
    """One step as SGLang starts it: with the new rows only."""
    with mixed.running(plan):
        out: torch.Tensor = decoder(
            torch.as_tensor(tokens), torch.as_tensor(at), attend_paged(plan, pool)
        )
    return out


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


def count_rows(*modules: Any) -> list[int]:
    """The list that collects how many rows each of `modules` is called with, in order."""
    seen: list[int] = []
    for module in modules:
        module.register_forward_hook(lambda _, args, out: seen.append(len(args[0])))
    return seen


# -- same results ---------------------------------------------------------------------------


@settings(max_examples=60)
@given(step=steps())
def test_new_rows_equal_the_full_computation(step: Step) -> None:
    decoder, mixed = make_decoder(step.table.shape)
    pool = empty_pool(step.table)
    expected = []
    for i, (request, tokens) in enumerate(zip(step.requests, step.tokens, strict=True)):
        hidden, kv = compute_fully(decoder, tokens)
        expected.append(hidden[request.start :])
        for position in range(request.start):
            block, offset = step.place_of(i, position)
            for layer, (k, v) in enumerate(kv):
                unit = step.resident[block, step.table.shape.group_of(layer)]
                if unit != NONE:
                    pool.keys(layer)[unit, offset] = k[position]
                    pool.values(layer)[unit, offset] = v[position]
    new = [(tokens[r.start :], r) for tokens, r in zip(step.tokens, step.requests, strict=True)]
    tokens = np.concatenate([t for t, _ in new])
    positions = np.concatenate([np.arange(r.start, r.end) for _, r in new])
    out = run(decoder, mixed, step.plan(), pool, tokens, positions)
    torch.testing.assert_close(out, torch.cat(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_generation_with_evictions_at_every_step_is_generation_without(seed: int) -> None:
    random = np.random.default_rng(seed)
    decoder, mixed = make_decoder()
    tokens = random.integers(0, VOCABULARY, 9).tolist()
    table = PageTable(SHAPE, num_blocks=10, num_units=12)
    pool = empty_pool(table)
    start = 0
    while len(tokens) < 40:
        length = len(tokens)
        added = table.allocate(SHAPE.blocks_for(length) - SHAPE.blocks_for(start))
        if start:
            table.extend(0, length, added)
        else:
            table.map(0, added, length)
        blocks = table.blocks_of(0)
        for block in random.permutation(blocks)[:3].tolist():
            table.evict(block, slice(0, int(random.integers(1, 4))))
        depth = table.depth(blocks)
        table.place(random.permutation(blocks))  # as many as fit: never all
        new = NewTokens(0, start, length)
        missing = recomputing_to(blocks, depth, SHAPE.num_groups)
        plan = plan_step(table, [new], missing, lambda _, a, b: np.array(tokens[a:b]))
        out = run(decoder, mixed, plan, pool, tokens[start:], range(start, length))
        expected = compute_fully(decoder, tokens)[0][start:]
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        tokens.append(int((decoder.embed_tokens.weight @ out[-1]).argmax()))
        start = length


# -- what the model sees --------------------------------------------------------------------


def test_each_layer_sees_the_rows_alive_in_its_group() -> None:
    plan, pool = one_request()
    assert [layout.rows for layout in plan.groups] == [9, 5, 1]
    decoder, mixed = make_decoder()
    seen = count_rows(*decoder.layers, decoder.norm)
    run(decoder, mixed, plan, pool, [10], [10])
    assert seen == [9, 9, 5, 5, 1, 1]


def test_rows_leave_the_last_layer_of_a_group_before_its_mlp() -> None:
    plan, pool = one_request()
    decoder, mixed = make_decoder()
    seen = count_rows(*(layer.mlp for layer in decoder.layers))
    run(decoder, mixed, plan, pool, [10], [10])
    assert seen == [9, 5, 5, 1, 1]


def test_rows_are_cut_from_keyword_arguments_too() -> None:
    plan, _ = one_request()
    decoder, mixed = make_decoder()
    hidden = torch.randn(9, HIDDEN)
    with mixed.running(plan):
        out, residual = decoder.norm(hidden=hidden, residual=hidden)
    assert len(out) == len(residual) == plan.new_rows


# -- out of the way -------------------------------------------------------------------------


def test_without_a_plan_the_hooks_do_nothing() -> None:
    decoder, _ = make_decoder()
    plain = TinyDecoder(SHAPE.num_layers, VOCABULARY)
    plain.load_state_dict(decoder.state_dict())
    tokens = torch.arange(11)
    assert torch.equal(compute_fully(decoder, tokens)[0], compute_fully(plain, tokens)[0])


def test_a_plan_without_spans_leaves_the_rows_alone() -> None:
    plan, _ = one_request(missing=0)
    decoder, mixed = make_decoder()
    tokens = torch.arange(11)
    expected, _ = compute_fully(decoder, tokens)
    with mixed.running(plan):
        out, _ = compute_fully(decoder, tokens)
    assert torch.equal(out, expected)


def test_after_the_step_the_hooks_do_nothing() -> None:
    plan, pool = one_request()
    decoder, mixed = make_decoder()
    tokens = torch.arange(11)
    expected, _ = compute_fully(decoder, tokens)
    run(decoder, mixed, plan, pool, [10], [10])
    assert torch.equal(compute_fully(decoder, tokens)[0], expected)


def test_after_an_exception_the_hooks_do_nothing() -> None:
    plan, _ = one_request()
    decoder, mixed = make_decoder()
    tokens = torch.arange(11)
    expected, _ = compute_fully(decoder, tokens)

    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"), mixed.running(plan):
        decoder(torch.tensor([10]), torch.tensor([10]), fail)
    assert torch.equal(compute_fully(decoder, tokens)[0], expected)
