"""Decode steps that miss nothing are planned from one to the next; each plan is `plan_step`'s."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.engine.decision import FETCH_ALL
from ellm_sgl.memory import NONE, ElasticMemory, PageTable, PoolShape
from ellm_sgl.step import NewTokens, Planner, StepPlan, plan_step
from ellm_sgl.step.resident import ResidentDecodes

BLOCKS = 120
CHANGES = ("nothing", "evict and place", "relocate", "leave and enter", "fork")


def no_tokens(seq_id: int, start: int, end: int) -> np.ndarray:
    raise AssertionError("nothing is computed again")


def seen(plan: StepPlan) -> list[Any]:
    """What a plan says of each layer group, units by request."""
    found: list[Any] = [plan.new_rows, plan.recomputed_rows]
    for group in plan.groups:
        found += [group.rows, group.write_rows]
        found += [group.write_units.tolist(), group.write_offsets.tolist()]
        found += [(r.new, r.spans, r.unstored_new) for r in group.requests]
        found += [group.units[r.blocks].tolist() for r in group.requests]
    return found


def enter(table: PageTable, seq_id: int, length: int) -> None:
    blocks = table.allocate(table.shape.blocks_for(length))
    table.place(blocks[::-1])
    table.map(seq_id, blocks, length)
    table.note_computed([seq_id], [length])


def leave(table: PageTable, seq_id: int) -> None:
    blocks = table.blocks_of(seq_id).copy()
    table.unmap(seq_id)
    table.release(blocks)


def decode(table: PageTable, seq_ids: list[int]) -> None:
    """A token more for each."""
    for seq_id in seq_ids:
        last = table.blocks_of(seq_id)[-1:]
        if table.length_of(seq_id) % table.shape.block_tokens == 0:
            last = table.allocate(1)
            table.place(last)
        table.extend_each([seq_id], last)


def change(table: PageTable, what: str, seq_id: int, block: int) -> None:
    """Something that happens to a request between two steps."""
    if what == "evict and place":
        table.evict(block)
        other = table.allocate(1)  # which takes the unit that it had
        table.place(other)
        table.place([block])
        table.release(other)
    elif what == "relocate":
        table.limit_units(max(table.used_units, table.shape.num_groups))
        table.relocate(4)
        table.limit_units(table.committed_units)
    elif what == "leave and enter":
        length = table.length_of(seq_id)
        leave(table, seq_id)
        enter(table, seq_id, length)
    elif what == "fork":  # it goes on with other blocks of its own
        blocks = table.blocks_of(seq_id).copy()
        own = table.allocate(len(blocks))
        table.place(own)
        table.map(seq_id, own, table.length_of(seq_id))
        table.release(blocks)


@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    groups=st.integers(1, 3),
    block_tokens=st.sampled_from([1, 4]),
)
def test_each_plan_is_that_of_plan_step(
    data: st.DataObject, lengths: list[int], groups: int, block_tokens: int
) -> None:
    table = PageTable(PoolShape(2 * groups, 2, block_tokens), 8 * BLOCKS, 8 * BLOCKS * groups)
    resident, kept = ResidentDecodes("cpu"), []
    for seq_id, length in enumerate(lengths):
        enter(table, seq_id, length)
    everybody = list(range(len(lengths)))
    for _ in range(data.draw(st.integers(1, 12), "steps")):
        stepping = data.draw(st.sampled_from([everybody, everybody[::-1], everybody[:1]]))
        decode(table, stepping)
        ends = table.lengths_of(stepping).tolist()
        usual = plan_step(
            table, [NewTokens(s, n - 1, n) for s, n in zip(stepping, ends, strict=True)],
            None, no_tokens,
        )  # fmt: skip
        plan = resident.plan(table, stepping, ends)
        assert plan is not None and seen(plan) == seen(usual)
        assert torch.equal(plan.recomputed_token_ids, usual.recomputed_token_ids)
        table.note_computed(stepping, [1] * len(stepping))
        kept.append((plan, seen(plan)))
        seq_id = data.draw(st.sampled_from(everybody), "whom")
        block = int(data.draw(st.sampled_from(table.blocks_of(seq_id).tolist()), "block"))
        change(table, data.draw(st.sampled_from(CHANGES), "what"), seq_id, block)
    table.clear()
    assert all(seen(plan) == as_made for plan, as_made in kept), "plans are snapshots"
    assert resident.plan(table, [], []) is not None


@given(known=st.booleans())
def test_where_a_block_lacks_a_unit_others_plan(known: bool) -> None:
    table = PageTable(PoolShape(2, 1, 4), 8, 16)
    enter(table, 0, 7)
    resident = ResidentDecodes("cpu")
    if known:
        assert resident.plan(table, [0], [7]) is not None
        table.extend(0, 9, table.allocate(1))
    else:
        table.evict(int(table.blocks_of(0)[0]))
    length = table.length_of(0)
    assert resident.plan(table, [0], [length]) is None
    table.place(table.blocks_of(0))
    again = resident.plan(table, [0], [length])
    assert again is not None
    units = again.groups[1].units[again.groups[1].requests[0].blocks].tolist()
    assert units == table.units[table.blocks_of(0), 1].tolist() and NONE not in units


def test_a_step_looks_up_only_blocks_that_have_begun() -> None:
    table = PageTable(PoolShape(2, 1, 4), 4000, 8000)
    enter(table, 0, 12_000)
    resident = ResidentDecodes("cpu")
    first = resident.plan(table, [0], [12_000])
    decode(table, [0])
    second = resident.plan(table, [0], [12_001])
    assert first is not None and second is not None
    assert first.groups[0].units.data_ptr() == second.groups[0].units.data_ptr()
    assert second.groups[0].requests[0].blocks == slice(0, 3001)


def test_a_block_whose_units_another_took_is_looked_up_again() -> None:
    table = PageTable(PoolShape(2, 1, 4), 8, 16)
    enter(table, 0, 8)
    enter(table, 1, 4)
    resident = ResidentDecodes("cpu")
    assert resident.plan(table, [0], [8]) is not None
    other, lender = table.allocate(1), int(table.blocks_of(0)[0])
    for _ in range(4):
        table.extend_each([1], other)
    table.note_computed([1], [4])
    table.adopt(int(other[0]), lender)
    table.place([lender])
    plan = resident.plan(table, [0], [8])
    assert plan is not None
    units = plan.groups[0].units[plan.groups[0].requests[0].blocks].tolist()
    assert units == table.units[table.blocks_of(0), 0].tolist()


def test_what_others_lack_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of requests that have all is planned here, also while one that sits out has not."""
    table = PageTable(PoolShape(2, 1, 4), 8, 16)
    for seq_id, length in enumerate((7, 9)):
        enter(table, seq_id, length)
    table.evict(int(table.blocks_of(1)[0]))
    usual = plan_step(table, [NewTokens(0, 6, 7)], None, no_tokens)
    planner = Planner(ElasticMemory(table, 1000, lambda _: 0), no_tokens, "cpu", captures=False)
    monkeypatch.setattr("ellm_sgl.step.planner.plan_step", None)
    assert seen(planner.decode([0], FETCH_ALL)) == seen(usual)
