"""Whatever is sent to the routes that this project adds, and in the fields of requests that it
reads: it is done, or refused in one message; never a 5xx, and nobody else notices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.schemas import APIOperation

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from tests.any_json import ODD_NUMBERS, ODD_TEXT, VALUES
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.servers import STRICT

pytestmark = pytest.mark.slow

ROUTES = (
    ("GET", "/ellm/state"),
    ("GET", "/ellm/steps"),
    ("GET", "/ellm/requests"),
    ("GET", "/ellm/policies"),
    ("POST", "/ellm/policy"),
    ("POST", "/set_internal_state"),
    ("POST", "/release_memory_occupation"),
    ("POST", "/resume_memory_occupation"),
)
"""Added, or with a hook of this project on what they read."""
TOKENS = 4_000
LONGEST_MESSAGE = 2_000
ON_ONE_SERVER = settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    arguments = [
        *DEMO_ARGUMENTS,
        "--ellm-policy", "fixed-ratio",
        "--ellm-device-kv-tokens", str(TOKENS),
        "--ellm-host-kv-tokens", str(TOKENS),
        "--enable-priority-scheduling", "--disable-priority-preemption",
        "--random-seed", "1",
    ]  # fmt: skip
    with ServerProcess(arguments, STRICT) as started:
        yield started


@pytest.fixture(scope="module", autouse=True)
def others(server: ServerProcess) -> Iterator[None]:
    """After all of it the server has the same answers, and all of its memory."""
    bodies = [greedy(p, 24) for p in prompts(4, 60, 200, seed=77)]
    expected = token_ids(ask(server.url, bodies))
    yield
    assert server.alive(), server.last_words()
    tags = {"tags": ["kv_cache"]}
    httpx.post(f"{server.url}/resume_memory_occupation", json=tags, timeout=60).raise_for_status()
    server.adjust(ellm_device_kv_tokens=TOKENS)
    assert token_ids(ask(server.url, bodies)) == expected
    server.flush_cache()
    state = server.state()
    assert state["integrity"] == "ok"
    assert state["device_units_free"] == state["device_units_total"]
    assert state["host_units_free"] == state["host_units_total"]


@pytest.fixture(scope="module")
def operations(server: ServerProcess) -> dict[tuple[str, str], APIOperation]:
    """As the server's own OpenAPI document has them."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return {(method, path): schema[path][method] for method, path in ROUTES}


def test_no_route_is_left_out(server: ServerProcess) -> None:
    paths = httpx.get(f"{server.url}/openapi.json", timeout=60).raise_for_status().json()["paths"]
    added = {(m.upper(), path) for path in paths if path.startswith("/ellm") for m in paths[path]}
    assert added == {route for route in ROUTES if route[1].startswith("/ellm")}


def check(answer: httpx.Response, sent: Any) -> None:
    """Done, or refused in one message that names a field of what was sent, or what is wrong with
    all of it."""
    if 200 <= answer.status_code < 300:
        return
    assert 400 <= answer.status_code < 500, f"{answer.status_code} {answer.text}: {sent}"
    said = message(answer)
    assert "Traceback" not in said, f"{said}: {sent}"
    assert any(name in said for name in (*names(sent), *OF_ALL)), f"{said}: {sent}"
    # What is of another type than SGLang's its way tells in several lines.
    assert "validation error" in said or ("\n" not in said and len(said) < LONGEST_MESSAGE), said


OF_ALL = ("json_invalid", "body", "query", "prompt", "header", '"name"', "no policy", "tags")
"""Of what is wrong with the body, or lacks in it."""


def names(sent: Any) -> Iterator[str]:
    """Those of all fields."""
    for value in sent if isinstance(sent, list) else []:
        yield from names(value)
    for name, value in sent.items() if isinstance(sent, dict) else []:
        yield from ([name] if name.strip() else [])
        yield from names(value)


def message(answer: httpx.Response) -> str:
    """Of an error, in the forms of this project, of SGLang and of FastAPI."""
    found = answer.json()
    said = found.get("error", found.get("message", found.get("detail")))
    if isinstance(said, dict):
        said = said.get("message")
    assert isinstance(said, str), found
    return said


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_cases_of_the_openapi_document(
    server: ServerProcess,
    operations: dict[tuple[str, str], APIOperation],
    route: tuple[str, str],
    mode: GenerationMode,
) -> None:
    operation = operations[route]
    if mode is GenerationMode.NEGATIVE and not operation.body and not operation.query:
        pytest.skip("takes nothing that could be wrong")

    @settings(ON_ONE_SERVER, max_examples=25)
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        answer = case.call(base_url=server.url, timeout=60)
        sent = [case.query, case.body if isinstance(case.body, dict | list) else None]
        check(httpx.Response(answer.status_code, content=answer.content), sent)

    run()


OPTIONS = st.dictionaries(
    st.sampled_from(["ratio", "pause", "loss", "rotate", "forecast", "other"]), VALUES, max_size=3
)
POLICIES = st.sampled_from(["fcfs", "fixed-ratio", "slo-priority", "stock", "off"]) | ODD_TEXT


@ON_ONE_SERVER
@given(body=st.fixed_dictionaries({"name": POLICIES, "options": OPTIONS}) | VALUES)
@example(body={"name": "\ud800", "options": {}})
@example(body={"name": "stock", "options": {"\ud800": 1}})
def test_policies(server: ServerProcess, body: Any) -> None:
    answer = post(server, "/ellm/policy", body)
    check(answer, body)
    if answer.status_code == 200:
        assert server.state(integrity=False)["policy"]["name"] == body["name"]


