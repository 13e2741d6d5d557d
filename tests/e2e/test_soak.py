"""2,000 requests of all kinds, a third of them cut off in mid-stream, while the pool shrinks and
grows and the ratio changes: nothing is lost, nothing leaks."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from ellm_sgl.serve.process import ServerProcess
from tests.e2e.load import prompts

pytestmark = pytest.mark.slow

REQUESTS = 2000
AT_ONCE = 24
PARTS = 4


def test_two_thousand_requests_with_aborts(server: ServerProcess) -> None:
    sizes = []
    for part in range(PARTS):
        done = threading.Event()
        with ThreadPoolExecutor(1) as background:
            changes = background.submit(change_settings, server, done, part)
            try:
                asyncio.run(load(server.url, REQUESTS // PARTS, seed=part))
            finally:
                done.set()
            changes.result()
        sizes.append(resident_bytes(server))
    server.adjust(ellm_ratio=0.0, ellm_device_kv_tokens=2000)
    state = server.state()
    assert state["evicted_units_total"] > 0
    assert state["integrity"] == "ok"
    assert state["pool"]["sequences"] == 0, "a finished request is still mapped"
    # Every unit is free, or cached in the prefix tree: after the tree is emptied, all are free.
    server.flush_cache()
    state = server.state()
    assert state["device_units_free"] == state["device_units_total"]
    assert server.alive(), "SGLang's own memory checks failed"
    grown = sizes[-1] - sizes[1]
    assert grown < 0.05 * sizes[1], f"memory still grows: {[size >> 20 for size in sizes]} MB"


def change_settings(server: ServerProcess, done: threading.Event, seed: int) -> None:
    """Pools and ratios at random, several times a second."""
    rng = random.Random(seed)
    while not done.wait(0.3):
        server.adjust(
            ellm_ratio=rng.choice([0.0, 0.0, 0.0, 0.4]),
            ellm_device_kv_tokens=rng.choice([800, 1600, 4000]),
        )


async def load(url: str, count: int, seed: int) -> None:
    rng = random.Random(seed)
    prefixes = prompts(6, 10, 250, seed=99)
    gate = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=AT_ONCE)

    async with httpx.AsyncClient(timeout=None, limits=limits) as client:

        async def one(index: int) -> None:
            prefix = rng.choice(prefixes) if rng.random() < 0.6 else []
            prompt = prefix + prompts(1, 1, 150, seed=seed * 10_000 + index)[0]
            sampling = {"max_new_tokens": rng.randint(1, 40), "temperature": rng.choice([0, 1])}
            body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
            cut_off_after = rng.randint(1, 10) if rng.random() < 0.33 else None
            async with gate, client.stream("POST", f"{url}/generate", json=body) as answer:
                seen = 0
                async for _ in answer.aiter_lines():
                    seen += 1
                    if seen == cut_off_after:
                        return  # closes the connection: SGLang aborts the request

        await asyncio.gather(*map(one, range(count)))


def resident_bytes(server: ServerProcess) -> int:
    """Memory of the server and its workers."""
    process = psutil.Process(server.pid)
    family = [process, *process.children(recursive=True)]
    return sum(p.memory_info().rss for p in family)
