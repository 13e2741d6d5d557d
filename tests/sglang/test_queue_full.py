"""A full queue, as SGLang tells it and as clients are told: a real server does not say when."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ellm_sgl.sglang import queue_full
from ellm_sgl.sglang.keep_alive import COMMENT
from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.sglang.queue_full import LONGEST_S, QueueFull, turn_away

declare()
FULL = "The request queue is full."
ABORT = {"type": "abort", "status_code": 503, "message": FULL}


def event(**values: Any) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"


NATIVE = event(text="", output_ids=[], meta_info={"id": "1", "finish_reason": ABORT})
OPENAI = event(error={"object": "error", "message": FULL, "type": "SERVICE_UNAVAILABLE"})
TOKENS = [event(text="a", meta_info={"finish_reason": None}), b"data: [DONE]\n\n"]


def answered(answer: Response, path: str = "/generate", waited_s: float = 0.0) -> httpx.Response:
    """What a client gets where SGLang answers so."""

    async def respond(_: Any) -> Response:
        return answer

    app = QueueFull(Starlette(routes=[Route(path, respond, methods=["POST"])]))
    app._waited_s = waited_s

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(path, json={})

    return asyncio.run(ask())


def stream(*chunks: bytes) -> Response:
    async def body() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return StreamingResponse(body(), media_type="text/event-stream")


@pytest.mark.parametrize(
    "answer",
    [
        stream(NATIVE, b"data: [DONE]\n\n"),
        stream(OPENAI, b"data: [DONE]\n\n"),
        JSONResponse({"object": "error", "message": FULL, "code": 503}, 503),
    ],
    ids=["native stream", "OpenAI's stream", "whole"],
)
def test_it_is_429_and_nothing_else(answer: Response) -> None:
    got = answered(answer)
    assert (got.status_code, got.headers["Retry-After"]) == (429, "1")
    assert got.json()["message"] == FULL and got.json()["code"] == 429


@pytest.mark.parametrize(
    ("waited_s", "told"), [(0.0, "1"), (0.2, "1"), (7.01, "8"), (3000.0, str(LONGEST_S))]
)
def test_the_time_to_come_again_is_what_the_last_one_waited(waited_s: float, told: str) -> None:
    assert answered(stream(NATIVE), waited_s=waited_s).headers["Retry-After"] == told


BATCH = event(index=1, output_ids=[], meta_info={"finish_reason": ABORT})
OTHER = event(output_ids=[], meta_info={"finish_reason": ABORT | {"message": "asked for"}})
ODD = [b'data: {"abort"', b'data: {"error": 5}\n', event(meta_info={"finish_reason": "abort"})]


@pytest.mark.parametrize(
    "chunks",
    [TOKENS, [TOKENS[0], NATIVE], [BATCH, TOKENS[1]], [OTHER], [b"", NATIVE], [b"data: [1]\n"],
     [event(text=FULL + '"abort"', meta_info={"finish_reason": None})],
     [event(meta_info=None, text="abort")], *([odd] for odd in ODD)],
)  # fmt: skip
def test_every_other_stream_is_passed_on_as_it_is(chunks: list[bytes]) -> None:
    got = answered(stream(*chunks))
    assert got.status_code == 200 and "Retry-After" not in got.headers
    assert got.content == b"".join(chunks)


@pytest.mark.parametrize(
    ("answer", "path"),
    [
        (Response("ready soon", 503), "/generate"),
        (JSONResponse(["message"], 503), "/generate"),
        (JSONResponse({"message": "Using priority is disabled"}, 503), "/v1/completions"),
        (JSONResponse({"message": FULL}, 400), "/generate"),
        (JSONResponse({"message": FULL}, 503), "/other"),
    ],
)
def test_every_other_answer_is_passed_on_as_it_is(answer: Response, path: str) -> None:
    got = answered(answer, path)
    assert (got.status_code, got.content) == (answer.status_code, bytes(answer.body))
    assert "Retry-After" not in got.headers


def test_who_comes_back_to_a_full_queue_is_not_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does anybody make room for it, whatever it is for SGLang."""
    from sglang.srt.managers import scheduler as module

    sent: list[Any] = []
    scheduler: Any = SimpleNamespace(
        max_queued_requests=1,
        waiting_queue=["waits"],
        enable_priority_scheduling=False,
        ipc_channels=SimpleNamespace(
            send_to_tokenizer=SimpleNamespace(send_output=lambda *told: sent.append(told))
        ),
        send_abort_output=lambda *told: sent.append(told),
    )
    monkeypatch.setattr(module, "_make_abort_req", lambda *_, **__: "full", raising=False)
    original = inspect.unwrap(module.Scheduler._abort_on_queued_limit)
    context = SimpleNamespace(abort=lambda **_: None)
    req: Any = SimpleNamespace(
        rid="1", priority=None, is_retracted=True, origin_input_ids=[65],
        time_stats=SimpleNamespace(trace_ctx=context),
    )  # fmt: skip
    assert not turn_away(original, scheduler, req)
    assert sent == [] and scheduler.waiting_queue == ["waits"]
    req.is_retracted = False
    assert turn_away(original, scheduler, req)
    assert len(sent) == 1


def test_sglang_says_of_a_request_that_it_comes_back_until_it_runs_again() -> None:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    assert "self.is_retracted = False" in inspect.getsource(Req.__init__)
    assert "self.is_retracted = True" in inspect.getsource(Req.reset_for_retract)
    prepared = inspect.getsource(inspect.unwrap(ScheduleBatch.prepare_for_extend))
    assert "req.is_retracted = False" in prepared


@pytest.mark.parametrize(("comment", "after"), [(False, "8"), (True, "1")])
def test_it_says_how_long_the_last_one_waited_for_its_answer(
    monkeypatch: pytest.MonkeyPatch, comment: bool, after: str
) -> None:
    """A comment, which keeps a connection alive, is no answer."""
    now = [100.0]
    monkeypatch.setattr(queue_full, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def respond(request: Any) -> Response:
        if await request.json():
            return JSONResponse({"object": "error", "message": FULL, "code": 503}, 503)
        now[0] += 7.01
        return stream(COMMENT, *TOKENS) if comment else stream(*TOKENS)

    app = QueueFull(Starlette(routes=[Route("/generate", respond, methods=["POST"])]))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            assert (await client.post("/generate", json={})).status_code == 200
            return await client.post("/generate", json={"full": True})

    refused = asyncio.run(ask())
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, after)
