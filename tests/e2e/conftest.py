"""One eLLM server on the demo model for all tests that can share it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from tests.servers import ASKED_ABOUT_HEALTH, STRICT

AMPLE_TOKENS = 32_000
SERVER_ARGUMENTS = (
    *DEMO_ARGUMENTS,
    "--ellm-policy", "fixed-ratio",
    "--ellm-device-kv-tokens", str(AMPLE_TOKENS),
    "--chunked-prefill-size", "1024",
    "--random-seed", "1",
    "--constrained-json-disable-any-whitespace",
)  # fmt: skip


@pytest.fixture(scope="session")
def shared_server() -> Iterator[ServerProcess]:
    with ServerProcess(SERVER_ARGUMENTS, STRICT | ASKED_ABOUT_HEALTH) as server:
        yield server


@pytest.fixture
def server(shared_server: ServerProcess) -> Iterator[ServerProcess]:
    """The shared server with ample memory, r = 0 and an empty cache; checked afterwards."""
    shared_server.adjust(ellm_ratio=0.0, ellm_device_kv_tokens=AMPLE_TOKENS)
    shared_server.flush_cache()
    yield shared_server
    assert shared_server.alive(), shared_server.last_words()
    assert shared_server.state()["integrity"] == "ok"
