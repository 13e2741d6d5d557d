"""Two ranks: one decision, page tables alike, outputs as of one rank with ample memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from tests.e2e.conftest import AMPLE_TOKENS
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.servers import STRICT

pytestmark = pytest.mark.slow

HOST_TOKENS = 96
"""Fewer than are evicted: some units come from the host, others are recomputed."""
STEPS = 15
"""At each size of the pool; all requests together take 150 or more."""


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[ServerProcess]:
    arguments = [*DEMO_ARGUMENTS, "--tp", "2", "--ellm-policy", "fixed-ratio",
                 "--ellm-device-kv-tokens", str(AMPLE_TOKENS),
                 "--ellm-host-kv-tokens", str(HOST_TOKENS),
                 "--random-seed", "1", "--disable-radix-cache"]  # fmt: skip
    cores = sorted(os.sched_getaffinity(0))
    # SGLang wants a core named for each rank.
    binding = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    with ServerProcess(arguments, {**STRICT, **binding}) as server:
        yield server


def test_ranks_evict_and_restore_alike(server: ServerProcess, two_ranks: ServerProcess) -> None:
    bodies = [greedy(p, 16) for p in prompts(6, 60, 200, seed=5)]
    expected = token_ids(ask(server.url, bodies))
    assert token_ids(ask(two_ranks.url, bodies)) == expected
    two_ranks.adjust(ellm_ratio=0.5, ellm_device_kv_tokens=640)
    assert token_ids(ask(two_ranks.url, bodies)) == expected
    two_ranks.switch_policy("slo-priority")
    assert token_ids(ask(two_ranks.url, bodies)) == expected
    state = two_ranks.state()
    assert state["integrity"] == "ok"
    assert state["evicted_units_total"] > 0 and state["recomputed_tokens_total"] > 0
    assert state["saved_units_total"] > 0 and state["fetched_units_total"] > 0
    assert state["device_units_free"] == state["device_units_total"]
    assert state["host_units_free"] == state["host_units_total"] > 0


def test_a_pool_that_grows_under_load_grows_alike(
    server: ServerProcess, two_ranks: ServerProcess
) -> None:
    """Each rank commits at its own pace."""
    two_ranks.adjust(ellm_ratio=0.0, ellm_device_kv_tokens=AMPLE_TOKENS)
    bodies = [greedy(p, 500) for p in prompts(6, 100, 300, seed=6)]
    expected = token_ids(ask(server.url, bodies))
    before = two_ranks.state()
    with ThreadPoolExecutor(1) as background:
        answers = background.submit(ask, two_ranks.url, bodies)
        for tokens in (960, 20_000, 640, AMPLE_TOKENS):
            two_ranks.adjust(ellm_device_kv_tokens=tokens)
            state = two_ranks.state()
            assert state["integrity"] == "ok"
            wait_for_steps(two_ranks, state["steps_total"] + STEPS)
        assert not answers.done(), "they ended before the pool had its sizes"
        assert token_ids(answers.result()) == expected
    after = two_ranks.state()
    sizes = dict.fromkeys(("start_tokens", "wanted_tokens", "most_tokens"), AMPLE_TOKENS)
    assert after["resize"] == {**sizes, "outcome": "applied"}
    assert after["device_units_total"] == before["device_units_total"]
    assert after["retractions_total"] == before["retractions_total"]
    assert after["evicted_units_total"] > before["evicted_units_total"]
    assert after["device_units_free"] == after["device_units_total"]
    assert after["host_units_free"] == after["host_units_total"]


def wait_for_steps(server: ServerProcess, steps: int) -> None:
    deadline = time.monotonic() + 60
    while server.state(integrity=False)["steps_total"] < steps:
        assert time.monotonic() < deadline, "it takes no steps"
        time.sleep(0.02)
