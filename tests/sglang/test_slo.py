"""SLO fields: where they may stand, where they end up, which values are refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import httpx
import pytest
import uvicorn
from fastapi import Body, FastAPI
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.sglang.slo import SLO_FIELDS, SloFields, _moved, check_slos, slo_seconds


def sent_through(
    path: str, body: bytes, parts: int = 1, root_path: str = ""
) -> tuple[bytes, dict[bytes, bytes]]:
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
    scope = {"type": "http", "path": path, "root_path": root_path, "headers": headers}
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


@pytest.mark.parametrize("value", [0, -1, "30", True, math.nan, math.inf, 1e10, [3], 10**400])
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


def refusal(path: str, body: bytes) -> str | None:
    """The message of the middleware's own 400; None where the application is given the body."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(SloFields(app)({"type": "http", "path": path, "headers": []}, receive, send))
    if not sent:
        return None
    start, answer = sent
    assert start["status"] == 400 and (b"content-type", b"application/json") in start["headers"]
    return str(json.loads(answer["body"])["message"])


@pytest.mark.parametrize("custom", ["x", "", [1], [], 3, 0, True, False, 1.5], ids=repr)
def test_custom_params_that_are_no_object_are_refused_where_slos_would_go_there(
    custom: Any,
) -> None:
    params = {"custom_params": custom}
    for path, body in {
        "/v1/completions": {"prompt": "a", "tpot_slo_ms": 5, **params},
        "/v1/chat/completions": {"messages": [], "ttft_slo_ms": 5, **params},
        "/generate": {"text": "a", "tpot_slo_ms": 5, "sampling_params": [{}, params]},
    }.items():
        message = refusal(path, json.dumps(body).encode())
        assert message is not None and message.startswith(f"custom_params: {custom!r} is not an ob")


def test_sampling_params_that_are_null_get_the_slos_and_an_empty_list_is_refused() -> None:
    body: dict[str, Any] = {"text": "a", "ttft_slo_ms": 9, "sampling_params": None}
    expected = {"text": "a", "sampling_params": {"custom_params": {"ttft_slo_ms": 9}}}
    assert moved("/generate", body) == expected
    message = refusal("/generate", json.dumps(body | {"sampling_params": []}).encode())
    assert message == "sampling_params: an empty list; give an object for each request"


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    body = b'{"tpot_slo_ms": 5, "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    assert refusal("/generate", body) == "the body is nested too deeply; give it flatter"


@pytest.mark.parametrize(
    "body",
    [b'{"tpot_slo_ms": 5, "a": "\xff"}', b'{"tpot_slo_ms": 1' + b"0" * 5000 + b"}",
     b'{"tpot_slo_ms": ', b'["tpot_slo_ms"]', b"tpot_slo_ms"],
    ids=lambda body: body[:30],
)  # fmt: skip
def test_what_is_no_json_object_is_left_to_sglang(body: bytes) -> None:
    assert sent_through("/generate", body)[0] == body


def test_of_keys_given_twice_the_last_counts() -> None:
    body, _ = sent_through(
        "/v1/completions", b'{"tpot_slo_ms": 5, "tpot_slo_ms": 6, "n": 1, "n": 2}'
    )
    assert json.loads(body) == {"n": 2, "custom_params": {"tpot_slo_ms": 6}}


def refused(check: Any, *arguments: Any) -> str:
    """The message of its ValueError; empty if it raises none."""
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return ""


