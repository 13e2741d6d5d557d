"""SLO fields: where they may stand, where they end up, which values are refused."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from ellm_sgl.sglang.slo import SloFields, check_slos, slo_seconds


def sent_through(path: str, body: bytes, parts: int = 1) -> tuple[bytes, dict[bytes, bytes]]:
    """What the application behind the middleware gets: body and headers."""
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        chunks, more = [], True
        while more:
            message = await receive()
            chunks.append(message["body"])
            more = message.get("more_body", False)
        seen["body"], seen["headers"] = b"".join(chunks), dict(scope["headers"])

    size = -(-len(body) // parts) or 1
    pieces = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
    messages = [
        {"type": "http.request", "body": p, "more_body": i < len(pieces) - 1}
        for i, p in enumerate(pieces)
    ]

    async def receive() -> Any:
        return messages.pop(0)

    headers = [(b"content-length", str(len(body)).encode()), (b"x", b"y")]
    scope = {"type": "http", "path": path, "headers": headers}
    asyncio.run(SloFields(app)(scope, receive, None))  # type: ignore[arg-type]
    return seen["body"], seen["headers"]


def moved(path: str, values: Any) -> Any:
    body, headers = sent_through(path, json.dumps(values).encode())
    assert headers == {b"content-length": str(len(body)).encode(), b"x": b"y"}
    return json.loads(body)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_openai_requests_carry_them_in_custom_params(path: str) -> None:
    body = {"prompt": "a", "tpot_slo_ms": 30, "ttft_slo_ms": 500, "custom_params": {"mine": 1}}
    custom = {"mine": 1, "tpot_slo_ms": 30, "ttft_slo_ms": 500}
    assert moved(path, body) == {"prompt": "a", "custom_params": custom}


def test_native_requests_carry_them_in_the_sampling_params() -> None:
    body = {"text": "a", "tpot_slo_ms": 30, "sampling_params": {"temperature": 0}}
    params = {"temperature": 0, "custom_params": {"tpot_slo_ms": 30}}
    assert moved("/generate", body) == {"text": "a", "sampling_params": params}


def test_native_requests_without_sampling_params_get_some() -> None:
    expected = {"text": "a", "sampling_params": {"custom_params": {"ttft_slo_ms": 9}}}
    assert moved("/generate", {"text": "a", "ttft_slo_ms": 9}) == expected


def test_every_request_of_a_native_batch_gets_them() -> None:
    body = {"text": ["a", "b"], "tpot_slo_ms": 3, "sampling_params": [{}, {"custom_params": None}]}
    one = {"custom_params": {"tpot_slo_ms": 3}}
    assert moved("/generate", body)["sampling_params"] == [one, one]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"tpot_slo_ms"', b'{"prompt": "about tpot_slo_ms"}',
     b'{"sampling_params": [5], "text": "_slo_ms"}'],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/other"])
def test_other_bodies_pass_untouched(path: str, body: bytes) -> None:
    assert sent_through(path, body)[0] == body


def test_a_body_that_comes_in_parts_is_put_together() -> None:
    body = json.dumps({"prompt": "a" * 1000, "tpot_slo_ms": 3}).encode()
    got = json.loads(sent_through("/v1/completions", body, parts=7)[0])
    assert got == {"prompt": "a" * 1000, "custom_params": {"tpot_slo_ms": 3}}


def test_sampling_params_that_are_no_object_are_left_to_sglang() -> None:
    body = {"text": "a", "tpot_slo_ms": 3, "sampling_params": "x"}
    assert moved("/generate", body) == {"text": "a", "sampling_params": "x"}


@pytest.mark.parametrize("value", [0, -1, "30", True, math.nan, math.inf, 1e10, [3]])
@pytest.mark.parametrize("name", ["tpot_slo_ms", "ttft_slo_ms"])
def test_values_that_make_no_sense_are_refused_by_name(name: str, value: Any) -> None:
    for params in ({"custom_params": {name: value}}, [{}, {"custom_params": {name: value}}]):
        with pytest.raises(ValueError, match=name):
            check_slos(params)


@pytest.mark.parametrize(
    "params",
    [None, {}, {"custom_params": None}, [], [None],
     {"custom_params": {"tpot_slo_ms": None, "other": "x"}},
     {"custom_params": {"tpot_slo_ms": 0.5, "ttft_slo_ms": 7}}],
)  # fmt: skip
def test_everything_else_is_accepted(params: Any) -> None:
    check_slos(params)


def test_seconds() -> None:
    assert slo_seconds({"tpot_slo_ms": 50, "ttft_slo_ms": 2000}) == (0.05, 2.0)
    assert slo_seconds({"ttft_slo_ms": None}) == (math.inf, math.inf)
    assert slo_seconds(None) == (math.inf, math.inf)
