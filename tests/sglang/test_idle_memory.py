"""When a server is idle; what libc keeps goes with the pool's memory then, and no request waits for
it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ellm_sgl.config import EllmConfig
from ellm_sgl.memory import KVPool, Sizes
from ellm_sgl.sglang import growing
from ellm_sgl.sglang import sizing as module
from ellm_sgl.sglang.context import context_of
from ellm_sgl.sglang.scheduler import EllmScheduler, resize, scheduler_of
from ellm_sgl.sglang.sizing import Sizing
from tests.memory.fake_arena import FakeArena
from tests.sglang.test_state import BLOCKS, SHAPE, Server

ALL, LEAST = BLOCKS * SHAPE.num_groups, SHAPE.num_groups


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("running_batch", SimpleNamespace(reqs=["decodes"])),
        ("last_batch", SimpleNamespace(reqs=["has just been computed"])),
        ("chunked_req", "is computed in chunks"),
        ("waiting_queue", ["waits"]),
    ],
)
def test_a_server_is_idle_when_sglang_has_no_request_anywhere(name: str, holds: Any) -> None:
    server = Server()
    ours = scheduler_of(server.scheduler)
    assert ours.idle()
    setattr(server.scheduler, name, holds)
    assert not ours.idle()


@pytest.mark.parametrize("meanwhile", [None, SimpleNamespace(reqs=["asks about the health"])])
def test_it_goes_once_in_the_first_turn_that_no_request_shares(
    meanwhile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, trimmed = Server(), []
    server.scheduler._engine_paused = False
    monkeypatch.setattr(module, "trim_heap", lambda: trimmed.append("all"))
    ours: Any = context_of(server.scheduler)
    ours.pool = KVPool(SHAPE, ALL, 1, 8, torch.float32, "cpu", reserve=FakeArena)
    ours.scheduler = EllmScheduler(server.iteration, server.scheduler)
    sizes = Sizes(lambda units: units * 1000, SHAPE.num_groups, ALL)
    sizing = ours.sizing = Sizing(EllmConfig(), "key", sizes, LEAST, ALL, None)
    resize(server.scheduler)
    assert not trimmed
    server.scheduler.last_batch = meanwhile
    sizing.apply(scheduler_of(server.scheduler), LEAST)
    resize(server.scheduler)
    assert trimmed == ([] if meanwhile else ["all"])
    server.scheduler.last_batch = None
    resize(server.scheduler, ["has come, and is to be taken next"])
    assert trimmed == ([] if meanwhile else ["all"])
    resize(server.scheduler, [])
    assert trimmed == ["all"]
    sizing.apply(scheduler_of(server.scheduler), ALL)
    sizing.apply(scheduler_of(server.scheduler), -1)
    resize(server.scheduler)
    assert trimmed == ["all"], "nothing has gone meanwhile"


def test_the_pool_grows_while_more_comes_and_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    server = Server()
    ours: Any = context_of(server.scheduler)
    sizes = Sizes(lambda units: units * 1000, SHAPE.num_groups, ALL)
    sizing = ours.sizing = Sizing(EllmConfig(), "key", sizes, LEAST, ALL, None)
    resizer, needed = scheduler_of(server.scheduler).resizer, Mock(return_value=LEAST)
    monkeypatch.setattr(module, "needed_units", needed)
    server.table.limit_units(LEAST)
    soon = scheduler_of(server.scheduler).growing.soon

    def observed(units: int) -> bool:
        needed.return_value = units
        sizing.observe(server.scheduler, resizer, [])
        return soon()

    assert not observed(LEAST)
    assert observed(ALL)
    now[0] += growing.PATIENCE_S
    assert not soon(), "nothing has come"
    scheduler_of(server.scheduler).decide(server.scheduler.running_batch)  # and nobody waits
    assert observed(ALL)
    now[0] += growing.PATIENCE_S
    assert not soon()
    server.table.limit_units(2 * LEAST)
    assert soon()
    assert not observed(2 * LEAST) and observed(ALL)
    sizing.problem = "the ledger is broken"
    assert not soon()


def test_who_has_finished_needs_nothing_and_a_pause_is_no_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's batch has those that have finished for a turn more; an idle server sleeps then."""
    server = Server()
    ours: Any = context_of(server.scheduler)
    sizes = Sizes(lambda units: units * 1000, SHAPE.num_groups, ALL)
    observed: list[Any] = []
    sizing = ours.sizing = Sizing(EllmConfig(), "key", sizes, LEAST, ALL, None)
    monkeypatch.setattr(sizing, "observe", lambda *given: observed.append(given[-1]))
    done, computed = Mock(finished=lambda: True), Mock(finished=lambda: False)
    server.scheduler._engine_paused = True
    server.scheduler.running_batch.reqs = [done]
    server.scheduler.last_batch = SimpleNamespace(reqs=[done, computed])
    resize(server.scheduler)
    server.scheduler._engine_paused = False
    resize(server.scheduler)
    assert observed == [[computed]]
    scheduler_of(server.scheduler).decide(server.scheduler.running_batch)
    assert observed == [[computed], []]
