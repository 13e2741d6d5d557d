"""The store on disk under a real server: killed, damaged, started anew and out of room, outputs are
the same."""

from __future__ import annotations

import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from ellm_sgl.sglang.versions import adapter
from ellm_sgl.store import Chain
from ellm_sgl.store.records import read
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.e2e.retrained import retrained_into
from tests.e2e.test_long_prompts import seen, until
from tests.e2e.test_memory_pressure import wait_for
from tests.servers import STRICT

pytestmark = pytest.mark.slow

TOKENS = 4_000
"""Of the pool: two of the prompts."""
CHUNK = 512
OUTPUT = 48
PROMPTS = prompts(4, 1_800, 2_000, seed=5)
LATE = prompts(2, 1_800, 2_000, seed=6)
"""For which the disk has no room."""
BLOCK = 16
BLOCK_BYTES = 65_536
"""Of the demo model in fp32."""
DAMAGED = 40
"""Block of the first prompt that loses a bit."""


def bodies(prompts: list[list[int]]) -> list[dict[str, object]]:
    return [greedy(p, OUTPUT) for p in prompts]


def serve(folder: Path, *more: str) -> ServerProcess:
    cores = sorted(os.sched_getaffinity(0))
    binding = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"} if "--tp" in more else {}
    return ServerProcess(
        [
            *DEMO_ARGUMENTS, "--ellm-policy", "fcfs",
            "--ellm-device-kv-tokens", str(TOKENS), "--chunked-prefill-size", str(CHUNK),
            "--ellm-kv-store", str(folder), "--ellm-kv-store-size", "64MiB", *more,
        ],
        {**STRICT, **binding},
    )  # fmt: skip


def damage(folder: Path, prompt: list[int], block: int) -> None:
    """Flip a bit of what is stored of one block."""
    (records,) = folder.glob("*/records")
    anybody: Any = SimpleNamespace(extra_key=None, cache_salt=None)
    chain = Chain(BLOCK, adapter().namespaces(anybody))
    chain.extend(np.array(prompt))
    slot = read(records)[chain.keys[block]].slot
    with (records.parent / "blocks").open("r+b") as file:
        file.seek((slot - 1) * BLOCK_BYTES + 1_000)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_prompts_and_conversations_survive_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with serve(folder) as server:
        assert server.state()["bytes"]["kv_store"] == 128 << 20
        first = [ask(server.url, [body])[0] for body in bodies(PROMPTS[:3])]
        expected = token_ids(first)
        turn = PROMPTS[0] + expected[0] + PROMPTS[3][:100]
        expected += token_ids(ask(server.url, bodies([turn])))
        again = ask(server.url, bodies(PROMPTS[:3]))
        assert token_ids(again) == expected[:3]
        state = server.state()
        assert state["integrity"] == "ok"
        # The pool holds two of them: a third comes from the disk.
        assert state["kv_store"]["fetched_tokens_total"] >= 1_700
        # Killed in the middle of an answer, when a prompt has come.
        with ThreadPoolExecutor() as background:
            late = [background.submit(lost, server.url, PROMPTS[3])]
            wait_for(server, lambda s: s["pool"]["mapped_tokens"] > len(PROMPTS[3]) + 50)
            late.append(background.submit(lost, server.url, PROMPTS[3][::-1]))
            wait_for(server, lambda s: s["running"] + s["waiting"] == 2)
            os.killpg(server.pid, signal.SIGKILL)
        for each in late:
            each.result()
    damage(folder, PROMPTS[0], DAMAGED)
    with serve(folder) as server:
        answers = [ask(server.url, [body])[0] for body in bodies([PROMPTS[0], turn, PROMPTS[1]])]
        assert token_ids(answers) == [expected[0], expected[3], expected[1]]
        cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
        assert cached[0] == DAMAGED * BLOCK
        # What was found damaged has been computed and stored again.
        assert cached[1] >= len(PROMPTS[0]) + OUTPUT - 2 * BLOCK
        assert cached[2] >= len(PROMPTS[1]) - BLOCK - 1
        # All at once, beside each other's decoding.
        together = ask(server.url, bodies([*PROMPTS[:3], turn]))
        assert token_ids(together) == expected
        state = server.state()
        assert state["kv_store"]["damaged_blocks_total"] == 1
        assert state["kv_store"]["problem"] is None and state["integrity"] == "ok"
        check_a_full_disk(server, folder, bodies([*PROMPTS[:3], turn]), expected)