@ON_ONE_SERVER
@given(field=st.sampled_from(["ellm_ratio", "ellm_device_kv_tokens"]), value=VALUES | ODD_NUMBERS)
def test_sizes(server: ServerProcess, field: str, value: Any) -> None:
    body = {"server_args": {field: value}}
    check(post(server, "/set_internal_state", body), body)


@ON_ONE_SERVER
@given(tags=VALUES | st.lists(st.sampled_from(["kv_cache", "weights", "cuda_graph"])))
def test_memory_of_other_things(server: ServerProcess, tags: Any) -> None:
    body = {"tags": tags}
    if tags != ["kv_cache"]:
        check(post(server, "/release_memory_occupation", body), body)


SLO = st.sampled_from([40, 0.5, 10**9]) | VALUES
CUSTOM = st.fixed_dictionaries({}, optional={"tpot_slo_ms": SLO, "ttft_slo_ms": SLO, "x": VALUES})
READ = {
    "tpot_slo_ms": SLO,
    "ttft_slo_ms": SLO,
    "priority": st.integers(-3, 3) | VALUES,
    "rid": VALUES,
    "extra_key": st.text(max_size=5) | VALUES,
    "stream": st.booleans(),
}
NATIVE = READ | {
    "input_ids": st.lists(st.integers(-3, 300), max_size=4) | VALUES,
    "input_embeds": VALUES,
    "positional_embed_overrides": VALUES,
}
SAMPLING = st.fixed_dictionaries(
    {"max_new_tokens": st.just(3)},
    optional={
        "custom_params": CUSTOM | VALUES,
        "beam_width": VALUES,
        "n": st.integers(-1, 2) | VALUES.filter(lambda n: not isinstance(n, int)),
    },
)


@ON_ONE_SERVER
@given(fields=st.fixed_dictionaries({}, optional=NATIVE), sampling=SAMPLING | VALUES)
@example(fields={"extra_key": [], "input_ids": [65] * 40}, sampling={})
@example(fields={"rid": []}, sampling={})
@example(fields={"stream": True, "rid": []}, sampling={})
@example(fields={}, sampling=[])
@example(fields={}, sampling=[{}])
@example(fields={}, sampling={"temprature": 1})
@example(fields={"priority": 2**63}, sampling={})
def test_fields_of_native_requests(
    server: ServerProcess, fields: dict[str, Any], sampling: Any
) -> None:
    if isinstance(sampling, dict):
        sampling = sampling | {"max_new_tokens": 3}
    prompt = {} if "input_ids" in fields else {"text": "a"}
    body = prompt | fields | {"sampling_params": sampling}
    check(post(server, "/generate", body), body)


@ON_ONE_SERVER
@given(
    fields=st.fixed_dictionaries({}, optional=READ),
    texts=st.lists(st.just("a"), max_size=2),
    sampling=st.lists(SAMPLING, max_size=3) | SAMPLING,
)
@example(fields={}, texts=[], sampling={})
@example(fields={}, texts=["a", "a"], sampling=[{}])
@example(fields={}, texts=["a"], sampling={"n": 0})
@example(fields={"extra_key": ["a", []]}, texts=["a", "a"], sampling={})
def test_fields_of_lists_of_prompts(
    server: ServerProcess, fields: dict[str, Any], texts: list[str], sampling: Any
) -> None:
    body = fields | {"text": texts, "sampling_params": sampling}
    check(post(server, "/generate", body), body)


def is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(v, str) for v in value)


KEYS = st.text(max_size=5) | VALUES.filter(lambda value: not is_list_of_text(value))
"""To those SGLang itself answers 500, with eLLM or without (`_compute_extra_key`, a TypeError)."""
OPENAI = READ | {"custom_params": CUSTOM | VALUES, "extra_key": KEYS, "cache_salt": KEYS}
PROMPTS = ["a", ["a", "a"], [65, 66], [[65], [66, 67]]]


@ON_ONE_SERVER
@given(fields=st.fixed_dictionaries({}, optional=OPENAI))
@example(fields={"rid": []})
@example(fields={"extra_key": []})
@example(fields={"n": 0})
def test_fields_of_chats(server: ServerProcess, fields: dict[str, Any]) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    body = chat | fields
    check(post(server, "/v1/chat/completions", body), body)


@settings(ON_ONE_SERVER, max_examples=50)
@given(prompt=st.sampled_from(PROMPTS), fields=st.fixed_dictionaries({}, optional=OPENAI))
@example(prompt="a", fields={"rid": []})
@example(prompt=["a", "a"], fields={"rid": ["b"]})
@example(prompt="a", fields={"extra_key": []})
@example(prompt=["a", "a"], fields={"n": 0})
def test_fields_of_completions(server: ServerProcess, prompt: Any, fields: dict[str, Any]) -> None:
    body = {"model": "m", "prompt": prompt, "max_tokens": 3} | fields
    check(post(server, "/v1/completions", body), body)


def post(server: ServerProcess, path: str, body: Any) -> httpx.Response:
    """Of JSON as Python writes it: NaN and Infinity too."""
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{server.url}{path}", content=json.dumps(body), headers=headers, timeout=60)
