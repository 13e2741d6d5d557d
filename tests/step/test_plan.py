"""`plan_step`: every token's KV comes from somewhere, and goes where it belongs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.kernels.layout import RowRange
from ellm_sgl.memory import NONE, PageTable, PoolShape
from ellm_sgl.memory.page_table import RESERVED
from ellm_sgl.step import NewTokens, StepPlan, plan_step, planned_work
from tests.steps import Step, recomputing, rows_of, steps


def tensors_of(plan: StepPlan) -> list[torch.Tensor]:
    """All tensors of a plan, copied."""
    tensors = [plan.recomputed_token_ids, plan.recomputed_positions]
    for group in plan.groups:
        rows = group.write_rows
        rows = torch.arange(plan.new_rows)[rows] if isinstance(rows, slice) else rows
        tensors += [group.units, rows, group.write_units, group.write_offsets]
    return [tensor.clone() for tensor in tensors]


def test_a_decode_step_whose_last_block_has_no_unit_goes_the_usual_way() -> None:
    table = PageTable(PoolShape(2, 1, 16), 4, 4)
    blocks = table.allocate(2)
    table.place(blocks[:1])
    table.map(0, blocks, 20)
    plan = plan_step(table, [NewTokens(0, 19, 20)], None, no_tokens)
    assert all(layout.requests[0].unstored_new for layout in plan.groups)


def no_tokens(seq_id: int, start: int, end: int) -> np.ndarray:
    raise AssertionError("nothing is computed again")


# -- where KV comes from --------------------------------------------------------------------


@given(step=steps())
def test_every_token_comes_from_a_resident_unit_or_from_a_row(step: Step) -> None:
    block_tokens = step.table.shape.block_tokens
    for group, layout in enumerate(step.plan().groups):
        for request, new in zip(layout.requests, step.requests, strict=True):
            units = layout.units[request.blocks].tolist()
            from_rows = {
                p for span in request.spans for p in range(span.position, span.end_position)
            }
            for position in set(range(new.start)) - from_rows:
                resident = step.unit_of(step.resident, new.seq_id, position, group)
                assert resident != NONE and units[position // block_tokens] == resident
            for position in range(new.start, new.end):
                assert request.unstored_new or units[position // block_tokens] > 0


@given(step=steps())
def test_a_block_without_a_unit_points_at_the_scratch_unit(step: Step) -> None:
    for group, layout in enumerate(step.plan().groups):
        for request, new in zip(layout.requests, step.requests, strict=True):
            units = step.table.units[step.table.blocks_of(new.seq_id), group]
            assert layout.units[request.blocks].tolist() == np.maximum(units, RESERVED).tolist()


@given(step=steps())
def test_a_row_lives_as_long_as_a_group_above_needs_it(step: Step) -> None:
    for group, layout in enumerate(step.plan().groups):
        for request, new, depth in zip(layout.requests, step.requests, step.depths, strict=True):
            alive = {p for span in request.spans for p in range(span.position, span.end_position)}
            deep = np.repeat(depth > group, step.table.shape.block_tokens)
            assert alive == set(np.flatnonzero(deep[: new.start]).tolist())


@given(step=steps())
def test_rows_only_leave_and_always_from_the_end(step: Step) -> None:
    plan = step.plan()
    counts = [layout.rows for layout in plan.groups]
    assert counts == sorted(counts, reverse=True) and counts[-1] >= plan.new_rows
    assert counts[0] == plan.new_rows + plan.recomputed_rows
    for layout in plan.groups:
        covered = [row for _, rows in rows_of(layout) for row in range(rows.row, rows.end_row)]
        assert sorted(covered) == list(range(layout.rows))


@given(step=steps())
def test_a_span_row_keeps_its_row_and_position_in_every_group(step: Step) -> None:
    plan = step.plan()
    for layout in plan.groups:
        for i, rows in rows_of(layout):
            if rows is layout.requests[i].new:
                continue
            span = slice(rows.row - plan.new_rows, rows.end_row - plan.new_rows)
            positions = list(range(rows.position, rows.end_position))
            assert plan.recomputed_positions[span].tolist() == positions
            assert plan.recomputed_token_ids[span].tolist() == step.tokens[i][positions].tolist()


@given(step=steps())
def test_new_rows_are_sglangs_rows_in_its_order(step: Step) -> None:
    plan = step.plan()
    assert plan.new_rows == sum(new.end - new.start for new in step.requests)
    for layout in plan.groups:
        row = 0
        for request, new in zip(layout.requests, step.requests, strict=True):
            assert request.new == RowRange(row, new.start, new.end - new.start)
            row = request.new.end_row


# -- where KV goes --------------------------------------------------------------------------


@given(step=steps())
def test_rows_whose_block_has_a_unit_are_written_there(step: Step) -> None:
    plan = step.plan()
    for group, layout in enumerate(plan.groups):
        expected = []
        for i, rows in rows_of(layout):
            for row, position in enumerate(range(rows.position, rows.end_position), rows.row):
                unit = step.unit_of(step.table.units, i, position, group)
                if unit != NONE:
                    expected.append((row, unit, step.place_of(i, position)[1]))
        written = torch.arange(layout.rows)[layout.write_rows].tolist()
        places = layout.write_units.tolist(), layout.write_offsets.tolist()
        assert sorted(zip(written, *places, strict=True)) == sorted(expected)


@given(step=steps())
def test_a_block_placed_for_this_step_is_filled_by_it(step: Step) -> None:
    for group, layout in enumerate(step.plan().groups):
        places = layout.write_units.tolist(), layout.write_offsets.tolist()
        written = set(zip(*places, strict=True))
        for i, request in enumerate(step.requests):
            for position in range(request.end):
                block, offset = step.place_of(i, position)
                unit = int(step.table.units[block, group])
                if unit != step.resident[block, group]:
                    assert (unit, offset) in written


# -- the plan as a whole --------------------------------------------------------------------


@given(step=steps(complete=True))
def test_with_nothing_missing_the_step_is_sglangs_own(step: Step) -> None:
    plan = step.plan()
    assert plan.recomputed_rows == 0
    for layout in plan.groups:
        assert layout.rows == plan.new_rows and layout.write_rows == slice(0, plan.new_rows)
        assert not any(request.spans or request.unstored_new for request in layout.requests)
        assert (layout.units > 0).all()


@given(step=steps())
def test_a_plan_is_a_snapshot(step: Step) -> None:
    plan = step.plan()
    before = tensors_of(plan)
    for seq_id in step.table.sequence_ids:
        blocks = step.table.blocks_of(seq_id)
        blocks[:] = blocks[::-1].copy()
    step.table.clear()
    step.table._units[:] = 99
    for tokens, depth in zip(step.tokens, step.depths, strict=True):
        tokens[:] = 99
        depth[:] = 99
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(plan), strict=True))


def test_spans_are_as_long_as_possible_and_end_where_the_new_tokens_begin() -> None:
    table = PageTable(PoolShape(num_layers=2, layer_group=1, block_tokens=4), 5, 10)
    blocks = table.allocate(5)
    table.place(blocks)
    table.map(0, blocks, 18)
    for block, groups in ((0, 2), (1, 1), (2, 1), (4, 2)):
        table.evict(int(blocks[block]), slice(0, groups))
    new = NewTokens(0, 17, 18)
    plan = plan_step(
        table, [new], recomputing(table, blocks), lambda _, a, b: np.arange(a, b) + 100
    )
    assert plan.groups[0].requests[0].spans == (
        RowRange(row=1, position=0, size=4),
        RowRange(row=5, position=16, size=1),
        RowRange(row=6, position=4, size=8),
    )
    assert plan.groups[1].requests[0].spans == plan.groups[0].requests[0].spans[:2]
    assert plan.recomputed_token_ids.tolist() == [*range(100, 104), 116, *range(104, 112)]


@pytest.mark.parametrize("lost", [0, 3])
def test_new_rows_count_as_stored_only_if_all_their_blocks_have_units(lost: int) -> None:
    table = PageTable(PoolShape(num_layers=1, layer_group=1, block_tokens=2), 4, 4)
    blocks = table.allocate(4)
    table.place(blocks)
    table.map(0, blocks, 8)
    table.evict(int(blocks[lost]))
    new = NewTokens(0, 4, 8)
    plan = plan_step(table, [new], recomputing(table, blocks), lambda _, a, b: np.arange(a, b))
    assert plan.groups[0].requests[0].unstored_new == (lost == 3)


@given(step=steps(), share=st.floats(0, 1))
def test_the_work_of_a_mixed_step_is_that_of_its_prompts_and_of_those_that_decode(
    step: Step, share: float
) -> None:
    """The first requests compute prompts."""
    prompts = round(share * len(step.requests))
    work = planned_work(step.plan(), prompts)
    first, others = step.requests[:prompts], step.requests[prompts:]
    positions = [p for new in first for p in range(new.start, new.end)]
    assert work.prefill_rows == len(positions)
    assert work.prefill_pairs == sum(p + 1 for p in positions)
    assert work.decode_rows == len(others)
    assert work.decode_tokens == sum(new.end for new in others)
