"""Requests for which the queue has no place (`--max-queued-requests`): 429 and `Retry-After`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ellm_sgl.client.process import CONNECTIONS, DEMO_ARGUMENTS, ServerProcess
from tests.e2e.load import greedy, prompts
from tests.servers import STRICT

pytestmark = pytest.mark.slow

RUNNING, QUEUED = 2, 3
OPENAI = {"model": "demo", "max_tokens": 100, "ignore_eos": True}
ROUTES: dict[str, Any] = {
    "/generate": greedy(prompts(1, 100, 100)[0], 100),
    "/v1/chat/completions": OPENAI | {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": OPENAI | {"prompt": "hi"},
}


@pytest.fixture(scope="module")
def limited() -> Iterator[ServerProcess]:
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fcfs", "--ellm-device-kv-tokens", "8000",
                 "--max-running-requests", str(RUNNING), "--max-queued-requests", str(QUEUED),
                 "--enable-priority-scheduling", "--disable-priority-preemption"]  # fmt: skip
    with ServerProcess(arguments, STRICT) as server:
        yield server
        assert server.alive(), server.last_words()
        assert server.state()["integrity"] == "ok"


def ask_at_once(url: str, path: str, bodies: list[Any]) -> list[httpx.Response]:
    """The answers, in the order of the bodies."""

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            timeout=300, limits=CONNECTIONS, trust_env=False, headers={"Origin": "http://a.page"}
        ) as client:
            return await asyncio.gather(*(client.post(url + path, json=body) for body in bodies))

    return asyncio.run(ask())


def assert_told(answer: httpx.Response, message: str) -> None:
    assert 1 <= int(answer.headers["Retry-After"]) <= 60
    assert answer.headers["Access-Control-Allow-Origin"] in ("*", "http://a.page")
    assert answer.headers["Access-Control-Expose-Headers"] == "Retry-After"
    said = answer.json()
    assert (said["message"], said["code"]) == (message, 429)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", ROUTES)
def test_a_full_queue_is_told_with_a_time_to_come_again(
    limited: ServerProcess, path: str, stream: bool
) -> None:
    answers = ask_at_once(limited.url, path, [ROUTES[path] | {"stream": stream}] * 20)
    counted = Counter(answer.status_code for answer in answers)
    assert counted.keys() == {200, 429} and counted[200] >= QUEUED
    for answer in answers:
        if answer.status_code == 429:
            assert_told(answer, "The request queue is full.")
        else:
            assert "queue is full" not in answer.text


def test_who_has_to_make_room_for_a_more_urgent_one_is_told_so(limited: ServerProcess) -> None:
    """Those that run go on until the more urgent ones have come."""
    long = greedy(ROUTES["/generate"]["input_ids"], 1000) | {"stream": True, "priority": 0}
    short = ROUTES["/generate"] | {"stream": True}
    with ThreadPoolExecutor(2) as background:
        running = background.submit(ask_at_once, limited.url, "/generate", [long] * RUNNING)
        wait_for(limited, running=RUNNING, waiting=0)
        queued = [short | {"priority": 0}] * QUEUED
        waiting = background.submit(ask_at_once, limited.url, "/generate", queued)
        wait_for(limited, running=RUNNING, waiting=QUEUED)
        urgent = ask_at_once(limited.url, "/generate", [short | {"priority": 9}] * 2)
        assert [answer.status_code for answer in (*running.result(), *urgent)] == [200] * 4
        displaced = [answer for answer in waiting.result() if answer.status_code != 200]
    assert len(displaced) == 2
    for answer in displaced:
        assert_told(answer, "The request is aborted by a higher priority request.")


def wait_for(server: ServerProcess, **counts: int) -> None:
    deadline = time.monotonic() + 60
    while counts != {name: (state := server.state(integrity=False))[name] for name in counts}:
        assert time.monotonic() < deadline, state
        time.sleep(0.02)


def test_a_stream_of_several_prompts_goes_on_for_those_that_have_a_place(
    limited: ServerProcess,
) -> None:
    ids = [ROUTES["/generate"]["input_ids"]] * 20
    [answer] = ask_at_once(
        limited.url, "/generate", [ROUTES["/generate"] | {"input_ids": ids, "stream": True}]
    )
    assert answer.status_code == 200
    assert "The request queue is full." in answer.text
    assert answer.text.count('"type":"length"') >= QUEUED