_names = st.sampled_from(["sampling_params", "custom_params", "text", *SLO_FIELDS])
_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(_names, _anything, max_size=4), st.booleans())
def test_no_json_object_is_too_odd(values: dict[str, Any], native: bool) -> None:
    """It is refused in one sentence, or what SGLang gets has each SLO where it looks for it."""
    body = json.dumps(values).encode()
    if told := refused(_moved, body, native):
        assert told.startswith(("custom_params: ", "sampling_params: ")) and "\n" not in told
        return
    got = json.loads(_moved(body, native))
    given_slos = {name: values[name] for name in SLO_FIELDS if name in values}
    if not given_slos:
        assert json.dumps(got) == json.dumps(values)  # text: nan is not equal to itself
        return
    assert not given_slos.keys() & got.keys()
    holders = [got]
    if native:
        params = got["sampling_params"]
        holders = [p for p in (params if isinstance(params, list) else [params]) if type(p) is dict]
    for holder in holders:
        custom = holder["custom_params"]
        assert json.dumps({n: custom[n] for n in given_slos}) == json.dumps(given_slos)


@given(st.binary(max_size=40))
def test_no_bytes_are_too_odd(noise: bytes) -> None:
    for body in (noise, b'{"tpot_slo_ms": ' + noise + b"}", b'{"tpot_slo_ms": 5, "' + noise):
        for native in (False, True):
            with contextlib.suppress(ValueError):
                assert isinstance(_moved(body, native), bytes)


@given(_anything)
def test_whatever_comes_as_sampling_params_is_accepted_or_refused_by_name(params: Any) -> None:
    told = refused(check_slos, params)
    assert not told or told.startswith(SLO_FIELDS)
    custom = params.get("custom_params") if isinstance(params, dict) else params
    assert all(0 < seconds <= math.inf for seconds in slo_seconds(custom))


def test_custom_params_too_deep_to_be_sent_on_are_refused() -> None:
    deep: Any = 1
    for _ in range(500):
        deep = {"a": deep}
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        check_slos({"custom_params": deep})


@contextmanager
def listening(app: Any, root_path: str) -> Iterator[str]:
    """The application on a real server, as SGLang starts it; its address."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, root_path=root_path, log_level="error", lifespan="off")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.mark.parametrize("root_path", ["", "/api", "/api/v1", "/api/"])
def test_below_a_root_path_slos_are_moved_as_well(root_path: str) -> None:
    """A proxy may pass on the path with its own part of it, or without."""
    app = FastAPI()
    app.add_middleware(SloFields)

    @app.post("/v1/completions")
    async def completions(body: Annotated[dict[str, Any], Body()]) -> Any:
        return body

    sent = {"prompt": "a", "tpot_slo_ms": 30}
    with listening(app, root_path) as url, httpx.Client(trust_env=False) as client:
        answer = client.post(f"{url}/v1/completions", json=sent)
        assert answer.json() == {"prompt": "a", "custom_params": {"tpot_slo_ms": 30}}
        bad = client.post(f"{url}/v1/completions", json=sent | {"custom_params": "x"})
        assert bad.status_code == 400 and "custom_params: 'x'" in bad.json()["message"]
        elsewhere = client.post(f"{url}/other/v1/completions", json=sent)
        assert elsewhere.status_code == 404


@pytest.mark.parametrize(
    ("path", "root", "moves"),
    [("/generate", "", True), ("/generate", "/api", True), ("/api/generate", "/api", True),
     ("/api/generate", "", False), ("/apis/generate", "/api", False), ("/api", "/api", False)],
)  # fmt: skip
def test_the_root_path_is_left_out_where_it_is_there(path: str, root: str, moves: bool) -> None:
    body = b'{"tpot_slo_ms": 5}'
    got = sent_through(path, body, root_path=root)[0]
    assert (got != body) == moves


def test_slos_that_make_no_sense_are_none_for_the_scheduler() -> None:
    for value in (math.nan, -1, 0, True, "5", 10**400):
        assert slo_seconds({"tpot_slo_ms": value, "ttft_slo_ms": 8}) == (math.inf, 0.008)


def test_seconds() -> None:
    assert slo_seconds({"tpot_slo_ms": 50, "ttft_slo_ms": 2000}) == (0.05, 2.0)
    assert slo_seconds({"ttft_slo_ms": None}) == (math.inf, math.inf)
    assert slo_seconds(None) == (math.inf, math.inf)
