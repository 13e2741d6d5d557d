"""`ellm-sgl memory --resize` on a running server."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.serve.cli import main
from tests.e2e.conftest import AMPLE_TOKENS

pytestmark = pytest.mark.slow


def test_a_pool_comes_to_a_size_while_the_server_runs(server: ServerProcess) -> None:
    def resize(tokens: int) -> tuple[int, dict[str, object], str]:
        arguments = ["memory", "--resize", str(tokens), "--url", server.url, "--json"]
        answer = CliRunner().invoke(main, arguments)
        found = json.loads(answer.stdout) if answer.stdout else {}
        return answer.exit_code, found, answer.stderr

    full = server.state()["device_bytes_committed"]
    code, found, _ = resize(8000)
    assert code == 0 and found["outcome"] == "applied" and found["tokens"] == 8000
    assert found["committed_bytes"] == server.state()["device_bytes_committed"] < 0.3 * full
    code, found, said = resize(10 * AMPLE_TOKENS)
    assert code == 1 and not found and f"{AMPLE_TOKENS} at most" in said
    assert resize(AMPLE_TOKENS)[0] == 0
    assert server.state()["device_bytes_committed"] == full
