"""`ellm-sgl demo`: one load of chats on three servers, one after the other.

First stock SGLang with ample memory, which gives the reference outputs and tells how much KV the
load needs; then eLLM, and stock SGLang again, with a third of that.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
from rich.console import Console

from ellm_sgl.client.division import BLOCK_TOKENS
from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerError, ServerProcess, stop_on_signals
from ellm_sgl.serve.chat_load import ChatLoad, ChatStream, stream_all
from ellm_sgl.serve.demo_report import DemoReport, Restoration, ServerRun
from ellm_sgl.serve.live_view import Progress, Show, view

FRAME_S = 0.25
"""Between two looks at the streams."""
POLL_S = 0.5
"""Between two looks at the server's state."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""One compute thread for the model: clients, tokenizer and detokenizer share the cores with it, and
two threads that meet hundreds of times per step spin until the one that lost its core has it back.
Measured on 2 cores with another program beside, this load with ample memory: 590 to 900 tokens/s
with one thread, 40 to 190 with two."""
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")


@dataclass(frozen=True)
class _Server:
    """A server to put under the load."""

    step: int
    name: str
    pool_tokens: int
    ellm: bool = False
    host_tokens: int = 0

    @property
    def title(self) -> str:
        return f"{self.step}/3 {self.name} ({self.pool_tokens:,} tokens)"

    def process(self) -> ServerProcess:
        if self.ellm:
            # What leaves the small pool goes to host memory, in groups of one layer: the demo
            # model has only eight, and two groups are on their way back at any time.
            host = ["--ellm-layer-group", "1", "--ellm-host-kv-tokens", str(self.host_tokens)]
            pool = ["--ellm-policy", "fcfs", *host, "--ellm-device-kv-tokens"]
        else:
            pool = ["--max-total-tokens"]
        return ServerProcess([*DEMO_ARGUMENTS, *pool, str(self.pool_tokens)], ENVIRONMENT)


class ProcessorUse:
    """From now on: how busy programs other than this one and a server keep the processor.

    Args:
        server: process id; its children count as the server.
    """

    def __init__(self, server: int) -> None:
        self._server = server
        self._begin = self._look()

    def others(self) -> float:
        """Cores that other programs kept busy, on average since the start."""
        (begin_s, before), (now_s, now) = self._begin, self._look()
        return max(0.0, (now - before) / (now_s - begin_s))

    def _look(self) -> tuple[float, float]:
        """Clock, and processor seconds of the whole machine without those of our processes."""
        machine = psutil.cpu_times()
        waiting = machine.idle + getattr(machine, "iowait", 0.0)
        guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        seconds = sum(machine) - waiting - guests
        server = psutil.Process(self._server)
        for process in (psutil.Process(), server, *server.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds -= times.user + times.system
        return time.monotonic(), seconds


def run_demo(load: ChatLoad, pool_tokens: int | None, console: Console) -> DemoReport:
    """Run the three servers and compare.

    Args:
        pool_tokens: of the small pool; None: a third of what the load turns out to need.
        console: shows progress: a live view if it is a terminal, else plain lines.

    Raises:
        ServerError: a server did not start, or went away.
        KeyboardInterrupt: asked to stop (by SIGTERM or SIGHUP too); no server is left.
    """
    begin = time.monotonic()
    say(
        console,
        f"{load.streams} chats at once, about {load.prompt_tokens} + {load.output_tokens} tokens "
        "each, on three servers in turn: about three minutes on two cores.",
    )
    with stop_on_signals():
        ample = _run(_Server(1, "stock, ample", 2 * load.most_tokens), load, console)
        third = max(ample.needed_tokens // 3 // BLOCK_TOKENS, 1) * BLOCK_TOKENS
        small = pool_tokens or third
        ellm = _run(_Server(2, "eLLM, small", small, True, load.most_tokens), load, console)
        stock = _run(_Server(3, "stock, small", small), load, console)
    return DemoReport(ample, stock, ellm, time.monotonic() - begin)


def _run(server: _Server, load: ChatLoad, console: Console) -> ServerRun:
    """Start a server, load it, stop it."""
    process = server.process()
    begin = time.monotonic()
    try:
        starting = f"{server.title}: starting the server"
        if not console.is_interactive:
            say(console, starting)
        with console.status(starting) if console.is_interactive else nullcontext():
            process.start()
        return _measure(server, process, time.monotonic() - begin, load, console)
    except httpx.HTTPError as error:
        raise process.lost(error) from error
    finally:
        process.stop()


def _measure(
    server: _Server, process: ServerProcess, start_s: float, load: ChatLoad, console: Console
) -> ServerRun:
    streams, use = load.begin(), ProcessorUse(process.pid)
    with view(console, server.title) as show:
        cached_ratios = asyncio.run(_load(process.url, server.ellm, load, streams, show))
    if not process.answers():
        raise ServerError(f"the server went away:\n{process.last_words()}")
    run = ServerRun(
        name=server.name,
        pool_tokens=server.pool_tokens,
        records=tuple(streams),
        retractions=sum(map(int, _RETRACTED.findall(process.log.read_text(errors="replace")))),
        start_s=start_s,
        other_cores=use.others(),
        attention="eLLM's" if server.ellm else process.attention_backend(),
        restoration=_restoration(process.state(), cached_ratios) if server.ellm else None,
    )
    say(
        console,
        f"{server.title}: {run.completed}/{load.streams} complete, "
        f"{run.statistics.output_tokens_per_s:.0f} tokens/s, {run.retractions} retractions",
    )
    return run


def say(console: Console, line: str) -> None:
    """A line of progress."""
    console.print(line, soft_wrap=not console.is_interactive, highlight=False)


async def _load(
    url: str, ellm: bool, load: ChatLoad, streams: Sequence[ChatStream], show: Show
) -> list[float]:
    """Run the load and show it meanwhile; returns the mean cached ratios, one for every look at
    the state."""
    cached_ratios: list[float] = []

    async def watch() -> None:
        begin, poll_at = time.monotonic(), 0.0
        state: dict[str, Any] = {}
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            while True:
                elapsed = time.monotonic() - begin
                if ellm and elapsed >= poll_at:
                    poll_at = elapsed + POLL_S
                    with suppress(httpx.HTTPError):  # a server that went away is told of by `_run`
                        state = (await client.get(f"{url}/ellm/state")).raise_for_status().json()
                        cached_ratios.append(state["cached_ratio_mean"])
                show(Progress(streams, elapsed, state, cached_ratios))
                await asyncio.sleep(FRAME_S)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        await stream_all(url, load, streams)
        watching.cancel()
    return cached_ratios


def _restoration(state: dict[str, Any], cached_ratios: Sequence[float]) -> Restoration:
    return Restoration(
        evicted_units=state["evicted_units_total"],
        restored_units=state["restored_units_total"],
        recomputed_tokens=state["recomputed_tokens_total"],
        fetched_units=state["fetched_units_total"],
        lowest_cached_ratio=min(cached_ratios, default=1.0),
        integrity=state["integrity"],
    )
