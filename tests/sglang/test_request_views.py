"""What is told of each request to those who watch: spans that add up, and bounds that hold."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.engine.request_table import entries_array
from ellm_sgl.latency import StepWork
from ellm_sgl.memory import PageTable, PoolShape
from ellm_sgl.sglang import request_views
from ellm_sgl.sglang.request_views import (
    KINDS,
    MOST_REQUESTS,
    MOST_RID,
    MOST_SPANS,
    STATES,
    spans_of,
)
from tests.sglang.test_state import Server

BLOCK = 4
SHAPE = PoolShape(num_layers=2, layer_group=1, block_tokens=BLOCK)
CACHED, HOST, LOST = range(len(KINDS))


def table_of(kinds: list[int], length: int) -> PageTable:
    """One request, 7, each of whose blocks is of the kind given."""
    count = len(kinds)
    table = PageTable(SHAPE, count, count * 2, host_units=count * 2)
    blocks = table.allocate(count)
    table.place(blocks)
    table.map(7, blocks, length)
    table.note_computed([7], [length])
    for block, kind in zip(blocks.tolist(), kinds, strict=True):
        if kind == HOST:
            table.keep_copies(block, np.arange(2, dtype=np.int32))
        if kind != CACHED:
            table.evict(block, slice(None))
    return table


@given(st.lists(st.sampled_from([CACHED, HOST, LOST]), min_size=1, max_size=40), st.integers(0, 3))
def test_spans_are_what_the_table_holds(kinds: list[int], short: int) -> None:
    kinds[-1] = LOST if kinds[-1] == HOST else kinds[-1]  # a tail is not copied
    length = len(kinds) * BLOCK - short
    (spans,) = spans_of(table_of(kinds, length), [7])
    tokens = [kind for n, kind in spans for _ in range(n)]
    assert tokens == [kind for kind in kinds for _ in range(BLOCK)][:length]
    assert all(a[1] != b[1] for a, b in itertools.pairwise(spans))


def test_spans_are_bounded() -> None:
    kinds = [CACHED, LOST] * (2 * MOST_SPANS)
    (spans,) = spans_of(table_of(kinds, len(kinds) * BLOCK), [7])
    assert len(spans) == MOST_SPANS and sum(n for n, _ in spans) == len(kinds) * BLOCK


def test_a_request_without_blocks_has_no_spans() -> None:
    table = PageTable(SHAPE, 4, 8)
    table.map(3, np.empty(0, np.int32), 0)
    assert list(spans_of(table, [3])) == [[]]
    assert list(spans_of(table, [])) == []


class Req:
    """As much of SGLang's as is looked at."""

    _ellm_entry: int

    def __init__(self, rid: str, row: int | None = None) -> None:
        self.rid, self.req_pool_idx, self.priority = rid, row, 2
        self.origin_input_ids, self.output_ids = [1] * 20, [2] * 5
        slo = {"tpot_slo_ms": 40}
        self.sampling_params = SimpleNamespace(custom_params=slo, max_new_tokens=64)

    def finished(self) -> bool:
        return False


@pytest.fixture
def server() -> Server:
    made = Server()
    made.scheduler.schedule_low_priority_values_first = False
    made.scheduler.chunked_req = made.scheduler.last_batch = None
    return made


def test_each_request_is_told_of_once(server: Server) -> None:
    blocks = server.table.allocate(2)
    server.table.place(blocks)
    server.table.map(1, blocks, 25)
    runs, waits = Req("<b>runs</b>", 1), Req("w" * 1000)
    server.scheduler.running_batch.reqs = [runs]
    server.scheduler.last_batch = SimpleNamespace(reqs=[runs])
    server.scheduler.waiting_queue = [waits]
    answer = server.control("requests")
    assert answer.success
    first, second = answer.response[1]["requests"]
    assert (first["rid"], first["state"], second["state"]) == ("<b>runs</b>", "decoding", "waiting")
    assert first["spans"] == [(25, CACHED)] and second["spans"] == []
    assert len(second["rid"]) == MOST_RID
    assert first["tpot_slo_ms"] == pytest.approx(40) and first["ttft_slo_ms"] is None
    assert first["tokens"] == 25 and first["priority"] == 2
    keep = entries_array([runs._ellm_entry])
    assert server.iteration.requests.request_ids(keep)[0] > 0


def test_a_prompts_progress_is_reckoned_by_the_step_in_flight(server: Server) -> None:
    """Not by the longest chunk there may be, which memory may have no room for."""
    blocks = server.table.allocate(1)
    server.table.place(blocks)
    server.table.map(1, blocks, 12)
    req = Req("long", 1)
    server.scheduler.chunked_req, server.scheduler.chunked_prefill_size = req, 4096
    log = server.iteration.controller.steps
    now = [0.0]
    log._clock = lambda: now[0]
    for begin in range(0, 12, BLOCK):
        log.start(StepWork(0, 0, prefill_rows=BLOCK, prefill_pairs=BLOCK * (begin + 2.5)))
        now[0] += 0.5
    (told,) = server.control("requests").response[1]["requests"]
    assert told["state"] == "prefilling" and told["prompt"]["done"] == 12
    assert told["prompt"]["tokens_per_s"] == pytest.approx(2 * BLOCK)


def test_requests_are_bounded(server: Server) -> None:
    server.scheduler.waiting_queue = [Req(f"r{i}") for i in range(MOST_REQUESTS + 5)]
    answer = server.control("requests").response[1]
    assert len(answer["requests"]) == MOST_REQUESTS and answer["left_out"] == 5
    assert answer["counts"] == dict.fromkeys(STATES, 0) | {"waiting": MOST_REQUESTS + 5}


def test_what_is_not_known_is_none_and_the_rest_finite(server: Server) -> None:
    answer = request_views.describe_requests(server.scheduler)
    assert answer["requests"] == [] and answer["tpot_slo_ms"] is None
    assert all(math.isfinite(value) for value in answer["steps"].values())


@pytest.mark.parametrize("lower_first", [False, True])
def test_priorities_are_told_as_they_came(server: Server, lower_first: bool) -> None:
    server.scheduler.schedule_low_priority_values_first = lower_first
    server.scheduler.waiting_queue = [Req("r")]
    (told,) = server.control("requests").response[1]["requests"]
    assert told["priority"] == 2


def test_what_steps_did_long_ago_is_not_told(server: Server) -> None:
    log = server.iteration.controller.steps
    now = [0.0]
    log._clock = lambda: now[0]
    mixed = StepWork(3, 60, prefill_rows=32, prefill_pairs=528.0)
    for work in (StepWork(4, 80), mixed):
        log.start(work)
        now[0] += 0.25
    log.idle()
    told = request_views.describe_requests(server.scheduler)["steps"]
    assert (told["tokens_per_s"], told["batch"]) == (7 / 0.5, 3.5)
    now[0] += 10.0
    told = request_views.describe_requests(server.scheduler)["steps"]
    assert told == dict.fromkeys(told, 0.0) | {"total": 2}


def test_decisions_are_told_latest_first(server: Server) -> None:
    iteration = server.iteration
    none = entries_array([])
    for _ in range(20):
        iteration.decide(iteration.observe(none, [], none))
    told = request_views.describe_requests(server.scheduler)["decisions"]
    assert len(told) == 16
    assert told[0]["ago_ms"] <= told[-1]["ago_ms"] and not told[0]["replaced"]
