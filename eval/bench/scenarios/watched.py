"""What it costs to be watched: metrics, and an open page that looks once a second."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx

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
    rounds: int = rounds_option(20)
    requests: int = option(24, REQUESTS)
    prompt_tokens: int = option(128, TOKENS)
    output_tokens: int = option(256, TOKENS)
    pool_tokens: int = option(6_000, TOKENS, "Of the device; the host has room for all.")

    against: ClassVar = {"metrics": "unwatched", "page open": "metrics"}
    columns = (
        Column("tokens/s", "tokens_per_s"),
        Paired("of the row above", "tokens_per_s", "{:.3f}"),
    )

    def starters(self) -> loads.Starters:
        host = self.requests * (self.prompt_tokens + self.output_tokens)
        own: tuple[object, ...] = (
            "--ellm-policy", "fcfs", "--ellm-layer-group", 1,
            "--ellm-device-kv-tokens", self.pool_tokens, "--ellm-host-kv-tokens", host,
        )  # fmt: skip
        return {
            "unwatched": loads.starter(*own),
            "metrics": loads.starter(*own, "--enable-metrics"),
        }

    def settings(self) -> list[Setting]:
        """The page is open on the server with metrics, and closed again: the same process."""
        return [
            Setting("unwatched", "unwatched"),
            Setting("metrics", "metrics"),
            Setting("page open", "metrics", value=True),
        ]

    def load(self, cell: str, seed: int) -> loads.Prompts:
        return loads.draw_prompts(seed, self.requests, self.prompt_tokens)

    def measure(self, server: ServerProcess, setting: Setting, load: loads.Prompts) -> Taken:
        watching: AbstractContextManager[Any] = nullcontext()
        if setting.value:
            watching = open_page(server.url)
        server.flush_cache()
        with watching:
            return loads.generate(server, load, self.output_tokens)


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
