"""Per-request SLOs: `tpot_slo_ms` and `ttft_slo_ms` in the body of any generation request.

SGLang's request types do not know these fields, so an ASGI middleware moves them into
`custom_params`, which SGLang carries to the scheduler untouched.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ellm_sgl.config.ranges import MILLISECONDS, check_depth, shown

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

SLO_FIELDS = ("tpot_slo_ms", "ttft_slo_ms")

TOO_DEEP = "the body is nested too deeply; give it flatter"

PATHS = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
"""Of requests that generate something."""


def slo_seconds(custom_params: Any) -> tuple[float, float]:
    """(TPOT, TTFT) SLO of a request in seconds; inf where none was given that makes sense."""
    given = custom_params if isinstance(custom_params, dict) else {}
    tpot, ttft = (
        given[name] / 1e3 if given.get(name) in MILLISECONDS else math.inf for name in SLO_FIELDS
    )
    return tpot, ttft


def check_slos(sampling_params: Any) -> None:
    """Check the SLOs of one request, or of a batch of them, and what else is beside them.

    Raises:
        ValueError: a value is not a positive number of milliseconds; `custom_params` is nested so
            deeply that it cannot be sent to the scheduler.
    """
    for params in sampling_params if isinstance(sampling_params, list) else [sampling_params]:
        custom = params.get("custom_params") if isinstance(params, dict) else None
        if not isinstance(custom, dict):
            continue
        check_depth(custom, "custom_params")
        for name in SLO_FIELDS:
            value = custom.get(name)
            if value is not None and value not in MILLISECONDS:
                raise ValueError(
                    f"{name}: {shown(value)} is not a number of milliseconds; give "
                    f"{MILLISECONDS}, or leave it out"
                )


class SloFields:
    """ASGI middleware: moves the SLO fields of a request's body into `custom_params`.

    What is wrong with a body besides them is left to SGLang.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (path := route(scope)) not in PATHS:
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        if b"_slo_ms" in body:
            try:
                body = _moved(body, native=path == "/generate")
            except ValueError as error:
                await refusal(str(error))(scope, receive, send)
                return
            length = str(len(body)).encode()
            headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
            scope = {**scope, "headers": [*headers, (b"content-length", length)]}
        await self._app(scope, replay(body, receive), send)


def route(scope: Scope) -> str:
    """The path below `--fastapi-root-path`. A proxy strips that path from what it passes on;
    uvicorn puts it before what it gets, other servers do not. Starlette's routes do likewise."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    below = path.removeprefix(root)
    return below if below.startswith("/") else path


def refusal(
    message: str,
    status: int = 400,
    kind: str = "BadRequest",
    headers: Mapping[str, str] | None = None,
) -> ASGIApp:
    """Answers an error, in the form of SGLang's own answers."""
    from starlette.responses import JSONResponse

    error = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return JSONResponse(error, status, headers)


async def read_body(receive: Receive) -> bytes:
    """All of a request's body; what there is of it where the client has gone."""
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return b"".join(parts)


def json_object(text: bytes) -> dict[str, Any]:
    """Empty for what is no JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def replay(body: bytes, receive: Receive) -> Receive:
    """Says the body once, then whatever the client sends further (that it has gone, in time)."""
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _moved(body: bytes, native: bool) -> bytes:
    """The body with its SLO fields in `custom_params`; as it was where it is no JSON object.

    Raises:
        ValueError: it has SLO fields, and there is no place for them.
    """
    try:
        values = json.loads(body)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError:
        return body
    if not isinstance(values, dict):
        return body
    slos = {name: values.pop(name) for name in SLO_FIELDS if name in values}
    if not slos:
        return body
    for holder in _holders(values) if native else [values]:
        _put(slos, holder)
    try:
        return json.dumps(values).encode()
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def _holders(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The sampling parameters of a native request, or of each in a batch."""
    if values.get("sampling_params") is None:
        values["sampling_params"] = {}
    params = values["sampling_params"]
    if params == []:
        raise ValueError("sampling_params: an empty list; give an object for each request")
    holders = params if isinstance(params, list) else [params]
    return [holder for holder in holders if isinstance(holder, dict)]  # SGLang refuses the others


def _put(slos: dict[str, Any], holder: dict[str, Any]) -> None:
    custom = holder.get("custom_params")
    if not isinstance(custom, dict | None):
        raise ValueError(
            f"custom_params: {shown(custom)} is not an object, and {' and '.join(slos)} would go "
            "there; give an object, or leave it out"
        )
    holder["custom_params"] = (custom or {}) | slos
