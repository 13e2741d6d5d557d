"""When a server is idle; what libc keeps goes with the pool's memory then, and no request waits for
it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ellm_sgl.config import EllmConfig
from ellm_sgl.memory import KVPool, Sizes
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
    resize(server.scheduler)
    assert trimmed == ["all"]
    sizing.apply(scheduler_of(server.scheduler), ALL)
    sizing.apply(scheduler_of(server.scheduler), -1)
    resize(server.scheduler)
    assert trimmed == ["all"], "nothing has gone meanwhile"
