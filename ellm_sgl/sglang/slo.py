"""Per-request SLOs: `tpot_slo_ms` and `ttft_slo_ms` in the body of any generation request.

SGLang's request types do not know these fields, so an ASGI middleware moves them into
`custom_params`, which SGLang carries to the scheduler untouched.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

SLO_FIELDS = ("tpot_slo_ms", "ttft_slo_ms")
MAX_SLO_MS = 1e9

_PATHS = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def slo_seconds(custom_params: Any) -> tuple[float, float]:
    """(TPOT, TTFT) SLO of a request in seconds; inf where none was given."""
    given = custom_params if isinstance(custom_params, dict) else {}
    tpot, ttft = (given.get(name) for name in SLO_FIELDS)
    return (
        math.inf if tpot is None else float(tpot) / 1e3,
        math.inf if ttft is None else float(ttft) / 1e3,
    )


def check_slos(sampling_params: Any) -> None:
    """Check the SLOs of one request, or of a batch of them.

    Raises:
        ValueError: a value is not a positive number of milliseconds.
    """
    for params in sampling_params if isinstance(sampling_params, list) else [sampling_params]:
        custom = params.get("custom_params") if isinstance(params, dict) else None
        for name in SLO_FIELDS:
            value = custom.get(name) if isinstance(custom, dict) else None
            if value is not None and not _is_slo(value):
                raise ValueError(
                    f"{name}: {value!r} is not a number of milliseconds; give one above 0 and at "
                    f"most {MAX_SLO_MS:g}, or leave it out"
                )


def _is_slo(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and 0 < value <= MAX_SLO_MS
    )


class SloFields:
    """ASGI middleware: moves the SLO fields of a request's body into `custom_params`."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _PATHS:
            await self._app(scope, receive, send)
            return
        body = await _read_body(receive)
        if b"_slo_ms" in body:
            body = _moved(body, native=scope["path"] == "/generate")
            length = str(len(body)).encode()
            headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
            scope = {**scope, "headers": [*headers, (b"content-length", length)]}
        await self._app(scope, _replay(body, receive), send)


async def _read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, then whatever the client sends further (that it has gone, in time)."""
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _moved(body: bytes, native: bool) -> bytes:
    """The body with its SLO fields in `custom_params`; as it was where it is no JSON object."""
    try:
        values = json.loads(body)
    except ValueError:
        return body
    if not isinstance(values, dict):
        return body
    slos = {name: values.pop(name) for name in SLO_FIELDS if name in values}
    if not slos:
        return body
    if native:
        params = values.setdefault("sampling_params", {})
        holders = params if isinstance(params, list) else [params]
    else:
        holders = [values]
    for holder in holders:
        if isinstance(holder, dict):  # if not, SGLang will say so
            holder["custom_params"] = (holder.get("custom_params") or {}) | slos
    return json.dumps(values).encode()
