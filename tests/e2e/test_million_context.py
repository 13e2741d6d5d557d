"""A context of a million tokens: the server starts, and a long prompt is served."""

from __future__ import annotations

import json

import httpx
import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from tests.e2e.load import greedy, prompts
from tests.servers import STRICT

pytestmark = pytest.mark.slow

CONTEXT = 1 << 20
PROMPT_TOKENS = 32_000
"""That takes half a minute to prefill; the time grows with the square."""


def test_a_server_of_a_million_tokens_starts_and_serves_a_long_prompt() -> None:
    config = json.dumps({"max_position_embeddings": CONTEXT})
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fcfs", "--ellm-device-kv-tokens", "33000",
                 "--context-length", str(CONTEXT), "--json-model-override-args", config,
                 "--chunked-prefill-size", "2048"]  # fmt: skip
    with ServerProcess(arguments, STRICT) as server:
        assert "eLLM: 256 requests run at most, not 2048" in server.log.read_text()
        (prompt,) = prompts(1, PROMPT_TOKENS, PROMPT_TOKENS)
        url = f"{server.url}/generate"
        answer = httpx.post(url, json=greedy(prompt, 8), timeout=200, trust_env=False)
        said = answer.raise_for_status().json()
        assert said["meta_info"]["prompt_tokens"] == PROMPT_TOKENS
        assert len(said["output_ids"]) == 8
        assert server.state()["integrity"] == "ok"
