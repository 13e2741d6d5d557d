"""What happens when KV memory runs out: everything completes, and nothing changes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from ellm_sgl.client.resident import Resident
from tests.e2e.conftest import AMPLE_TOKENS
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.servers import STRICT

pytestmark = pytest.mark.slow


def test_oversubscribed_load_completes_unchanged(server: ServerProcess) -> None:
    """24 requests of 128 + 256 tokens (9,216) in a pool of 4,000."""
    bodies = [greedy(p, 256) for p in prompts(24, 128, 128)]
    expected = token_ids(ask(server.url, bodies))
    server.flush_cache()
    server.adjust(ellm_device_kv_tokens=4000)
    before = server.state()
    got = token_ids(ask(server.url, bodies))
    after = server.state()
    assert got == expected
    assert after["retractions_total"] == before["retractions_total"]
    assert after["evicted_units_total"] > before["evicted_units_total"]


def test_request_of_four_times_the_pool_completes_unchanged(server: ServerProcess) -> None:
    [prompt] = prompts(1, 2000, 2000)
    expected = ask(server.url, [greedy(prompt, 48)])
    server.flush_cache()
    server.adjust(ellm_device_kv_tokens=512)
    before = server.state()
    got = ask(server.url, [greedy(prompt, 48)])
    assert token_ids(got) == token_ids(expected)
    assert server.state()["retractions_total"] == before["retractions_total"]


def test_pool_that_shrinks_and_grows_while_serving(server: ServerProcess) -> None:
    """Blocks leave when the pool shrinks under running requests, and return when it grows."""
    bodies = [greedy(p, 1000) for p in prompts(4, 200, 300, seed=1)]
    expected = token_ids(ask(server.url, bodies))
    server.flush_cache()
    before = server.state()
    with ThreadPoolExecutor(1) as background:
        answers = background.submit(ask, server.url, bodies)
        wait_for(server, lambda state: state["pool"]["mapped_tokens"] > 1300)
        server.adjust(ellm_device_kv_tokens=640)
        wait_for(server, lambda state: state["uncached_tokens"] > 0)
        server.adjust(ellm_device_kv_tokens=AMPLE_TOKENS)
        wait_for(server, lambda state: state["uncached_tokens"] == 0)
        assert token_ids(answers.result()) == expected
    after = server.state()
    assert after["evicted_units_total"] > before["evicted_units_total"]
    assert after["restored_units_total"] > before["restored_units_total"]
    assert after["retractions_total"] == before["retractions_total"]


def test_memory_goes_back_to_the_machine_and_comes_again(server: ServerProcess) -> None:
    """While requests run: what the pool has of memory is what the state says, and no more."""
    bodies = [greedy(p, 1500) for p in prompts(4, 200, 300, seed=2)]
    expected = token_ids(ask(server.url, bodies))
    full = server.state()
    assert full["device_bytes_committed"] == full["device_bytes_reserved"]
    with ThreadPoolExecutor(1) as background:
        answers = background.submit(ask, server.url, bodies)
        wait_for(server, lambda state: state["running"] == 4)
        for tokens in (2000, 800, AMPLE_TOKENS):
            server.adjust(ellm_device_kv_tokens=tokens)
            state = server.state()
            resize = state["resize"]
            assert (resize["wanted_tokens"], resize["outcome"]) == (tokens, "applied")
            share = state["device_bytes_committed"] / full["device_bytes_committed"]
            assert share == pytest.approx(tokens / AMPLE_TOKENS, abs=0.05)
            assert state["integrity"] == "ok"
        assert not answers.done()
        assert token_ids(answers.result()) == expected
    assert server.state()["retractions_total"] == full["retractions_total"]


def test_a_pool_grows_beyond_what_it_started_with(server: ServerProcess) -> None:
    """While requests that it has no room for run: they get back what they lack."""
    bodies = [greedy(p, 400) for p in prompts(4, 200, 300, seed=11)]
    expected = token_ids(ask(server.url, bodies))
    arguments = ["--ellm-policy", "fixed-ratio", "--ellm-device-kv-tokens", "640"]
    arguments += ["--ellm-max-device-kv-tokens", "40000"]
    with (
        ServerProcess([*DEMO_ARGUMENTS, *arguments], STRICT) as other,
        ThreadPoolExecutor(1) as background,
    ):
        start = other.state()
        assert start["device_bytes_committed"] < 0.05 * start["device_bytes_reserved"]
        assert (start["resize"]["start_tokens"], start["resize"]["most_tokens"]) == (640, 40_000)
        answers = background.submit(ask, other.url, bodies)
        wait_for(other, lambda state: state["uncached_tokens"] > 0)
        other.adjust(ellm_device_kv_tokens=4000)
        wait_for(other, lambda state: state["uncached_tokens"] == 0)
        assert token_ids(answers.result()) == expected
        before = other.state()["device_bytes_committed"]
        # Some beside what steps keep, and less than the pool asks for.
        with no_more_memory_than(160 << 20, other):
            other.adjust(ellm_device_kv_tokens=40_000)
            state = other.state()
            assert state["device_bytes_committed"] > before
            assert state["resize"]["outcome"] == "ceiling" and state["integrity"] == "ok"
            assert state["device_bytes_committed"] < 0.6 * state["device_bytes_reserved"]
            assert other.log.read_text().count("no memory to grow further") == 1
            assert token_ids(ask(other.url, bodies)) == expected
        other.adjust(ellm_device_kv_tokens=40_000)
        state = other.state()
        assert state["device_bytes_committed"] == state["device_bytes_reserved"]
        assert state["retractions_total"] == 0 and state["integrity"] == "ok"
        with pytest.raises(ValueError, match="refused"):
            other.adjust(ellm_device_kv_tokens=40_016)


@contextmanager
def no_more_memory_than(nbytes: int, server: ServerProcess) -> Iterator[None]:
    """In this context its scheduler can have so much more of its own."""
    process = psutil.Process(Resident(server.pid).pid)
    found = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found is not None
    before = process.rlimit(psutil.RLIMIT_DATA)
    process.rlimit(psutil.RLIMIT_DATA, ((int(found[1]) << 10) + nbytes, before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_DATA, before)


def wait_for(server: ServerProcess, condition: Callable[[dict[str, Any]], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition(state := server.state(integrity=False)):
        assert time.monotonic() < deadline, state
        time.sleep(0.02)


@pytest.mark.parametrize("tokens", [600, 1500])
def test_shared_prefixes_under_pressure(server: ServerProcess, tokens: int) -> None:
    """Eight continuations of one long prefix, twice: cached, evicted, matched in part."""
    [prefix] = prompts(1, 333, 333, seed=3)
    bodies = [greedy(prefix + tail, 48) for tail in prompts(8, 5, 90, seed=4)]
    expected = token_ids(ask(server.url, bodies))
    server.flush_cache()
    server.adjust(ellm_device_kv_tokens=tokens)
    assert token_ids(ask(server.url, bodies)) == expected
    assert token_ids(ask(server.url, bodies)) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        "--enable-mixed-chunk --chunked-prefill-size 128 --schedule-policy lpm",
        "--disable-radix-cache --ellm-layer-group 3 --ellm-block-tokens 1 "
        "--schedule-policy routing-key",
        "--disable-overlap-schedule --ellm-layer-group 1 --ellm-block-tokens 32 "
        "--schedule-policy dfs-weight",
    ],
)
def test_server_options(server: ServerProcess, arguments: str) -> None:
    bodies = [greedy(p, 32) for p in prompts(12, 1, 500, seed=5)]
    expected = token_ids(ask(server.url, bodies))
    own = (*DEMO_ARGUMENTS, "--ellm-policy", "fixed-ratio", "--ellm-device-kv-tokens", "1024")
    with ServerProcess([*own, *arguments.split()], STRICT) as other:
        assert token_ids(ask(other.url, bodies)) == expected
        other.adjust(ellm_ratio=0.5)
        assert token_ids(ask(other.url, bodies)) == expected
        state = other.state()
    assert state["recomputed_tokens_total"] > 0
    assert state["integrity"] == "ok"


def test_fewer_blocks_than_requests_in_mixed_steps(server: ServerProcess) -> None:
    """A step that mixes a prompt's chunk with decoding does not ask whether memory suffices."""
    bodies = [greedy(p, 220) for p in prompts(10, 20, 40, seed=7)]
    bodies += [greedy(p, 10) for p in prompts(2, 900, 1000, seed=8)]
    expected = token_ids(ask(server.url, bodies))
    arguments = ["--ellm-policy", "fixed-ratio", "--ellm-device-kv-tokens", "4096"]
    arguments += ["--enable-mixed-chunk", "--chunked-prefill-size", "32"]
    with (
        ServerProcess([*DEMO_ARGUMENTS, *arguments], STRICT) as other,
        ThreadPoolExecutor(1) as background,
    ):
        answers = background.submit(ask, other.url, bodies)
        wait_for(other, lambda state: state["running"] >= 8)
        other.adjust(ellm_device_kv_tokens=96)
        assert token_ids(answers.result()) == expected
        assert other.state()["integrity"] == "ok"