def check_a_full_disk(
    server: ServerProcess, folder: Path, known: list[dict[str, object]], expected: list[list[int]]
) -> None:
    """Requests bring more than the disk takes: it says so, what it has is read on, and nobody
    notices. The limit on the size of a file stands for the disk's: the same error path of `write`.
    """
    late = bodies(LATE)
    # Stored too, by another name.
    expected = expected + token_ids(ask(server.url, [b | {"extra_key": "other"} for b in late]))
    children = psutil.Process(server.pid).children(recursive=True)
    [scheduler] = [p for p in children if "sglang::scheduler" in " ".join(p.cmdline())]
    [blocks] = folder.glob("*/blocks")
    server.flush_cache()
    before = server.state()["kv_store"]
    limits = scheduler.rlimit(resource.RLIMIT_FSIZE)
    scheduler.rlimit(resource.RLIMIT_FSIZE, (blocks.stat().st_size, limits[1]))
    assert token_ids(ask(server.url, [*known, *late])) == expected
    full = server.state()["kv_store"]
    assert full["problem"] == f"{folder}: File too large"
    assert server.log.read_text().count("nothing more is stored") == 1
    # With room again, it goes on as it is until it is restarted.
    scheduler.rlimit(resource.RLIMIT_FSIZE, limits)
    server.flush_cache()
    assert token_ids(ask(server.url, [*known, *late])) == expected
    server.flush_cache()
    state = server.state()
    assert state["integrity"] == "ok"
    assert state["device_units_free"] == state["device_units_total"]
    after = state["kv_store"]
    assert after["stored_blocks_total"] == full["stored_blocks_total"]
    assert after["fetched_tokens_total"] > full["fetched_tokens_total"]
    assert after["problem"] == full["problem"]
    assert after["damaged_blocks_total"] == before["damaged_blocks_total"]


def lost(url: str, prompt: list[int]) -> None:
    """A request whose server is killed."""
    with pytest.raises(httpx.TransportError):
        httpx.post(f"{url}/generate", json=greedy(prompt, 2_000), timeout=60)


def test_who_is_killed_in_a_long_prompt_has_lost_a_chunk(tmp_path: Path) -> None:
    """At most: of what had been computed, beside the chunk that was being computed."""
    long = ["--ellm-device-kv-tokens", "16000", "--context-length", "16000",
            "--json-model-override-args", '{"max_position_embeddings": 16000}']  # fmt: skip
    # Long enough to be seen unfinished on a fast machine, too.
    [prompt] = prompts(1, 12_000, 12_000, seed=7)
    with serve(tmp_path / "kv", *long) as server, ThreadPoolExecutor() as background:
        late = background.submit(lost, server.url, prompt)
        done = until(lambda: [r["prompt"]["done"] for r in seen(server)
                              if r["prompt"] and r["prompt"]["done"] >= 4 * CHUNK])  # fmt: skip
        os.killpg(server.pid, signal.SIGKILL)
        late.result()
    with serve(tmp_path / "kv", *long) as server:
        [again] = ask(server.url, [greedy(prompt, 1)])
    assert len(prompt) > again["meta_info"]["cached_tokens"] >= done[0] - 2 * CHUNK - BLOCK


def test_new_weights_of_one_rank_are_new_weights_for_all(tmp_path: Path) -> None:
    """Whose own part of the model is as before: its KV is not."""
    prompt = [160 + 37 * i % 100 if i % 4 else t for i, t in enumerate(PROMPTS[0][:600])]
    body = greedy(prompt, OUTPUT) | {"return_logprob": True}
    other = retrained_into(tmp_path / "model", from_row=160)

    def logprobs(server: ServerProcess) -> list[float]:
        [answer] = ask(server.url, [body])
        return [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]

    found = []
    for model in ([], ["--model-path", str(other)]):
        with serve(tmp_path / "kv", "--tp", "2", *model) as server:
            found.append(logprobs(server))
            assert server.state()["kv_store"]["fetched_tokens_total"] == 0
            server.flush_cache()
            assert logprobs(server) == pytest.approx(found[-1], abs=1e-4)
            assert server.state()["kv_store"]["fetched_tokens_total"] > 500
    assert found[0] != pytest.approx(found[1], abs=1e-2)
