"""A request that finds SGLang's queue full (`--max-queued-requests`) is told so as HTTP tells it:
429, with `Retry-After`.

SGLang's own answer is 503, without a word on when to come back; for a stream it is 200, and what
has happened is in its first event. An ASGI middleware therefore holds an answer back until its
first bytes are there, which say what it is.

Who has run already is no such request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ellm_sgl.sglang.keep_alive import COMMENT
from ellm_sgl.sglang.requests import refuse_empty
from ellm_sgl.sglang.slo import PATHS, json_object, refusal, route

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MESSAGES = ("The request queue is full.", "The request is aborted by a higher priority request.")
"""SGLang's, in `Scheduler._abort_on_queued_limit`; who is refused may have waited already."""

_SIGNS = (b'"abort"', b'{"error"')
"""One is in the first event of a stream that was refused: of a native one, of OpenAI's."""

LONGEST_S = 60
"""What clients' libraries wait at most because a server asks them to."""


class QueueFull:
    """ASGI middleware: 429 in place of SGLang's answers to requests for which the queue is full.

    `Retry-After` is how long the request that began its answer last had waited for that (an answer
    in one piece begins when it is complete): a place becomes free sooner, and those who were
    refused come back over such a time.

    A native request of several prompts keeps SGLang's answer where it is a stream: its events tell
    which of the prompts were refused, and the others go on.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waited_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route(scope) not in PATHS:
            await self._app(scope, receive, send)
            return
        came, start, refused = time.monotonic(), None, False

        async def look(message: Message) -> None:
            nonlocal start, refused
            if refused:  # what SGLang has to say beyond that
                return
            if message["type"] == "http.response.start":
                start = message
                return
            if start is not None:
                status, begin, start = start["status"], start, None
                if (said := _queue_full(status, message.get("body", b""))) is not None:
                    refused = True
                    await refusal(said, 429, "TooManyRequests", self._retry_after())(
                        scope, receive, send
                    )
                    return
                if status == 200 and not message.get("body", b"").startswith(COMMENT):
                    self._waited_s = time.monotonic() - came
                await send(begin)
            await send(message)

        await self._app(scope, receive, look)

    def _retry_after(self) -> dict[str, str]:
        seconds = min(max(math.ceil(self._waited_s), 1), LONGEST_S)
        # A page from another origin reads no header that is not named.
        return {"Retry-After": str(seconds), "Access-Control-Expose-Headers": "Retry-After"}


def turn_away(original: Callable[..., bool], scheduler: Scheduler, req: Req) -> bool:
    """Around `Scheduler._abort_on_queued_limit`: the queue takes those who come back because memory
    is short or generation pauses, whatever its limit. SGLang would take them for new ones, and end
    them in the midst of their answers.

    All that are queued come by here, and so a prompt of no token, which no step may have."""
    refuse_empty(req)
    return not req.is_retracted and original(scheduler, req)


def _queue_full(status: int, begin: bytes) -> str | None:
    """SGLang's message, where an answer that begins so says that the queue is full."""
    if status == 503:
        said = _message(json_object(begin))
    elif status == 200 and begin.startswith(b"data: {") and any(s in begin for s in _SIGNS):
        event = json_object(begin.partition(b"\n")[0].removeprefix(b"data: "))
        meta = event.get("meta_info")
        if isinstance(meta, dict) and "index" not in event:
            said = _message(meta.get("finish_reason"))
        else:
            said = _message(event.get("error"))
    else:
        return None
    return said if said in MESSAGES else None


def _message(said: Any) -> Any:
    return said.get("message") if isinstance(said, dict) else None
