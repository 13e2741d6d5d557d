"""A server that has nothing to do gives its memory back, and has it again when it is needed."""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from ellm_sgl.client.resident import Resident
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.servers import ASKED_ABOUT_HEALTH, STRICT

pytestmark = pytest.mark.slow

TOKENS = 100_000
"""Of the demo model: 400 MiB."""
IDLE_S = 5
PATIENCE_S = 60.0
"""For what takes a second on a machine that does nothing else."""
SLACK_MIB = 16
"""What a process's memory may come and go by for other reasons."""
BODIES = [greedy(p, 40) for p in prompts(40, 900, 1000, seed=21)]


def resident_mib(server: ServerProcess) -> float:
    """Of the scheduler's process."""
    return Resident(server.pid).bytes() / 2**20


def last_seen_at_work(server: ServerProcess, answers: Future[Any]) -> float:
    """A time after which the server still had something to do."""
    worked = -math.inf
    while not answers.done():
        asked = time.monotonic()
        if server.state(integrity=False)["running"]:
            worked = asked
        time.sleep(0.05)
    assert math.isfinite(worked)
    return worked


@pytest.mark.parametrize("keep", ["on", "off"])
def test_memory_goes_back_after_a_while_and_comes_again(keep: str) -> None:
    more = ["--ellm-policy", "fcfs", "--ellm-device-kv-tokens", str(TOKENS)]
    more += ["--ellm-idle-release-s", str(IDLE_S), "--ellm-idle-keep-prefixes", keep]
    with ServerProcess([*DEMO_ARGUMENTS, *more], STRICT | ASKED_ABOUT_HEALTH) as server:
        warm = resident_mib(server)
        with ThreadPoolExecutor(1) as background:
            answers = background.submit(ask, server.url, BODIES)
            worked = last_seen_at_work(server, answers)
            expected = token_ids(answers.result())
        loaded = resident_mib(server)
        full = server.state()
        used = full["device_units_total"] - full["device_units_free"]
        unit = full["device_bytes_committed"] / full["device_units_total"]
        in_use = used * unit / 2**20
        assert in_use > 100 and loaded > warm + in_use - SLACK_MIB
        deadline = time.monotonic() + IDLE_S + PATIENCE_S
        while server.state(integrity=False)["resize"]["wanted_tokens"] == TOKENS:
            assert time.monotonic() < deadline
            assert server.answers(), "to be asked for its health is no work"
            time.sleep(0.2)
        assert time.monotonic() > worked + IDLE_S
        while (state := server.state())["resize"]["outcome"] == "under way":
            assert time.monotonic() < deadline, state
            time.sleep(0.1)
        kept = state["device_bytes_committed"] / 2**20
        most = warm + SLACK_MIB + (kept if keep == "on" else 0)
        while (rested := resident_mib(server)) >= most:
            assert time.monotonic() < deadline, f"{warm} warm, {loaded} loaded, {rested} idle"
            time.sleep(0.2)
        if keep == "on":
            # A question about health has a block while it is answered.
            resting = state["device_units_total"] - state["device_units_free"]
            assert abs(resting - used) < 16 and state["device_units_free"] < 64
        else:
            assert state["resize"]["wanted_tokens"] == 16 and kept < 3
        assert token_ids(ask(server.url, BODIES)) == expected
        again = server.state()
        assert again["integrity"] == "ok" and again["retractions_total"] == 0
        assert TOKENS / 4 < again["resize"]["wanted_tokens"] <= TOKENS


def test_who_comes_to_a_server_at_rest_has_its_prompt_from_the_store(tmp_path: Path) -> None:
    """Which has no room for it at that moment."""
    more = ["--ellm-policy", "fcfs", "--ellm-device-kv-tokens", "20000", "--ellm-idle-release-s"]
    more += ["1", "--ellm-idle-keep-prefixes", "off", "--ellm-kv-store", str(tmp_path)]
    (prompt,) = prompts(1, 6000, 6000, seed=22)
    with ServerProcess([*DEMO_ARGUMENTS, *more], STRICT) as server:
        answers = []
        for _ in range(3):
            answers += ask(server.url, [greedy(prompt, 8)])
            deadline = time.monotonic() + PATIENCE_S
            while (state := server.state())["resize"]["wanted_tokens"] != 16:
                assert time.monotonic() < deadline, state
                time.sleep(0.1)
            assert state["integrity"] == "ok"
        first, *later = (answer["meta_info"]["cached_tokens"] for answer in answers)
        assert first == 0 and min(later) >= 5984, later
        assert len({tuple(ids) for ids in token_ids(answers)}) == 1


def test_two_ranks_rest_alike() -> None:
    cores = sorted(os.sched_getaffinity(0))
    binding = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    more = ["--ellm-policy", "fcfs", "--ellm-device-kv-tokens", "20000", "--tp", "2"]
    more += ["--ellm-idle-release-s", "1", "--ellm-min-device-kv-tokens", "512"]
    bodies = BODIES[:8]
    with ServerProcess([*DEMO_ARGUMENTS, *more], {**STRICT, **binding}) as server:
        expected = token_ids(ask(server.url, bodies))
        for _ in range(2):
            deadline = time.monotonic() + PATIENCE_S
            while (state := server.state())["device_units_free"] >= 32:
                assert time.monotonic() < deadline, state
                time.sleep(0.1)
            assert state["integrity"] == "ok"
            assert 7_000 < state["resize"]["wanted_tokens"] < 12_000, "what prefixes take"
            assert token_ids(ask(server.url, bodies)) == expected
            assert server.state()["integrity"] == "ok"
        server.flush_cache()
        deadline = time.monotonic() + PATIENCE_S
        while (state := server.state())["resize"]["wanted_tokens"] > 512:
            assert time.monotonic() < deadline, state
            time.sleep(0.1)
        assert state["integrity"] == "ok"
