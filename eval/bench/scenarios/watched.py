"""What it costs to be watched: metrics, SGLang's own and those with eLLM's, and an open page that
looks once a second. Each round starts the servers anew: two processes of one program differ."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx
import psutil

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.config.click_types import REQUESTS, TOKENS
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.result import Column, Paired, Taken
from ellm_sgl.eval.bench.scenario import Scenario, Setting, option, rounds_option

EVERY_S = 1.0
"""As the page does."""
ROUTES = ("/ellm/state", "/ellm/requests")


@dataclass(frozen=True)
class Watched(Scenario):
    rounds: int = rounds_option(10)
    requests: int = option(24, REQUESTS)
    prompt_tokens: int = option(128, TOKENS)
    output_tokens: int = option(512, TOKENS)
    pool_tokens: int = option(10_000, TOKENS, "eLLM's, of the device; elsewhere is room for all.")

    anew = True
    against: ClassVar = {
        "SGLang, metrics": "SGLang",
        "eLLM, metrics": "eLLM",
        "page open": "eLLM, metrics",
    }
    columns = (
        Column("tokens/s", "tokens_per_s"),
        Paired("of the row above", "tokens_per_s", "{:.3f}"),
        Column("processor, ms a token", "cpu_per_token", "{:.3f}", scale=1e3),
        Paired("of the row above", "cpu_per_token", "{:.3f}"),
    )

    def starters(self) -> loads.Starters:
        room = self.requests * (self.prompt_tokens + self.output_tokens)
        stock: tuple[object, ...] = ("--max-total-tokens", 2 * room)
        own: tuple[object, ...] = (
            "--ellm-policy", "fcfs", "--ellm-layer-group", 1,
            "--ellm-device-kv-tokens", self.pool_tokens, "--ellm-host-kv-tokens", room,
        )  # fmt: skip
        return {
            "SGLang": loads.starter(*stock),
            "SGLang, metrics": loads.starter(*stock, "--enable-metrics"),
            "eLLM": loads.starter(*own),
            "eLLM, metrics": loads.starter(*own, "--enable-metrics"),
        }

    def settings(self) -> list[Setting]:
        """The page is open on the server with metrics, and closed again: the same process."""
        return [
            *(Setting(name, name) for name in self.starters()),
            Setting("page open", "eLLM, metrics", value=True),
        ]

    def warm_up(self, name: str, server: ServerProcess) -> None:
        """All alike, however many settings share a server."""
        self.measure(server, Setting(name, name), self.load("", self.rounds))

    def load(self, cell: str, seed: int) -> loads.Prompts:
        return loads.draw_prompts(seed, self.requests, self.prompt_tokens)

    def measure(self, server: ServerProcess, setting: Setting, load: loads.Prompts) -> Taken:
        watching: AbstractContextManager[Any] = nullcontext()
        if setting.value:
            watching = open_page(server.url)
        server.flush_cache()
        before = processor_seconds(server.pid)
        with watching:
            taken = loads.generate(server, load, self.output_tokens)
        took = processor_seconds(server.pid) - before
        tokens = sum(map(len, taken.outputs))
        return dataclasses.replace(taken, figures={**taken.figures, "cpu_per_token": took / tokens})


def processor_seconds(pid: int) -> float:
    """What a process and its descendants, those that run, have taken of the processors so far."""
    main = psutil.Process(pid)
    times = [process.cpu_times() for process in (main, *main.children(recursive=True))]
    return float(sum(time.user + time.system for time in times))


@contextmanager
def open_page(url: str) -> Iterator[None]:
    """Somebody has the page open."""
    closed = threading.Event()

    def look() -> None:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            while not closed.is_set():
                for route in ROUTES:
                    client.get(route).raise_for_status()
                closed.wait(EVERY_S)

    with ThreadPoolExecutor(1) as browser:
        looking = browser.submit(look)
        try:
            yield
        finally:
            closed.set()
        looking.result()  # who could not look has not watched
