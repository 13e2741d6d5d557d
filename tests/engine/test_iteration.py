"""The loop's phases, without SGLang and without a model."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from ellm_sgl.engine import Arrival, Controller, Decision, Iteration, ServerLimits, StepLog
from ellm_sgl.engine.decision import FETCH_ALL
from ellm_sgl.engine.request_table import Entries
from ellm_sgl.latency import RooflineLatencyModel, StepWork
from ellm_sgl.memory import ElasticMemory, PageTable, PoolShape, UnderWay
from ellm_sgl.policies import Stock, WorkSplit
from ellm_sgl.policies.problem.candidates import unowned_tokens
from ellm_sgl.policies.problem.under_way import as_running
from tests.latency.machines import GPU, TINY

SHAPE = PoolShape(num_layers=4, layer_group=2, block_tokens=4)
BLOCKS = 10
KEEP_ALL = Decision(
    admit=(), pause=frozenset(), ratios=(), admitted_ratios=(),
    split=WorkSplit(1, 1, 512), fetch_ahead_s=0.0, stands=True,
)  # fmt: skip


class Server:
    """`requests` that run, of two blocks each."""

    def __init__(self, requests: int = 0, host_blocks: int = 0) -> None:
        self.now_s = 100.0
        groups = SHAPE.num_groups
        self.table = PageTable(SHAPE, 4 * BLOCKS, BLOCKS * groups, host_blocks * groups)
        elastic = ElasticMemory(self.table, 64, lambda tokens: 0)
        limits = ServerLimits(TINY, GPU, 8, math.inf, 64)
        steps = StepLog(RooflineLatencyModel(TINY, GPU), lambda: self.now_s)
        controller = Controller(Stock(), math.inf, steps, limits)
        self.iteration = Iteration(controller, elastic, 1024, lambda: self.now_s)
        self.running = [self.arrive() for _ in range(requests)]
        self.seq_ids = [70 + i for i in range(requests)]
        for seq_id in self.seq_ids:
            self.table.map(seq_id, elastic.allocate(2), 2 * SHAPE.block_tokens)
            self.table.note_computed([seq_id], [2 * SHAPE.block_tokens])

    def arrive(self) -> int:
        arrival = Arrival(8, 8, 16, self.now_s, 0, math.inf, math.inf)
        return self.iteration.requests.add(arrival, self.now_s)

    def put_in_force(self, decision: Decision = KEEP_ALL, waiting: tuple[int, ...] = ()) -> None:
        ratios = decision.ratios or (0.0,) * len(self.running)
        decision = dataclasses.replace(decision, ratios=ratios)
        self.iteration.put_in_force(decision, self.running, self.seq_ids, waiting)


def entries(*numbers: int) -> Entries:
    return np.array(numbers, np.int64)


def test_what_is_observed_is_what_the_tables_hold() -> None:
    server = Server(2)
    waiting = server.arrive()
    server.table.evict(int(server.table.blocks_of(71)[0]))
    server.now_s += 3
    state = server.iteration.observe(entries(*server.running), server.seq_ids, entries(waiting))
    assert state.now_s == 103
    assert state.running.tokens.tolist() == [8, 8]
    assert state.running.uncached_tokens.tolist() == [0, 4]
    assert state.waiting.waited_s.tolist() == [3.0]
    assert len(state.prefilling) == 0
    assert state.memory.device_free_tokens == (BLOCKS - 3) * SHAPE.block_tokens


def test_whose_prompt_is_computed_is_told_apart() -> None:
    server = Server(1)
    first, second = server.arrive(), server.arrive()
    state = server.iteration.observe(
        entries(*server.running), server.seq_ids, entries(second), entries(first)
    )
    ids = [those.request_id.tolist() for those in (state.running, state.prefilling, state.waiting)]
    assert ids == [[1], [2], [3]]


@pytest.mark.parametrize(("ratio", "uncached"), [(0.0, 0), (0.5, 4), (0.99, 4)])
def test_all_of_memory_is_there_for_a_prompt_under_way_and_those_that_run(
    ratio: float, uncached: int
) -> None:
    server = Server(1)
    table, elastic, prompt = server.table, server.iteration.elastic, 99
    table.map(prompt, elastic.allocate(1), SHAPE.block_tokens)  # the first chunk, of two
    table.note_computed([prompt], [SHAPE.block_tokens])
    elastic.under_way = UnderWay.of(table, prompt, 2 * SHAPE.block_tokens, ratio)
    state = server.iteration.observe(
        entries(*server.running), server.seq_ids, entries(), entries(server.arrive())
    )
    assert state.prefilling.uncached_tokens.tolist() == [uncached]
    assert as_running(state).memory.device_tokens == BLOCKS * SHAPE.block_tokens
    assert unowned_tokens(as_running(state)) == unowned_tokens(state) == 0


def test_a_policy_is_told_what_the_host_has_and_asked_about_steps_that_fetch_just_that() -> None:
    server = Server(2, host_blocks=2)
    for seq_id in server.seq_ids:
        block = int(server.table.blocks_of(seq_id)[0])
        if seq_id == 70:
            server.table.keep_copies(block, np.arange(SHAPE.num_groups, dtype=np.int32))
        server.table.evict(block)
    state = server.iteration.observe(entries(*server.running), server.seq_ids, entries())
    assert state.running.uncached_tokens.tolist() == [4, 4]
    assert state.running.uncached_on_host.tolist() == [4, 0]
    model = server.iteration.controller.steps.model
    asked = StepWork(2, 16, 8, 32)
    half = dataclasses.replace(asked, swap_tokens=8, recompute_share=0.5)
    assert state.latency.step_seconds(asked) == model.step_seconds(half)


def test_a_decision_on_positions_is_in_force_on_requests() -> None:
    server = Server(2)
    first, second = server.arrive(), server.arrive()
    decision = dataclasses.replace(
        KEEP_ALL,
        admit=(1, 0),
        pause=frozenset({1}),
        ratios=(0.25, 0.5),
        admitted_ratios=(0.1, 0.0),
    )
    server.put_in_force(decision, (first, second))
    in_force = server.iteration.in_force
    assert in_force.admit == {second: 0, first: 1}
    assert in_force.pause == {server.running[1]}
    assert in_force.uncached_ratios == {70: 0.25, 71: 0.5}
    assert in_force.admitted_ratios[in_force.admit[second]] == in_force.first_ratio == 0.1
    assert in_force.admitted_ratios[in_force.admit[first]] == 0.0
    assert server.iteration.elastic.totals.pauses == 1
    server.put_in_force(decision, (first, second))  # who is paused still has not begun to be again
    assert server.iteration.elastic.totals.pauses == 1


@pytest.mark.parametrize("admits", [False, True])
def test_those_that_run_make_way_before_a_prompt_is_admitted(admits: bool) -> None:
    """By the ratios of the decision that admits it; otherwise when they decode next."""
    server = Server(3)
    waiting = server.arrive()
    decision = dataclasses.replace(
        KEEP_ALL,
        admit=(0,) if admits else (),
        admitted_ratios=(0.5,) if admits else (),
        ratios=(0.5, 0.5, 0.0),
        pause=frozenset({1}),
    )
    server.put_in_force(decision, (waiting,))
    missing = server.table.uncached_tokens(server.seq_ids).tolist()
    assert missing == ([4, 4, 0] if admits else [0, 0, 0])
    server.iteration.bring_to_ratios([70, 72])
    server.iteration.bring_to_ratios([71], paused=True)
    assert server.table.uncached_tokens(server.seq_ids).tolist() == [4, 4, 0]


def test_before_the_first_decision_all_is_fetched() -> None:
    assert Server().iteration.in_force.split == FETCH_ALL
    assert (FETCH_ALL.recompute_share, FETCH_ALL.delta_share) == (0.0, 0.5)


def test_a_decision_stands_while_all_fits_and_no_longer() -> None:
    server = Server(4)
    server.put_in_force()
    stands = server.iteration.decision_stands
    assert not stands(server.seq_ids)  # 2 of 10 blocks are free
    assert stands(server.seq_ids[:2])
    server.table.evict(int(server.table.blocks_of(70)[0]))
    assert not stands([70, 71])
    assert stands([71, 72]), "what others lack, or idle prefixes, is no reason to ask again"


@pytest.mark.parametrize("what", ["policy", "admits", "promise"])
def test_a_decision_does_not_stand_where_something_may_change(what: str) -> None:
    server = Server(1)
    waiting = (server.arrive(),)
    server.put_in_force(
        dataclasses.replace(
            KEEP_ALL,
            admit=(0,) if what == "admits" else (),
            admitted_ratios=(0.0,) if what == "admits" else (),
            stands=what != "promise",
        ),
        waiting,
    )
    if what == "policy":
        server.iteration.ask_anew()
    assert not server.iteration.decision_stands(server.seq_ids)


def test_nobody_to_decide_for_leaves_what_was_decided_of_the_others() -> None:
    server = Server(2)
    waiting = (server.arrive(),)
    decision = dataclasses.replace(
        KEEP_ALL, admit=(0,), admitted_ratios=(0.3,), pause=frozenset({0})
    )
    server.put_in_force(decision, waiting)
    server.iteration.decide_nothing()
    in_force = server.iteration.in_force
    assert not in_force.pause and not in_force.uncached_ratios and not in_force.admit
    assert (in_force.split, in_force.first_ratio, in_force.stands) == (KEEP_ALL.split, 0.0, True)


def test_a_closed_queue_opens_when_there_is_more_room_than_at_the_refusal() -> None:
    server = Server(2)
    iteration, waiting = server.iteration, (server.arrive(), server.arrive())
    server.put_in_force(waiting=waiting)
    assert iteration.queue_closed(False, True)  # nobody is to be admitted
    assert not iteration.queue_closed(False, False)
    one = dataclasses.replace(KEEP_ALL, admit=(0,), admitted_ratios=(0.0,))
    server.put_in_force(one, waiting)
    assert not iteration.queue_closed(True, True)  # nobody was refused
    iteration.refused(iteration.admission_tokens()[1])
    assert iteration.queue_closed(True, True)
    assert not iteration.queue_closed(False, True)
    other = dataclasses.replace(KEEP_ALL, admit=(1, 0), admitted_ratios=(0.0, 0.0))
    server.put_in_force(other, waiting)
    assert not iteration.queue_closed(True, True)  # a more urgent one came, which may be smaller
    iteration.refused(iteration.admission_tokens()[1], waiting[0])
    assert not iteration.queue_closed(True, True)
    iteration.refused(iteration.admission_tokens()[1], waiting[1])
    assert iteration.queue_closed(True, True)
    iteration.elastic.forget(71)
    blocks = np.arange(4 * BLOCKS, dtype=np.int32)
    server.table.release(blocks[server.table.references(blocks) == 1][-2:])
    assert not iteration.queue_closed(True, True)


def test_who_is_known_by_the_entry_of_one_that_was_refused_and_left_is_looked_at() -> None:
    server = Server(2)
    iteration, refused = server.iteration, server.arrive()
    one = dataclasses.replace(KEEP_ALL, admit=(0,), admitted_ratios=(0.0,))
    server.put_in_force(one, (refused,))
    iteration.refused(iteration.admission_tokens()[1])
    assert iteration.queue_closed(True, True)
    iteration.left(refused)
    assert server.arrive() == refused
    server.put_in_force(one, (refused,))
    assert not iteration.queue_closed(True, True)


def test_a_queue_opens_when_the_pool_has_grown_though_others_have_taken_as_much() -> None:
    server = Server(2)
    iteration, table, waiting = server.iteration, server.table, (server.arrive(),)
    table.limit_units(table.num_units - 2 * SHAPE.num_groups)
    one = dataclasses.replace(KEEP_ALL, admit=(0,), admitted_ratios=(0.0,))
    server.put_in_force(one, waiting)
    iteration.refused(iteration.admission_tokens()[1], waiting[0])
    for prompt in (98, 99):  # admitted before it in the same pass
        table.map(prompt, iteration.elastic.allocate(1), SHAPE.block_tokens)
        assert iteration.queue_closed(True, True)
    table.limit_units(table.unit_limit + SHAPE.num_groups)
    assert not iteration.queue_closed(True, True)


def test_room_is_made_by_evicting_and_told_when_there_is_none() -> None:
    server = Server(5)
    assert server.table.free_units == 0
    assert server.iteration.make_room(2, server.seq_ids)
    assert server.table.free_units == 2 * SHAPE.num_groups
    assert not server.iteration.make_room(BLOCKS + 1, server.seq_ids)
    assert server.iteration.elastic.totals.page_table_s > 0


def test_what_the_admitted_will_find_cached_stays() -> None:
    server = Server(2)
    first, second = server.table.blocks_of(70).tolist()
    decision = dataclasses.replace(KEEP_ALL, admit=(0,), admitted_ratios=(0.5,), ratios=(0.5, 0.5))
    cached = np.array([first], np.int32)
    waiting = [server.arrive()]
    server.iteration.put_in_force(decision, server.running, server.seq_ids, waiting, lambda: cached)
    assert server.table.missing_of_each([70]).tolist() == [second]
    assert server.table.missing_of_each([71]).tolist() == server.table.blocks_of(71)[:1].tolist()


@pytest.mark.parametrize("mixed", [False, True])
def test_nothing_is_sent_to_the_host_for_what_a_mixed_step_computes_again(mixed: bool) -> None:
    """It places none of that: the next prompt would get the units."""
    server, copied = Server(5, host_blocks=10), list[int]()
    table = server.table
    elastic = ElasticMemory(table, 64, lambda tokens: 0, lambda d, h: copied.extend(d), slots=1)
    server.iteration.elastic = elastic
    table.evict(int(table.blocks_of(70)[0]))
    elastic.make_room(SHAPE.num_groups)
    elastic.place_new(elastic.table.allocate(1))  # no unit is free
    elastic.bring_to_ratios(server.seq_ids, (0.5, 0.0, 0.0, 0.0, 0.0))
    copied.clear()
    assert server.iteration.make_room(0, [70], beside=[71] if mixed else [])
    assert bool(copied) != mixed


def test_the_token_of_a_step_is_reported_once() -> None:
    server = Server(1)
    iteration, running = server.iteration, entries(*server.running)
    iteration.in_step(running, np.array([9]))
    server.now_s += 1
    iteration.report()
    server.now_s += 5
    iteration.report()
    state = iteration.observe(running, server.seq_ids, entries())
    assert state.running.waited_s.tolist() == [5.0]
