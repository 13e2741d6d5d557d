"""Prompts that take long: how far they are, a sign of life for who waits, and an end at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from tests.e2e.load import greedy, prompts
from tests.servers import STRICT

pytestmark = pytest.mark.slow

PROMPT_TOKENS, CHUNK = 28_000, 16
LONG = prompts(1, PROMPT_TOKENS, PROMPT_TOKENS)[0]
STEPS = PROMPT_TOKENS // CHUNK
"""Of a prompt that is computed to its end."""
SILENT_TOKENS = 24_000
"""That take the demo model longer than streams are silent for."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fcfs", "--ellm-device-kv-tokens", "32000",
                 "--context-length", "32000", "--chunked-prefill-size", str(CHUNK),
                 "--json-model-override-args", '{"max_position_embeddings": 32000}',
                 "--max-running-requests", "1", "--disable-radix-cache"]  # fmt: skip
    with ServerProcess(arguments, STRICT) as running:
        yield running
        assert running.alive(), running.last_words()
        assert running.state()["integrity"] == "ok"


def seen(server: ServerProcess) -> list[dict[str, Any]]:
    found = httpx.get(f"{server.url}/ellm/requests", timeout=60, trust_env=False).json()
    return list(found["requests"])


def steps(server: ServerProcess) -> int:
    return int(server.state(integrity=False)["steps_total"])


def until(holds: Any) -> Any:
    """What it says, once it is something."""
    deadline = time.monotonic() + 60
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_long_prompt_tells_how_far_it_is_and_ends_when_its_client_goes(
    server: ServerProcess,
) -> None:
    body, before = greedy(LONG, 8) | {"stream": True}, steps(server)

    def beyond(done: int) -> list[dict[str, Any]]:
        return [r["prompt"] for r in seen(server) if r["prompt"] and r["prompt"]["done"] > done]

    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60, trust_env=False):
        (first,) = until(lambda: beyond(0))
        (second,) = until(lambda: beyond(first["done"]))
    assert second["done"] < PROMPT_TOKENS
    assert second["tokens_per_s"] > 0 and second["left_ms"] > 0
    until(lambda: not seen(server))
    assert steps(server) - before < STEPS


def test_a_client_of_openai_that_goes_before_its_first_token_ends_its_prompt(
    server: ServerProcess,
) -> None:
    before = steps(server)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=1.0, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model="demo", prompt=LONG, max_tokens=8, stream=True)
    until(lambda: not seen(server))
    assert steps(server) - before < STEPS


def test_who_waits_long_hears_that_the_server_is_there(server: ServerProcess) -> None:
    """The first request takes the only place until they have."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)

    def post(path: str, body: dict[str, Any]) -> str:
        answer = httpx.post(server.url + path, json=body, timeout=120, trust_env=False)
        return answer.raise_for_status().text

    def stream() -> str:
        chunks = client.completions.create(model="demo", prompt="Once", max_tokens=4, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor() as pool:
        long = greedy(LONG[:16], SILENT_TOKENS) | {"rid": "first"}
        first = pool.submit(post, "/generate", long)
        until(lambda: [r for r in seen(server) if r["state"] == "decoding"])
        text = pool.submit(stream)
        body = {"model": "demo", "prompt": "Once", "max_tokens": 4, "stream": True}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": still here"
            post("/abort_request", {"rid": "first"})
            assert "data: [DONE]" in list(lines)
        first.result()
    assert text.result()
