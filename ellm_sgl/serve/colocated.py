"""`ellm-sgl demo --colocated`: two servers on one machine, with bursts of chats by turns.

In three ways: each has all the memory for itself, which no machine has twice; each has half of it;
both share it. Prefix caches are emptied before each burst, so that it is the same in all.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import httpx
from rich.console import Console

from ellm_sgl.budget import list_budgets, path_of
from ellm_sgl.client.division import ALONE, HALVES, SHARED, Division
from ellm_sgl.client.process import (
    DEMO_MODEL,
    ServerError,
    ServerProcess,
    stop_on_signals,
)
from ellm_sgl.eval.simulator.machines import read_model
from ellm_sgl.memory.arena import HUGE_PAGE
from ellm_sgl.serve.chat_load import ChatLoad, ChatStream, stream_all
from ellm_sgl.serve.colocated_report import NAMES, ColocatedReport, Run
from ellm_sgl.serve.colocated_view import Memory, Moment, Show, view
from ellm_sgl.serve.demo import ENVIRONMENT, say

BURSTS = 4
"""Of each server."""
LOOK_S = 0.01
"""Between two looks at the ledger."""
FRAME_S = 0.25
WARM_UP = ChatLoad(streams=2, output_tokens=16)
Pair = tuple[ServerProcess, ServerProcess]


def run_colocated(load: ChatLoad, memory_tokens: int | None, console: Console) -> ColocatedReport:
    """Run the two servers in three ways and compare.

    Args:
        load: a burst.
        memory_tokens: that both have together; None: what a burst needs and a little more.
        console: shows progress: a live view if it is a terminal, else plain lines.

    Raises:
        ServerError: a server did not start, or went away.
        KeyboardInterrupt: asked to stop (by SIGTERM or SIGHUP too); no server is left.
    """
    begin, shape = time.monotonic(), read_model(DEMO_MODEL / "config.json")
    per_token = shape.in_elements_of(4).kv_bytes_per_token
    if memory_tokens:
        memory = Division.of(memory_tokens, per_token)
    else:
        memory = Division.for_bursts(
            load.streams, load.prompt_tokens + load.output_tokens, per_token, HUGE_PAGE
        )
    budget = f"demo-{os.getpid()}"
    say(
        console,
        f"Two servers, {BURSTS} bursts of {load.streams} chats each by turns, on "
        f"{memory.nbytes / 2**20:.0f} MiB of KV: about a minute on two idle cores.",
    )
    with stop_on_signals():
        with _started(memory.fixed(memory.tokens), console, "without a shared budget") as pair:
            alone = _run(ALONE, pair, load, memory, None, console)
            for server in pair:
                server.adjust(ellm_device_kv_tokens=memory.half)
            halves = _run(HALVES, pair, load, memory, None, console)
        try:
            with _started(memory.shared(budget), console, "that share a budget") as pair:
                shared = _run(SHARED, pair, load, memory, budget, console)
        finally:
            path_of(budget).unlink(missing_ok=True)
    return ColocatedReport(
        (alone, halves, shared), memory.nbytes, memory.floor * memory.token_bytes,
        time.monotonic() - begin,
    )  # fmt: skip


@contextmanager
def _started(arguments: Sequence[str], console: Console, what: str) -> Iterator[Pair]:
    """Two servers, warmed up; stopped when the context is left."""
    pair = ServerProcess(arguments, ENVIRONMENT), ServerProcess(arguments, ENVIRONMENT)
    starting = f"starting two servers {what}"
    try:
        if not console.is_interactive:
            say(console, starting)
        with console.status(starting) if console.is_interactive else nullcontext():
            for server in pair:
                server.launch()
            for server in pair:
                server.wait_until_it_answers()
                asyncio.run(stream_all(server.url, WARM_UP, WARM_UP.begin()))
        yield pair
        for server in pair:
            if not server.answers():
                raise ServerError(f"a server went away:\n{server.last_words()}")
    except httpx.HTTPError as error:
        gone = next((s for s in pair if not s.alive()), pair[0])
        raise gone.lost(error) from error
    finally:
        for server in pair:
            server.stop()


def _run(
    way: str, pair: Pair, load: ChatLoad, memory: Division, budget: str | None, console: Console
) -> Run:
    """All bursts, one after the other."""
    looks = _Looks(pair, budget)
    bursts: tuple[list[list[ChatStream]], ...] = ([], [])
    with view(console, way, memory.nbytes) as show:
        for number in range(2 * BURSTS):
            turn = number % 2
            pair[turn].flush_cache()
            streams = load.begin()
            bursts[turn].append(streams)
            head = f"burst {number + 1}/{2 * BURSTS}, on {NAMES[turn]}"
            asyncio.run(_burst(pair[turn], load, streams, looks, head, show))
    states = [server.state() for server in pair]
    run = Run(
        name=way,
        bursts=tuple(tuple(map(tuple, each)) for each in bursts),
        most_bytes=looks.most,
        most_together=looks.most_together,
        retractions=sum(state["retractions_total"] for state in states),
        integrity=next((s["integrity"] for s in states if s["integrity"] != "ok"), "ok"),
    )
    said = (f"{name} p99 TTFT {s.ttft_p99_s or 0:.2f} s" for name, s in run.by_server())
    say(console, f"{way}: {', '.join(said)}")
    return run


async def _burst(
    server: ServerProcess,
    load: ChatLoad,
    streams: Sequence[ChatStream],
    looks: _Looks,
    head: str,
    show: Show,
) -> None:
    async def watch() -> None:
        shown_s = 0.0
        while True:
            looks.look()
            if (now := time.monotonic()) >= shown_s + FRAME_S:
                shown_s = now
                looks.remember()
                show(Moment(head, streams, looks.history))
            await asyncio.sleep(LOOK_S)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        await stream_all(server.url, load, streams)
        watching.cancel()


@dataclass
class _Looks:
    """What both servers have committed, in bytes: by the ledger where they share one; else it does
    not change."""

    pair: Pair
    budget: str | None
    history: list[Memory] = field(default_factory=list)
    """For the picture."""
    most: tuple[int, int] = (0, 0)
    most_together: int = 0
    last: Memory = (0, 0)

    def look(self) -> None:
        if self.budget is None:
            if not self.most_together:
                states = (server.state(integrity=False) for server in self.pair)
                one, other = (int(state["device_bytes_committed"]) for state in states)
                self.last = one, other
        else:
            self.last = _in_ledger(self.budget, self.pair)
        self.most = max(self.most[0], self.last[0]), max(self.most[1], self.last[1])
        self.most_together = max(self.most_together, sum(self.last))

    def remember(self) -> None:
        self.history.append(self.last)


def _in_ledger(budget: str, pair: Pair) -> Memory:
    rows = [sharer.row for found in list_budgets(budget) for sharer in found.sharers]
    by_port: Mapping[int, int] = {row.port: row.committed for row in rows}
    return by_port.get(pair[0].port, 0), by_port.get(pair[1].port, 0)
