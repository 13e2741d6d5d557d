"""Installed but not enabled: SGLang is stock, also started as SGLang's users start it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from ellm_sgl.client.process import (
    DEMO_ARGUMENTS,
    START_TIMEOUT_S,
    ServerProcess,
    hold_port,
    port_of,
)
from tests.e2e.load import ask, greedy, prompts, token_ids

pytestmark = pytest.mark.slow

LOCATIONS = "sglang.srt.mem_cache.allocation.get_last_loc"


@pytest.mark.parametrize("backend", ["ellm_cpu", "torch_native"])
def test_off_is_stock(server: ServerProcess, backend: str) -> None:
    """On our attention backend, the platform's default, and on SGLang's own."""
    bodies = [greedy(p, 24) for p in prompts(6, 1, 300)]
    expected = token_ids(ask(server.url, bodies))
    asked_for = ["--attention-backend", backend] if backend == "torch_native" else []
    with ServerProcess([*DEMO_ARGUMENTS, "--max-total-tokens", "8000", *asked_for]) as stock:
        assert stock.attention_backend() == backend
        assert token_ids(ask(stock.url, bodies)) == expected
        assert httpx.get(f"{stock.url}/ellm/state").status_code == 404
        assert "eLLM pool" not in stock.log.read_text()


def test_plain_launch_server(tmp_path: Path) -> None:
    """`python -m sglang.launch_server` finds platform and flags wherever SGLang can be imported.

    This machine's torchvision cannot be; `sitecustomize` stands for one whose can.
    """
    (tmp_path / "sitecustomize.py").write_text(
        "from ellm_sgl.sglang.platform.torchvision_ops import declare; declare()"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "sglang.launch_server", *DEMO_ARGUMENTS]
    held = hold_port()
    port = port_of(held)
    url = f"http://127.0.0.1:{port}"
    command += ["--port", str(port), "--ellm-policy", "fixed-ratio", "--ellm-ratio", "0.5"]
    with (
        held,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process,
    ):
        try:
            wait_until_up(url, process)
            answer = ask(url, [greedy(prompts(1, 100, 100)[0], 16)])
            state = httpx.get(f"{url}/ellm/state").json()
        finally:
            process.terminate()
    assert len(answer[0]["output_ids"]) == 16
    assert state["enabled"] and state["recomputed_tokens_total"] > 0


def test_a_version_that_is_not_known_serves_as_stock(server: ServerProcess, tmp_path: Path) -> None:
    """Metadata on the path say that SGLang is another version, in which a function that the CPU
    platform's attention backend needs takes other parameters than were recorded."""
    information = tmp_path / "sglang-0.9.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.9.1\n")
    (tmp_path / "sitecustomize.py").write_text(
        "from ellm_sgl.sglang.versions import VERSIONS, adapter_of\n"
        f"for version in VERSIONS: adapter_of(version).signatures['{LOCATIONS}'] = '(others)'\n"
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    bodies = [greedy(p, 24) for p in prompts(6, 1, 300)]
    arguments = [*DEMO_ARGUMENTS, "--max-total-tokens", "8000", "--ellm-policy", "fcfs",
                 "--ellm-device-kv-tokens", "1024"]  # fmt: skip
    with ServerProcess(arguments, {"PYTHONPATH": path}) as stock:
        assert token_ids(ask(stock.url, bodies)) == token_ids(ask(server.url, bodies))
        assert stock.attention_backend() == "torch_native"
        assert httpx.get(f"{stock.url}/ellm/state").status_code == 404
        log = stock.log.read_text()
    (line,) = [line for line in log.splitlines() if "ellm-sgl" in line and "arning" in line]
    assert "not been tested with sglang 0.9.1" in line and f"left out: {LOCATIONS} is (req" in line
    assert line.endswith("eLLM is off: SGLang serves as stock.")
    assert "Traceback" not in log and "Failed to" not in log


def wait_until_up(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server exited"
        try:
            if httpx.get(f"{url}/health", timeout=20).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)
    raise AssertionError("no answer")