@pytest.mark.parametrize("mixed", ["", "--enable-mixed-chunk"])
def test_prompts_in_chunks_beside_requests_that_fill_memory(
    server: ServerProcess, mixed: str
) -> None:
    """Each chunk takes what is free, and waits where nothing is."""
    bodies = [greedy(p, 120) for p in prompts(8, 60, 120, seed=9)]
    bodies += [greedy(p, 20) for p in prompts(3, 500, 700, seed=10)]
    expected = token_ids(ask(server.url, bodies))
    arguments = ["--ellm-policy", "fixed-ratio", "--ellm-device-kv-tokens", "1200"]
    arguments += ["--chunked-prefill-size", "64"]
    arguments += ["--schedule-conservativeness", "0.1", *mixed.split()]
    with ServerProcess([*DEMO_ARGUMENTS, *arguments], STRICT) as other:
        assert token_ids(ask(other.url, bodies)) == expected
        assert other.state()["integrity"] == "ok"


def test_a_pool_of_one_block(server: ServerProcess) -> None:
    """Everything but the last few tokens is recomputed at every step."""
    bodies = [greedy(p, 20) for p in prompts(2, 40, 70, seed=6)]
    expected = token_ids(ask(server.url, bodies))
    server.flush_cache()
    server.adjust(ellm_device_kv_tokens=16)
    assert [token_ids(ask(server.url, [body]))[0] for body in bodies] == expected
