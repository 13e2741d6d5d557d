"""Baselines under pressure: whole requests leave and come back, and no output changes."""

from __future__ import annotations

import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from ellm_sgl.serve.verify.stages import EAGER
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.servers import STRICT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("mode", "host", "more"),
    [("recompute", 0, ()), ("swap", 48, ()), ("hcache", 8192, ("--ellm-host-keeps", "4"))],
    ids=["recompute", "swap, host full", "hcache"],
)
def test_preempted_requests_end_as_they_should(
    server: ServerProcess, mode: str, host: int, more: tuple[str, ...]
) -> None:
    """16 requests of up to 328 tokens on a device that holds five of them. The host that is full
    takes less than the shortest of them."""
    bodies = [greedy(p, 128) for p in prompts(16, 60, 200, seed=2)]
    expected = token_ids(ask(server.url, bodies))
    arguments = [*DEMO_ARGUMENTS, "--ellm-mode", mode, "--ellm-layer-group", "2", *EAGER,
                 "--ellm-device-kv-tokens", "1536", "--ellm-host-kv-tokens", str(host),
                 *more]  # fmt: skip
    with ServerProcess(arguments, STRICT) as small:
        assert token_ids(ask(small.url, bodies)) == expected
        state = small.state()
        small.flush_cache()
        idle = small.state()
        with pytest.raises(ValueError, match=f"mode {mode}"):
            small.switch_policy("fcfs")
    assert state["integrity"] == "ok" and state["mode"] == mode
    if mode == "recompute":
        assert state["retractions_total"] > 0
        assert state["evicted_units_total"] == state["recomputed_tokens_total"] == 0
    else:
        assert state["retractions_total"] == 0 and state["pauses_total"] > 0
        assert state["fetched_units_total"] > 0
        assert (state["projected_units_total"] > 0) == (mode == "hcache")
        if host < 1536:  # what the host cannot take is computed again
            assert state["recomputed_tokens_total"] > 0
    assert idle["device_units_free"] == idle["device_units_total"]
    assert idle["host_units_free"] == idle["host_units_total"]
