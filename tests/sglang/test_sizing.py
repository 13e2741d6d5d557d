"""A server's own requests for another size: over a real socket, to a real resizer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import zmq

from ellm_sgl.budget import Member, Standing, path_of
from ellm_sgl.config import ConfigError, EllmConfig
from ellm_sgl.memory import KVPool, Load, Outcome, PageTable, Sizes
from ellm_sgl.policies.base import NO_GROWTH
from ellm_sgl.sglang import sizing as module
from ellm_sgl.sglang import state
from ellm_sgl.sglang.context import context_of
from ellm_sgl.sglang.join_budget import make_sizing
from ellm_sgl.sglang.scheduler import EllmScheduler, Released, scheduler_of
from ellm_sgl.sglang.sizing import Sizing
from tests.memory.fake_arena import FakeArena
from tests.sglang.test_state import BLOCKS, SHAPE, Server

GROUPS = SHAPE.num_groups
ALL = BLOCKS * GROUPS
UNIT = 1000
CONTEXTS: list[zmq.Context[Any]] = []
"""That of a process lives as long as the process."""
BUDGET = ALL * UNIT
LEAST = 4 * GROUPS


class SharingServer(Server):
    """With a budget, whose loop turns when it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.member = Member("test", BUDGET, "a", LEAST * UNIT, folder=folder)
        assert self.member.debit(ALL * UNIT)
        sizes = Sizes(lambda units: units * UNIT, GROUPS, ALL)
        ours: Any = context_of(self.scheduler)
        ours.pool = KVPool(SHAPE, ALL, 1, 8, torch.float32, "cpu", reserve=FakeArena)
        ours.scheduler = EllmScheduler(self.iteration, self.scheduler)
        self.sizing = ours.sizing = Sizing(EllmConfig(), "key", sizes, LEAST, ALL, self.member)
        CONTEXTS.append(zmq.Context())
        self.socket = CONTEXTS[-1].socket(zmq.PULL)
        self.scheduler.ipc_channels.recv_from_tokenizer = self.socket
        self.scheduler.tree_cache = SimpleNamespace(evictable_size=lambda: 0)
        self.scheduler.new_token_ratio_tracker = SimpleNamespace(current=0.5)
        self.sizing.start(self.scheduler, scheduler_of(self.scheduler).resizer)
        self.observe()
        deadline = time.monotonic() + 20
        while (told := self.sizing.describe()) is None or told["needed_bytes"] != LEAST * UNIT:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def observe(self) -> None:
        resizer = scheduler_of(self.scheduler).resizer
        self.sizing.observe(self.scheduler, resizer, self.scheduler.running_batch.reqs)

    def turn(self, wait_ms: int = 20_000) -> int:
        """Take one of its requests; returns the units that it asks for, -1 for none."""
        from sglang.srt.managers.io_struct import SetInternalStateReq, sock_recv

        assert self.socket.poll(wait_ms), "nothing was asked for"
        request = sock_recv(self.socket)
        scheduler_of(self.scheduler).resize()  # which each turn begins with
        assert isinstance(request, SetInternalStateReq)
        answer = state.adjust(lambda *_: pytest.fail("SGLang's"), self.scheduler, request)
        assert answer is None, "it is the answer to somebody else's question"
        (units,) = request.server_args.values()
        return int(units)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SharingServer]:
    server = SharingServer(tmp_path)
    yield server
    path_of("test", tmp_path).unlink(missing_ok=True)  # which ends its thread, in its next turn
    deadline = time.monotonic() + 20
    while any(thread.name == "ellm-size" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        if server.socket.poll(20):  # it waits for the answer to what it asked last
            server.turn()
    server.socket.close()


def waiting(prompt: int, most_new: int, generated: int = 0) -> Any:
    return SimpleNamespace(
        rid="1",
        origin_input_ids=[1] * prompt,
        output_ids=[1] * generated,
        sampling_params=SimpleNamespace(max_new_tokens=most_new),
    )


def looks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself."""
    before = module.LOOK_S
    monkeypatch.setattr(module, "PERIOD_S", 3600.0)
    monkeypatch.setattr(module, "LOOK_S", 3600.0)
    time.sleep(before + 0.1)  # it has looked for the last time


def looks_again(server: SharingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    server.sizing.released(False, scheduler_of(server.scheduler).resizer)  # which wakes it


def test_it_hears_of_another_servers_want_before_it_would_look_again(
    server: SharingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks_no_more(monkeypatch)
    other = Member("test", BUDGET, "b", UNIT, folder=tmp_path)
    other.publish(BUDGET)
    assert server.turn() == LEAST
    deadline = time.monotonic() + 20
    while not other.debit(BUDGET - LEAST * UNIT):
        assert time.monotonic() < deadline, "it has given back, and has not said so"
        time.sleep(0.01)
    looks_again(server, monkeypatch)


def test_what_requests_no_longer_need_is_told_at_once_where_others_lack_memory(
    server: SharingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Member("test", BUDGET, "b", UNIT, folder=tmp_path)
    other.publish(BUDGET)
    assert server.turn() == LEAST
    for queue, needed in (([waiting(10**4, 1)], ALL * UNIT), ([], LEAST * UNIT)):
        server.scheduler.waiting_queue = queue
        looks_no_more(monkeypatch)
        server.observe()
        deadline = time.monotonic() + 20
        while (told := server.sizing.describe()) is None or told["needed_bytes"] != needed:
            assert time.monotonic() < deadline
            if server.socket.poll(10):  # it may have asked for more
                server.turn()
        looks_again(server, monkeypatch)


def test_the_operators_word_is_heard_at_once(
    server: SharingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks_no_more(monkeypatch)
    assert server.adjust(ellm_device_kv_tokens=160)
    assert server.turn() == -1
    looks_again(server, monkeypatch)


def test_where_nothing_happens_it_looks_now_and_then(server: SharingServer) -> None:
    """Each look takes the scheduler's thread a moment."""
    sizer: Any = server.sizing._sizer
    with patch.object(sizer, "tick", wraps=sizer.tick) as tick:
        time.sleep(2.0)
    assert 1 <= tick.call_count <= 12


def test_it_looks_often_where_others_wait_or_nobody_tells(server: SharingServer) -> None:
    sizing, waker = server.sizing, server.sizing._waker
    for standing, hears, often in (
        (Standing(100, 100, 0), True, False),
        (Standing(99, 100, 0), True, True),  # what is in use may come to be free
        (Standing(100, 100, 0), False, True),
    ):
        sizing.standing, waker.hears = standing, hears
        assert sizing._pause_s() == (module.PERIOD_S if often else module.LOOK_S)
    waker.hears = True
    alone = Sizing(EllmConfig(), "key", sizing.sizes, LEAST, ALL, None)
    assert alone._pause_s() == module.LOOK_S


def test_another_server_gets_what_this_one_does_not_need(
    server: SharingServer, tmp_path: Path
) -> None:
    other = Member("test", BUDGET, "b", UNIT, folder=tmp_path)
    other.publish(BUDGET)
    assert server.turn() == LEAST and server.table.unit_limit == LEAST
    # Where generation is paused nobody observes: it is not asked to report again and again.
    assert not server.socket.poll(200)
    deadline = time.monotonic() + 20
    while (standing := other.publish(BUDGET)).free < BUDGET - LEAST * UNIT:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert standing.share == BUDGET - LEAST * UNIT
    assert state.describe(server.scheduler)["budget"] == {
        "floor_bytes": LEAST * UNIT,
        "needed_bytes": LEAST * UNIT,
        "share_bytes": LEAST * UNIT,
        "committed_bytes": LEAST * UNIT,
        "free_bytes": BUDGET - LEAST * UNIT,
        "problem": None,
    }


def test_what_requests_need_is_what_admission_counts(server: SharingServer) -> None:
    def needed() -> int:
        running = server.scheduler.running_batch.reqs
        return module.needed_units(server.scheduler, running, server.sizing.sizes, ALL) // GROUPS

    assert needed() == 0
    blocks = server.table.allocate(3)
    server.table.map(0, blocks, 40)
    assert needed() == 3
    health = SimpleNamespace(rid="HEALTH_CHECK_1")  # the block that it has is nobody's
    server.scheduler.running_batch.reqs = [health]
    assert needed() == 2
    server.scheduler.running_batch.reqs = [health] * 4
    assert needed() == 0
    server.scheduler.running_batch.reqs = [waiting(20, 84, generated=20)]
    assert needed() == 3 + 2 + 2  # half of the 64 that are left, and its last block
    server.scheduler.waiting_queue = [waiting(16, 16)]
    assert needed() == 7 + 2 + 2
    server.scheduler.waiting_queue = [waiting(16, 10**6)]
    assert needed() == BLOCKS


def test_whose_prompt_has_just_been_computed_is_not_forgotten(server: SharingServer) -> None:
    """SGLang's scheduler does not call its batch the running one yet."""
    assert not server.scheduler.running_batch.reqs
    resizer = scheduler_of(server.scheduler).resizer
    server.sizing.observe(server.scheduler, resizer, [waiting(20, 1000)])
    deadline = time.monotonic() + 20
    while (told := server.sizing.describe()) is None or told["needed_bytes"] == LEAST * UNIT:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_operator_says_how_much_it_may_be(
    server: SharingServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not server.adjust(ellm_device_kv_tokens=48)
    (said,) = caplog.messages
    assert "ellm_device_kv_tokens 48: this server always keeps room for 64 tokens" in said
    assert server.table.unit_limit == ALL
    assert server.adjust(ellm_device_kv_tokens=160)
    assert server.table.unit_limit == 10 * GROUPS
    server.observe()
    assert server.turn() == -1
    assert server.adjust(ellm_device_kv_tokens=320)
    assert server.table.unit_limit == 10 * GROUPS, "larger only where it is needed"
    server.scheduler.waiting_queue = [waiting(10**4, 1)]
    server.observe()
    deadline = time.monotonic() + 20
    while server.table.unit_limit < 20 * GROUPS:
        assert time.monotonic() < deadline
        if server.socket.poll(20):
            server.turn()


def test_what_has_been_released_stays_away_until_it_is_resumed(server: SharingServer) -> None:
    ours = scheduler_of(server.scheduler)
    ours.released = Released(ALL, paused=False)
    ours.resizer.ask(GROUPS, idle=True)
    server.sizing.released(True, ours.resizer)
    server.scheduler.waiting_queue = [waiting(10**4, 1)]
    server.observe()
    assert server.turn() == -1
    assert not server.socket.poll(200), "nothing to ask for"
    assert server.adjust(ellm_device_kv_tokens=160) and server.table.unit_limit == GROUPS
    ours.released = None
    server.sizing.released(False, ours.resizer)
    server.observe()
    assert server.turn() == 10 * GROUPS


def test_a_client_cannot_ask_as_the_server_itself_does(server: SharingServer) -> None:
    from sglang.srt.managers.io_struct import SetInternalStateReq, SetInternalStateReqOutput

    request = SetInternalStateReq(server_args={"ellm_size": GROUPS})
    refuse = lambda *_: SetInternalStateReqOutput(updated=False)  # noqa: E731
    assert not state.adjust(refuse, server.scheduler, request).updated
    assert server.table.unit_limit == ALL


def test_a_ledger_that_breaks_leaves_the_server_what_it_has(
    server: SharingServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path_of("test", tmp_path).unlink()
    deadline = time.monotonic() + 20
    while server.sizing.problem is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "was removed or replaced" in server.sizing.problem
    assert server.table.unit_limit == ALL
    assert server.adjust(ellm_device_kv_tokens=160) and server.table.unit_limit == 10 * GROUPS
    assert server.adjust(ellm_device_kv_tokens=320)
    ours = scheduler_of(server.scheduler)
    assert ours.resizer.wanted_units == 20 * GROUPS, "which it had"
    ours.resizer.ask(GROUPS, idle=True)  # as after a release, when the ledger was there
    while ours.resizer.outcome is Outcome.UNDER_WAY:
        assert time.monotonic() < deadline
        ours.resizer.step(idle=True)
    server.sizing.standing = Standing(0, GROUPS * UNIT, 0)
    assert ours.at_once(ALL) == LEAST, "which it has been promised"


def test_policies_are_told_of_no_growth_once_the_ledger_has_broken(server: SharingServer) -> None:
    """Nobody asks for it any more, whatever the ledger said last."""
    resizer, sizes = scheduler_of(server.scheduler).resizer, server.sizing.sizes
    resizer.ask(LEAST)
    for row in (server.member, None):
        sizing = Sizing(EllmConfig(), "key", sizes, LEAST, ALL, row)
        sizing.standing = Standing(ALL * UNIT, LEAST * UNIT, 0)
        told = sizing.growth(resizer, SHAPE)
        assert told.with_idle_tokens == SHAPE.tokens_in(ALL - LEAST)
        sizing.problem = "the ledger is gone"
        assert sizing.growth(resizer, SHAPE) == NO_GROWTH


def test_an_error_that_nobody_foresaw_ends_the_sharing_alone(
    server: SharingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("foreseen by nobody")

    sizer: Any = server.sizing._sizer
    monkeypatch.setattr(sizer, "tick", fails)
    deadline = time.monotonic() + 20
    while server.sizing.problem is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.sizing.problem == "ZeroDivisionError: foreseen by nobody"


@pytest.mark.parametrize(("start", "floor"), [(62, 63 * SHAPE.block_tokens), (62, 10**9)])
def test_a_floor_above_what_the_pool_starts_with_is_refused(
    monkeypatch: pytest.MonkeyPatch, start: int, floor: int
) -> None:
    with pytest.raises(ConfigError, match=rf"{floor}: the pool starts with 992; give fewer, or"):
        made(monkeypatch, start, floor)


def test_a_floor_is_whole_blocks_as_is_what_the_pool_starts_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both may be the same number of tokens, whichever that is."""
    assert made(monkeypatch, 62, 63 * SHAPE.block_tokens - 1).least_units == 62 * GROUPS
    assert made(monkeypatch, 62, None).least_units == GROUPS


def made(monkeypatch: pytest.MonkeyPatch, start: int, floor: int | None) -> Sizing:
    """Of a server with so many blocks of 100 at first, and a floor of so many tokens."""
    group = SimpleNamespace(world_size=1, rank_in_group=0, broadcast_object=lambda it: it)
    monkeypatch.setattr("sglang.srt.distributed.get_tp_group", lambda: group)
    table = PageTable(SHAPE, 200, 100 * GROUPS)
    table.limit_units(start * GROUPS)
    pool = KVPool(SHAPE, 100 * GROUPS, 1, 8, torch.float32, "cpu", reserve=FakeArena)
    settings = EllmConfig(idle_release_s=5.0, min_device_kv_tokens=floor)
    sizing = make_sizing(settings, table, pool, None)
    assert sizing is not None
    return sizing


def test_no_more_comes_at_the_operators_word_than_has_been_debited(server: SharingServer) -> None:
    """The machine had no more when the pool was to grow, and the rest was given back."""
    assert server.adjust(ellm_device_kv_tokens=160)
    resizer = scheduler_of(server.scheduler).resizer
    resizer.wanted_units, resizer.outcome = ALL, Outcome.CEILING
    assert server.adjust(ellm_device_kv_tokens=320)
    assert (resizer.wanted_units, server.table.unit_limit) == (10 * GROUPS, 10 * GROUPS)


def test_policies_are_told_what_the_pool_could_come_to_hold(tmp_path: Path) -> None:
    """What nobody has at once; with what others do not need; nothing while they wait."""
    server = SharingServer(tmp_path)
    resizer, sizes = scheduler_of(server.scheduler).resizer, server.sizing.sizes
    sizing = Sizing(EllmConfig(), "key", sizes, LEAST, ALL, server.member)  # nobody looks for it
    resizer.ask(LEAST)
    held = LEAST * UNIT

    def growth(share: int, free: int) -> tuple[int, int]:
        sizing.standing = Standing(share * UNIT, held, free * UNIT)
        found = sizing.growth(resizer, SHAPE)
        return found.tokens, found.with_idle_tokens

    block = SHAPE.block_tokens
    assert growth(LEAST, 0) == (0, 0)
    assert growth(LEAST + 2 * GROUPS, 0) == (0, 2 * block)
    assert growth(LEAST + 2 * GROUPS, 3 * GROUPS) == (3 * block, 3 * block)
    assert growth(LEAST - GROUPS, 3 * GROUPS) == (0, 0)
    assert growth(9 * ALL, 9 * ALL) == ((ALL - LEAST) // GROUPS * block,) * 2  # it holds no more
    sizing._load, sizing._sizer = Load(ALL, ALL, LEAST), Mock(wanted_bytes=LEAST * UNIT)
    assert growth(LEAST, 0) == (0, 0)
    assert sizing.wants_more(resizer, SHAPE), "others have not heard of it"
    sizing._sizer = Mock(wanted_bytes=ALL * UNIT)
    assert not sizing.wants_more(resizer, SHAPE)
    assert growth(ALL, 0)[1] > 0 and sizing.wants_more(resizer, SHAPE)
    resizer.outcome = Outcome.CEILING
    assert growth(9 * ALL, 9 * ALL) == (0, 0) and not sizing.wants_more(resizer, SHAPE)
