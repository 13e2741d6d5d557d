"""Two servers behind SGLang's router: prompts go where their prefix is, and one server is killed
under load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from ellm_sgl.client.process import SERVER_ENVIRONMENT, ServerProcess, hold_port, port_of
from tests.e2e.conftest import SERVER_ARGUMENTS
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.servers import ASKED_ABOUT_HEALTH, STRICT

pytestmark = pytest.mark.slow
pytest.importorskip("sglang_router", exc_type=ImportError)

PATIENCE_S = 180.0
START = (
    "import ellm_sgl, runpy; runpy.run_module('sglang_router.launch_router', run_name='__main__')"
)
"""The router imports SGLang, so on a CPU host `ellm_sgl` comes first."""


PREFIXES, FOLLOWERS = 5, 3
"""Prompts that begin, and those that share the prefix of each."""
PREFIX = 600
BLOCK = 16


@pytest.fixture(scope="module")
def behind(shared_server: ServerProcess) -> Iterator[tuple[ServerProcess, str]]:
    """A second server, and the URL of a router before it and the shared one."""
    with (
        ServerProcess(SERVER_ARGUMENTS, STRICT | ASKED_ABOUT_HEALTH) as other,
        router(shared_server.url, other.url) as url,
    ):
        yield other, url


@contextmanager
def router(*workers: str) -> Iterator[str]:
    """URL of a router with these workers, all of which it has found to be healthy."""
    held = hold_port(), hold_port()
    port, metrics = map(port_of, held)
    command = [
        sys.executable, "-W", "ignore", "-c", START, "--worker-urls", *workers,
        "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics),
        "--policy", "cache_aware", "--health-check-interval-secs", "1",
        "--health-failure-threshold", "1", "--retry-max-retries", "5", "--log-level", "warn",
    ]  # fmt: skip
    environment = {**SERVER_ENVIRONMENT, **os.environ, "NO_PROXY": "127.0.0.1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: healthy(url) == len(workers), "the router does not find its workers")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for each in held:
            each.close()


def healthy(url: str) -> int:
    """Workers that the router sends requests to."""
    try:
        found: list[dict[str, Any]] = httpx.get(f"{url}/workers", timeout=10).json()["workers"]
    except (httpx.TransportError, ValueError, KeyError):
        return 0
    return sum(worker["is_healthy"] for worker in found)


def wait_until(holds: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def cached_units(server: ServerProcess) -> int:
    """Of an idle server's prefix cache."""
    state = server.state()
    return int(state["device_units_total"] - state["device_units_free"])


def test_prompts_go_to_the_server_that_has_their_prefix(
    server: ServerProcess, behind: tuple[ServerProcess, str]
) -> None:
    other, url = behind
    first = prompts(PREFIXES, PREFIX, PREFIX, seed=42)
    rest = [prompts(PREFIXES, 20, 40, seed=43 + i) for i in range(FOLLOWERS)]
    asked = [*first, *(p + q for each in rest for p, q in zip(first, each, strict=True))]
    bodies = [greedy(p, 40) for p in asked]
    other.flush_cache()
    # New prefixes go where less is under way: to both, if they come together. Those that have them
    # come one after the other: else all would go to the first server.
    answers = ask(url, bodies[:PREFIXES])
    answers += [ask(url, [body])[0] for body in bodies[PREFIXES:]]
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert cached[:PREFIXES] == [0] * PREFIXES
    assert min(cached[PREFIXES:]) >= PREFIX - BLOCK, cached
    cached_by = [cached_units(each) for each in (server, other)]
    assert min(cached_by) > PREFIX / BLOCK, f"one has all: {cached_by}"
    # As without a router.
    server.flush_cache()
    assert token_ids(answers) == token_ids(ask(server.url, bodies))


def test_a_server_that_dies_behind_a_router_costs_no_answer(
    server: ServerProcess, behind: tuple[ServerProcess, str]
) -> None:
    """Requests of its are sent to the other one, and all answers are those of one server alone."""
    assert f"look at  {server.url}/ellm/ (a page)" in server.log.read_text()
    other, url = behind
    bodies = [greedy(prompt, 500) for prompt in prompts(24, 40, 120, seed=41)]
    expected = token_ids(ask(server.url, bodies))
    answers: list[list[int]] = []
    thread = threading.Thread(target=lambda: answers.extend(token_ids(ask(url, bodies))))
    thread.start()

    def both_run() -> bool:
        return all(s.state(integrity=False)["running"] > 0 for s in (server, other))

    wait_until(both_run, "the router does not use both")
    os.killpg(other.pid, signal.SIGKILL)
    thread.join(PATIENCE_S)
    assert answers == expected
    wait_until(lambda: healthy(url) == 1, "the router does not notice")
    assert token_ids(ask(url, bodies[:4])) == expected[:4]
