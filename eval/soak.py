"""A server under a random load for as long as wanted: nothing may be lost, nothing may leak.

`python -m ellm_sgl.eval.soak [--minutes 10] [--host-tokens 3000] [--json]` serves the demo model to
requests of all kinds, a third of them cut off in mid-stream, while the pool shrinks and grows and
the ratio changes. Then every unit must be free again, on the device and on the host, the page table
consistent, and the processes no larger than they were at the beginning.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import click
import httpx
import psutil
from rich.console import Console

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from ellm_sgl.client.workloads import PRINTABLE
from ellm_sgl.config.click_types import LAYERS, TOKENS_OR_NONE, FiniteRange

AT_ONCE = 20
CUT_OFF_SHARE = 0.33
PROMPT_TOKENS = (1, 150)
PREFIX_TOKENS = (10, 250)
PREFIX_SHARE = 0.6
"""Share of the requests that begin with one of six prefixes."""
OUTPUT_TOKENS = (1, 20)
CHANGE_S = 0.25
POOLS = (800, 1600, 4000)
"""Tokens of the device pool, one at random every CHANGE_S,"""
RATIOS = (0.0, 0.0, 0.0, 0.4)
"""and one of these ratios."""
AMPLE_TOKENS = max(POOLS)
COUNTERS = ("evicted_units", "saved_units", "fetched_units", "recomputed_tokens", "retractions")
MOST_GROWTH = 0.05
"""Of resident memory, from the second part to the last: the first warms up."""

Until = Callable[[int], bool]
"""Whether the load is over, so many requests having been sent."""


@dataclass(frozen=True)
class Part:
    """What happened in one part of a soak."""

    requests: int
    cut_off: int
    """Of these, how many the client left in mid-stream."""
    failed: int
    """Answers with an HTTP status other than 200."""
    changes: int
    """Times that pool and ratio were set."""
    seconds: float
    resident_mb: float
    """Memory of the server and its workers at the end."""


@dataclass(frozen=True)
class SoakReport:
    """A soak, and what is wrong after it."""

    parts: tuple[Part, ...]
    growth: float
    """Of resident memory, from the second part to the last, as a share."""
    evicted_units: int
    saved_units: int
    """Copied to the host tier."""
    fetched_units: int
    recomputed_tokens: int
    retractions: int
    host_units: int
    device_units: int
    problems: tuple[str, ...]
    """Empty if all is well."""


def soak(
    server: ServerProcess, parts: Iterator[Until], console: Console | None = None
) -> list[Part]:
    """Load the server part by part, changing its pool and ratio at random meanwhile."""
    done = []
    for number, until in enumerate(parts):
        done.append(_part(server, until, number))
        if console is not None:
            console.print(f"part {number + 1}: {done[-1]}", style="dim")
    return done


def inspect(server: ServerProcess, parts: list[Part]) -> SoakReport:
    """Look at an idle server after a soak. Empties its prefix cache."""
    server.adjust(ellm_ratio=0.0, ellm_device_kv_tokens=AMPLE_TOKENS)
    before = server.state()
    # Every unit is free, or cached in the prefix tree: after the tree is emptied, all are free.
    server.flush_cache()
    after = server.state()
    growth = parts[-1].resident_mb / parts[min(1, len(parts) - 1)].resident_mb - 1
    found = {
        "the server has ended: SGLang's own checks failed": not server.alive(),
        f"page table under load: {before['integrity']}": before["integrity"] != "ok",
        f"page table after it: {after['integrity']}": after["integrity"] != "ok",
        "a finished request is still mapped": before["pool"]["sequences"] != 0,
        "device units are lost": after["device_units_free"] != after["device_units_total"],
        "host units are lost": after["host_units_free"] != after["host_units_total"],
        f"memory has grown by {growth:.1%}": growth >= MOST_GROWTH,
        "requests failed": any(part.failed for part in parts),
        "nothing was evicted: the load was too small": before["evicted_units_total"] == 0,
    }
    return SoakReport(
        parts=tuple(parts),
        growth=growth,
        **{name: before[f"{name}_total"] for name in COUNTERS},
        host_units=after["host_units_total"],
        device_units=after["device_units_total"],
        problems=tuple(problem for problem, is_so in found.items() if is_so),
    )


def _part(server: ServerProcess, until: Until, seed: int) -> Part:
    over = threading.Event()
    began = time.monotonic()
    with ThreadPoolExecutor(1) as background:
        changes = background.submit(_change_settings, server, over, seed)
        try:
            requests, cut_off, failed = asyncio.run(_load(server.url, until, seed))
        finally:
            over.set()
    return Part(
        requests=requests,
        cut_off=cut_off,
        failed=failed,
        changes=changes.result(),
        seconds=time.monotonic() - began,
        resident_mb=_resident_bytes(server) / 1e6,
    )


def _change_settings(server: ServerProcess, over: threading.Event, seed: int) -> int:
    rng, changes = random.Random(seed), 0
    while not over.wait(CHANGE_S):
        server.adjust(ellm_ratio=rng.choice(RATIOS), ellm_device_kv_tokens=rng.choice(POOLS))
        changes += 1
    return changes


async def _load(url: str, until: Until, seed: int) -> tuple[int, int, int]:
    """Keep AT_ONCE requests in flight; returns those sent, cut off and failed."""
    fixed = random.Random(99)
    prefixes = [fixed.choices(PRINTABLE, k=fixed.randint(*PREFIX_TOKENS)) for _ in range(6)]
    sent = cut_off = failed = 0

    async def one(client: httpx.AsyncClient, number: int) -> None:
        nonlocal cut_off, failed
        rng = random.Random(seed * 1_000_000 + number)
        prefix = rng.choice(prefixes) if rng.random() < PREFIX_SHARE else []
        new_tokens, temperature = rng.randint(*OUTPUT_TOKENS), rng.choice([0, 1])
        body = {
            "input_ids": prefix + rng.choices(PRINTABLE, k=rng.randint(*PROMPT_TOKENS)),
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": temperature},
            "stream": True,
        }
        leave_after = rng.randint(1, 10) if rng.random() < CUT_OFF_SHARE else None
        async with client.stream("POST", f"{url}/generate", json=body) as answer:
            failed += answer.status_code != 200
            seen = 0
            async for _ in answer.aiter_lines():
                seen += 1
                if seen == leave_after:
                    cut_off += 1
                    return  # closes the connection: SGLang aborts the request

    async def worker(client: httpx.AsyncClient) -> None:
        nonlocal sent
        while not until(sent):
            sent += 1
            await one(client, sent - 1)

    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(worker(client) for _ in range(AT_ONCE)))
    return sent, cut_off, failed


def _resident_bytes(server: ServerProcess) -> int:
    process = psutil.Process(server.pid)
    return sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))


def _minutes(total: float) -> Iterator[Until]:
    """Parts of a minute or less, each from when it is asked for."""
    parts = max(3, round(total))
    for _ in range(parts):
        end = time.monotonic() + 60 * total / parts
        yield lambda _, end=end: time.monotonic() > end  # type: ignore[misc]  # binds `end` now


@click.command()
@click.option("--minutes", type=FiniteRange(0.1, 10**5), default=10.0, show_default=True)
@click.option("--host-tokens", type=TOKENS_OR_NONE, default=3000, show_default=True,
              help="Of the host tier; 0: none.")  # fmt: skip
@click.option("--layer-group", type=LAYERS, default=2, show_default=True, help="F.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def main(minutes: float, host_tokens: int, layer_group: int, as_json: bool) -> None:
    """Soak a server on the demo model; the exit status is 1 if anything is wrong after it."""
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fixed-ratio", "--random-seed", "1",
                 "--ellm-device-kv-tokens", str(AMPLE_TOKENS),
                 "--ellm-host-kv-tokens", str(host_tokens),
                 "--ellm-layer-group", str(layer_group)]  # fmt: skip
    strict = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "OMP_NUM_THREADS": "1"}
    with ServerProcess(arguments, strict) as server:
        report = inspect(server, soak(server, _minutes(minutes), Console(stderr=True)))
    if as_json:
        click.echo(json.dumps(asdict(report)))
    else:
        total = sum(part.requests for part in report.parts)
        click.echo(
            f"{total} requests, {sum(part.cut_off for part in report.parts)} cut off, "
            f"{sum(part.changes for part in report.parts)} changes of pool and ratio; memory grew "
            f"by {report.growth:.1%}; {report.fetched_units} units fetched, "
            f"{report.recomputed_tokens} tokens recomputed, {report.retractions} retractions"
        )
        click.echo("; ".join(report.problems) or "all units are free, nothing leaks")
    raise SystemExit(bool(report.problems))


if __name__ == "__main__":
    main()
