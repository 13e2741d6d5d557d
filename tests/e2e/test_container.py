"""A container's limit that is lowered while a server serves, and raised again: prompts go on in
whole chunks, in memory that no request had."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from tests.e2e.container import NO_LIMIT, Container
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.servers import STRICT

pytestmark = pytest.mark.slow

TOKENS, CHUNK = 100_000, 2048
"""Of the demo model's KV: 400 MiB."""
LACKS = 50 << 20
"""Bytes that the server has too much, once the limit is lowered."""
BODIES = [greedy(p, 20) for p in prompts(4, 3000, 3500, seed=31)]


@pytest.mark.parametrize(
    ("more", "ranks"),
    [("", 1), ("--ellm-idle-release-s 600", 1), ("--tp 2", 2)],
    ids=["fixed", "sizes itself", "two ranks"],
)
def test_the_pool_yields_what_a_lower_limit_takes(tmp_path: Path, more: str, ranks: int) -> None:
    container = Container(tmp_path, ranks)
    arguments = ["--ellm-policy", "fcfs", "--ellm-device-kv-tokens", str(TOKENS)]
    arguments += ["--chunked-prefill-size", str(CHUNK), *more.split()]
    cores = sorted(os.sched_getaffinity(0))
    environment = {**STRICT, **container.environment}
    if ranks > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    with ServerProcess([*DEMO_ARGUMENTS, *arguments], environment) as server:

        def serves(condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            deadline = time.monotonic() + 120
            while True:
                server.flush_cache()  # else nothing would be computed
                assert token_ids(ask(server.url, BODIES)) == expected
                state = server.state()
                assert state["integrity"] == "ok" and state["retractions_total"] == 0
                if condition(state):
                    return state
                assert time.monotonic() < deadline, state

        expected = token_ids(ask(server.url, BODIES))
        full, whole = server.state(), _whole_chunk(server)
        assert full["resize"]["outcome"] == "applied" and whole > 10 << 20
        container.limit(NO_LIMIT - ranks * (full["bytes"]["left"] + LACKS))
        steps = [full["steps_total"]]

        def in_large_chunks(state: dict[str, Any]) -> bool:
            """Three times in a row: 13,000 tokens in blocks of 16 would be 800 steps."""
            steps.append(state["steps_total"])
            return len(steps) > 3 and steps[-1] - steps[-4] < 3 * 100

        less = serves(in_large_chunks)
        assert less["bytes"]["left"] > 0.4 * whole
        assert less["resize"]["outcome"] in ("ceiling", "under way")
        gone = full["device_bytes_committed"] - less["device_bytes_committed"]
        assert LACKS + 0.5 * whole < gone < LACKS + 4 * whole + (32 << 20)
        container.limit(NO_LIMIT)
        if "idle-release" in more:  # what is not needed is not asked for by itself
            server.adjust(ellm_device_kv_tokens=TOKENS)
        again = serves(lambda state: state["resize"]["outcome"] == "applied")
        assert again["device_bytes_committed"] == full["device_bytes_committed"]


def _whole_chunk(server: ServerProcess) -> float:
    """Bytes of its activations."""
    took = server.state(integrity=False)["activations"]
    return float(took["row_bytes"] * CHUNK + took["logit_row_bytes"] + took["step_bytes"])
