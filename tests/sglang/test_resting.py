"""A server that is paused sleeps, where an idle one does."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from ellm_sgl.memory import Outcome
from ellm_sgl.sglang import resting
from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()


class Paused:
    """A scheduler, as far as it sleeps; SGLang's own sleeper waits for its socket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, socket: Any) -> None:
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

        self._engine_paused = True
        self.idle_sleeper = IdleSleeper([socket])
        self._sleep = Scheduler.maybe_sleep_on_idle
        self.outcome = Outcome.APPLIED
        ours = SimpleNamespace(resizer=self)
        monkeypatch.setattr(resting, "scheduler_of", lambda owner: ours)

    def maybe_sleep_on_idle(self) -> None:
        self._sleep(self)

    def rests(self, *requests: Any) -> float:
        begin = time.monotonic()
        resting.rest(self, requests)
        return time.monotonic() - begin


@pytest.fixture
def sockets() -> Iterator[tuple[Any, Any]]:
    """A scheduler's, and that of who asks it."""
    context: zmq.Context[Any] = zmq.Context()
    scheduler, client = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    scheduler.bind("inproc://scheduler")
    client.connect("inproc://scheduler")
    yield scheduler, client
    context.destroy(linger=0)


def test_while_generation_is_paused_it_sleeps_until_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, sockets: tuple[Any, Any]
) -> None:
    scheduler, client = sockets
    server = Paused(monkeypatch, scheduler)
    assert server.rests() > 0.9
    timer = Timer(0.2, lambda: client.send(b"a request"))
    timer.start()
    assert server.rests() < 0.9
    timer.join()
    assert server.rests() < 0.5, "it has not been taken yet"


def test_who_has_something_to_do_does_not_sleep(
    monkeypatch: pytest.MonkeyPatch, sockets: tuple[Any, Any]
) -> None:
    server = Paused(monkeypatch, sockets[0])
    slept: list[object] = []
    monkeypatch.setattr(server, "maybe_sleep_on_idle", lambda: slept.append(1))
    server.rests("a request")
    server.outcome = Outcome.UNDER_WAY
    server.rests()
    server.outcome, server._engine_paused = Outcome.APPLIED, False
    server.rests()  # SGLang sees to it
    assert slept == []
    server._engine_paused = True
    server.rests()
    assert slept == [1]


def test_sglangs_loops_go_round_at_once_while_generation_is_paused() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    for loop in (Scheduler.event_loop_normal, Scheduler.event_loop_overlap):
        source = inspect.getsource(inspect.unwrap(loop))
        paused = source.partition("if self._engine_paused:")[2].partition("continue")[0]
        assert paused and "sleep" not in paused and "idle" not in paused
        assert "self.on_idle()" in source
