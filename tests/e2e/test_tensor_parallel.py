"""Two ranks: one decision, page tables alike, outputs as with ample memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from tests.e2e.conftest import AMPLE_TOKENS, STRICT
from tests.e2e.load import ask, greedy, prompts, token_ids

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[ServerProcess]:
    arguments = [*DEMO_ARGUMENTS, "--tp", "2", "--ellm-policy", "fixed-ratio",
                 "--ellm-device-kv-tokens", str(AMPLE_TOKENS), "--random-seed", "1",
                 "--disable-radix-cache"]  # fmt: skip
    cores = sorted(os.sched_getaffinity(0))
    # SGLang wants a core named for each rank.
    binding = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    with ServerProcess(arguments, {**STRICT, **binding}) as server:
        yield server


def test_ranks_evict_and_restore_alike(two_ranks: ServerProcess) -> None:
    bodies = [greedy(p, 16) for p in prompts(6, 60, 200, seed=5)]
    expected = token_ids(ask(two_ranks.url, bodies))
    two_ranks.adjust(ellm_ratio=0.5, ellm_device_kv_tokens=640)
    assert token_ids(ask(two_ranks.url, bodies)) == expected
    two_ranks.switch_policy("slo-priority")
    assert token_ids(ask(two_ranks.url, bodies)) == expected
    state = two_ranks.state()
    assert state["integrity"] == "ok"
    assert state["evicted_units_total"] > 0 and state["recomputed_tokens_total"] > 0
    assert state["device_units_free"] == state["device_units_total"]
