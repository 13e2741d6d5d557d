"""Streams that say nothing for long, while a prompt is computed or a request waits, get a comment
line from time to time: clients and proxies that drop silent connections keep them.

SGLang begins an OpenAI answer with its first token, so that what is wrong with a request can be
told as an HTTP status. What is still silent after so long was accepted: the answer then begins
here, with 200; if it ends in an error after all, this is an event of the stream, as SGLang tells
those that come later.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

from ellm_sgl.sglang.slo import PATHS, read_body, replay, route

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

EVERY_S = 10.0
"""Less than what proxies wait by default: mostly 30 to 60 s."""
COMMENT = b": still here\n\n"
"""Clients leave out lines that begin with a colon (server-sent events, WHATWG HTML §9.2)."""
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
_ASKS_FOR_STREAM = re.compile(rb'"stream"\s*:\s*true')


class KeepAlive:
    """ASGI middleware: comments in streams that are silent.

    Args:
        every_s: of silence.
    """

    def __init__(self, app: ASGIApp, every_s: float = EVERY_S) -> None:
        self._app = app
        self._every_s = every_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route(scope) not in PATHS:
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        receive = replay(body, receive)
        if not _is_stream(body):
            await self._app(scope, receive, send)
            return
        stream = _Stream(send, self._every_s)
        beat = asyncio.create_task(stream.beat())
        try:
            await self._app(scope, receive, stream.send)
        finally:
            beat.cancel()


def _is_stream(body: bytes) -> bool:
    if not _ASKS_FOR_STREAM.search(body):
        return False
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict) and values.get("stream") is True


class _Stream:
    """One answer, and when something was last sent of it."""

    def __init__(self, send: Send, every_s: float) -> None:
        self._send = send
        self._every_s = every_s
        self._lock = asyncio.Lock()
        self._spoke = asyncio.Event()
        self._start: Message | None = None
        """Of the answer that the client got."""
        self._begun_here = False
        self._error: int | None = None
        """Status that came too late."""
        self._over = False

    async def send(self, message: Message) -> None:
        """What the server sends."""
        async with self._lock:
            self._spoke.set()
            if message["type"] == "http.response.start":
                if self._begun_here:
                    self._error = message["status"] if message["status"] != 200 else None
                    return
                self._start = message
            elif self._error is not None:
                message = {**message, "body": _event(message.get("body", b""), self._error)}
            self._over = message["type"] == "http.response.body" and not message.get("more_body")
            await self._send(message)

    async def beat(self) -> None:
        """Speak after every silence; ends with the answer, and where it is no stream."""
        while True:
            self._spoke.clear()
            try:
                await asyncio.wait_for(self._spoke.wait(), self._every_s)
                continue
            except TimeoutError:
                pass
            async with self._lock:
                if self._over or (self._start is not None and not _streams(self._start)):
                    return
                if self._start is None:
                    self._begun_here = True
                    self._start = {"type": "http.response.start", "status": 200, "headers": HEADERS}
                    await self._send(self._start)
                await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})


def _streams(start: Message) -> bool:
    headers = dict(start.get("headers", ()))
    return bool(headers.get(b"content-type", b"").startswith(b"text/event-stream"))


def _event(body: bytes, status: int) -> bytes:
    """An error's answer as an event, and the end of the stream."""
    try:
        said: Any = json.loads(body)
    except ValueError:
        said = body.decode(errors="replace")
    said = said if isinstance(said, dict) else {"message": str(said), "code": status}
    error = said if isinstance(said.get("error"), dict) else {"error": said}
    return b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n"
