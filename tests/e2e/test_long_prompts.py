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
from tests.e2e.conftest import STRICT
from tests.e2e.load import greedy, prompts

pytestmark = pytest.mark.slow

PROMPT_TOKENS = 7_000
LONG = prompts(1, PROMPT_TOKENS, PROMPT_TOKENS)[0]
SILENT_TOKENS = 3_000
"""That take the demo model longer than streams are silent for."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fcfs", "--ellm-device-kv-tokens", "16000",
                 "--chunked-prefill-size", "32", "--max-running-requests", "1",
                 "--disable-radix-cache"]  # fmt: skip
    with ServerProcess(arguments, STRICT) as running:
        yield running
        assert running.alive(), running.last_words()
        assert running.state()["integrity"] == "ok"


def seen(server: ServerProcess) -> list[dict[str, Any]]:
    found = httpx.get(f"{server.url}/ellm/requests", timeout=60, trust_env=False).json()
    return list(found["requests"])


def until(holds: Any, seconds: float = 30.0) -> Any:
    """What it says, once it is something."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_long_prompt_tells_how_far_it_is_and_ends_when_its_client_goes(
    server: ServerProcess,
) -> None:
    body = greedy(LONG, 8) | {"stream": True}
    told = []
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60, trust_env=False):
        for _ in range(2):
            (prompt,) = until(lambda: [r["prompt"] for r in seen(server) if r["prompt"]])
            told.append(prompt)
            time.sleep(0.6)
    first, second = told
    assert 0 < first["done"] < second["done"] < PROMPT_TOKENS
    assert second["tokens_per_s"] > 0 and second["left_ms"] > 0
    gone = time.monotonic()
    until(lambda: not seen(server), 5)
    left_s = second["left_ms"] / 1e3
    print(f"\n{second}, gone after {time.monotonic() - gone:.2f} s of {left_s:.2f} that were left")


def test_a_client_of_openai_that_goes_before_its_first_token_ends_its_prompt(
    server: ServerProcess,
) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=1.0, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model="demo", prompt=LONG, max_tokens=8, stream=True)
    until(lambda: not seen(server), 5)


def test_who_waits_long_hears_that_the_server_is_there(server: ServerProcess) -> None:
    """The first request takes the only place for longer than streams are silent for."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)

    def post(path: str, body: dict[str, Any]) -> str:
        answer = httpx.post(server.url + path, json=body, timeout=120, trust_env=False)
        return answer.raise_for_status().text

    def stream() -> str:
        chunks = client.completions.create(model="demo", prompt="Once", max_tokens=4, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(post, "/generate", greedy(LONG[:16], SILENT_TOKENS))
        until(lambda: [r for r in seen(server) if r["state"] == "decoding"])
        text = pool.submit(stream)
        body = {"model": "demo", "prompt": "Once", "max_tokens": 4, "stream": True}
        lines = post("/v1/completions", body).split("\n\n")
        first.result()
    assert lines[0] == ": still here" and "data: [DONE]" in lines, lines
    assert text.result()
