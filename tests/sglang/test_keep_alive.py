"""Comments in streams that are silent; everything else goes through untouched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ellm_sgl.sglang.keep_alive import COMMENT, KeepAlive
from ellm_sgl.sglang.queue_full import QueueFull

EVERY_S = 0.05
CHAT = "/v1/chat/completions"
FIRST, LAST = b'data: {"text": "a"}\n\n', b"data: [DONE]\n\n"


def answered(
    answer: Response,
    body: dict[str, Any],
    before_s: float = 0.0,
    path: str = CHAT,
    queue_full: bool = False,
    every_s: float = EVERY_S,
) -> httpx.Response:
    """What a client gets that sends this, where SGLang answers so after a while."""

    async def respond(request: Any) -> Response:
        assert await request.json() == body
        await asyncio.sleep(before_s)
        return answer

    app: Any = KeepAlive(Starlette(routes=[Route(path, respond, methods=["POST"])]), every_s)
    app = QueueFull(app) if queue_full else app

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(path, json=body)

    return asyncio.run(ask())


def stream(*chunks: bytes, silent_s: float = 0.0) -> Response:
    async def body() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk
            await asyncio.sleep(silent_s)

    return StreamingResponse(body(), media_type="text/event-stream")


STREAM = {"stream": True}


@pytest.mark.parametrize("queue_full", [False, True])
def test_an_answer_that_is_late_begins_with_comments(queue_full: bool) -> None:
    found = answered(stream(FIRST, LAST), STREAM, before_s=10 * EVERY_S, queue_full=queue_full)
    assert found.status_code == 200
    assert found.headers["content-type"].startswith("text/event-stream")
    comments, _, events = found.content.rpartition(COMMENT)
    assert comments and not comments.replace(COMMENT, b"")
    assert events == FIRST + LAST


def test_so_does_one_that_is_silent_in_between() -> None:
    found = answered(stream(FIRST, LAST, silent_s=10 * EVERY_S), STREAM)
    assert COMMENT + LAST in found.content.partition(FIRST)[2]
    assert found.content.replace(COMMENT, b"") == FIRST + LAST


def test_an_answer_in_time_is_as_it_was() -> None:
    assert answered(stream(FIRST, LAST), STREAM, every_s=60.0).content == FIRST + LAST
    refused = JSONResponse({"message": "too long"}, 400)
    found = answered(refused, STREAM, every_s=60.0)
    assert (found.status_code, found.content) == (400, refused.body)


@pytest.mark.parametrize("body", [{}, {"stream": False}, {"x": {"stream": True}}])
def test_what_is_no_stream_is_left_alone(body: dict[str, Any]) -> None:
    whole = JSONResponse({"text": "a"})
    assert answered(whole, body, before_s=3 * EVERY_S).content == whole.body


def test_other_routes_are_left_alone() -> None:
    whole = JSONResponse({})
    found = answered(whole, STREAM, before_s=3 * EVERY_S, path="/ellm/policy")
    assert found.content == whole.body


@pytest.mark.parametrize(
    "said", [{"message": "no", "code": 503}, {"error": {"message": "no", "code": 503}}]
)
def test_an_error_that_comes_too_late_is_an_event(said: dict[str, Any]) -> None:
    found = answered(JSONResponse(said, 503), STREAM, before_s=10 * EVERY_S)
    events = [part for part in found.content.split(b"\n\n") if part.startswith(b"data: ")]
    assert found.status_code == 200 and events[1] == b"data: [DONE]"
    assert json.loads(events[0][6:])["error"]["message"] == "no"
