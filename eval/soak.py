"""A server under a random load for as long as wanted: nothing may be lost, nothing may leak.

`python -m ellm_sgl.eval.soak [--minutes 10] [--at-once 20] [--max-queued N] [--policy NAME]
[--json]` serves the demo model to so many streams at once, of all kinds, a third of them cut off in
mid-stream, while the pool shrinks and grows and the ratio changes. Every request must end with the
right tokens, or be refused with a time to come again. Then every unit must be free again, on the
device and on the host, the page table consistent, and the processes no larger than they were at the
beginning.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields

import click
import psutil
from rich.console import Console

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess, stop_on_signals
from ellm_sgl.config.click_types import LAYERS, TOKENS_OR_NONE, FiniteRange
from ellm_sgl.config.commands import json_text
from ellm_sgl.eval.soak_load import Known, Tally, Until, known_answers, load

TOKENS_EACH = 200
"""Of the device pool at its largest, for each of the streams at once: none is missing then."""
CHANGE_S = 0.25
POOLS = (0.2, 0.4, 1.0)
"""Shares of that which the pool has, one at random every CHANGE_S,"""
RATIOS = (0.0, 0.0, 0.0, 0.4)
"""and one of these ratios, with the policy that takes one."""
FIXED = "fixed-ratio"
COUNTERS = ("evicted_units", "saved_units", "fetched_units", "recomputed_tokens", "retractions")
MOST_GROWTH = 0.05
"""Of resident memory, from the second part to the last: the first warms up (`_change_settings`)."""


@dataclass(frozen=True)
class Load:
    """What a soak asks of its server."""

    at_once: int = 20
    """Streams under way."""
    host_tokens: int = 3000
    layer_group: int = 2
    max_queued: int | None = None
    """SGLang's `--max-queued-requests`; None: nobody is refused."""
    policy: str = FIXED
    """eLLM's; others choose the ratio themselves."""

    @property
    def pool_tokens(self) -> int:
        """Of the device pool at its largest."""
        return TOKENS_EACH * self.at_once

    def server(self) -> ServerProcess:
        """That it is for, with SGLang's memory checks after every step."""
        arguments = [*DEMO_ARGUMENTS, "--ellm-policy", self.policy, "--random-seed", "1",
                     "--ellm-device-kv-tokens", str(self.pool_tokens),
                     "--ellm-host-kv-tokens", str(self.host_tokens),
                     "--ellm-layer-group", str(self.layer_group)]  # fmt: skip
        if self.max_queued is not None:
            arguments += ["--max-queued-requests", str(self.max_queued)]
        strict = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "OMP_NUM_THREADS": "1"}
        return ServerProcess(arguments, strict)

    def settings(self, pool_share: float, ratio: float) -> dict[str, float]:
        """Of the running server, so much of the pool at its largest and this ratio."""
        chosen: dict[str, float] = {"ellm_ratio": ratio} if self.policy == FIXED else {}
        return chosen | {"ellm_device_kv_tokens": int(self.pool_tokens * pool_share)}


@dataclass(frozen=True)
class Part:
    """What happened in one part of a soak."""

    tally: Tally
    changes: int
    """Times that pool and ratio were set."""
    seconds: float
    resident_mb: float
    """Memory of the server and its workers at the end, with the pool at its smallest."""


@dataclass(frozen=True)
class SoakReport:
    """A soak, and what is wrong after it."""

    parts: tuple[Part, ...]
    total: Tally
    growth: float
    """Of resident memory, from the second part to the last, as a share: of the line through all of
    these that fits best."""
    mb_per_minute: float
    """The slope of that line."""
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
    server: ServerProcess, asked: Load, parts: Iterator[Until], console: Console | None = None
) -> list[Part]:
    """Load the server part by part, changing its pool and ratio at random meanwhile."""
    known = known_answers(server.url)
    done = []
    for number, until in enumerate(parts):
        done.append(_part(server, asked, until, number, known))
        if console is not None:
            console.print(f"part {number + 1}: {done[-1]}", style="dim")
    return done


def inspect(server: ServerProcess, asked: Load, parts: list[Part]) -> SoakReport:
    """Look at an idle server after a soak. Empties its prefix cache."""
    server.adjust(**asked.settings(1.0, 0.0))
    before = server.state()
    # Every unit is free, or cached in the prefix tree: after the tree is emptied, all are free.
    server.flush_cache()
    after = server.state()
    total, (growth, slope) = sum_of([part.tally for part in parts]), _growth(parts)
    found = {
        "the server has ended: SGLang's own checks failed": not server.alive(),
        f"page table under load: {before['integrity']}": before["integrity"] != "ok",
        f"page table after it: {after['integrity']}": after["integrity"] != "ok",
        "a finished request is still mapped": before["pool"]["sequences"] != 0,
        "device units are lost": after["device_units_free"] != after["device_units_total"],
        "host units are lost": after["host_units_free"] != after["host_units_total"],
        f"memory has grown by {growth:.1%}": growth >= MOST_GROWTH,
        f"{total.failed} requests failed": total.failed > 0,
        f"{total.timed_out} requests timed out": total.timed_out > 0,
        f"{total.wrong} answers are wrong": total.wrong > 0,
        "requests have got lost": total.completed + total.cut_off != total.requests,
        "no answer was compared": total.checked == 0,
        "nothing was evicted: the load was too small": before["evicted_units_total"] == 0,
        "nobody was refused: the queue was never full": asked.max_queued is not None
        and total.refused == 0,
    }
    return SoakReport(
        parts=tuple(parts),
        total=total,
        growth=growth,
        mb_per_minute=slope,
        **{name: before[f"{name}_total"] for name in COUNTERS},
        host_units=after["host_units_total"],
        device_units=after["device_units_total"],
        problems=tuple(problem for problem, is_so in found.items() if is_so),
    )


def sum_of(tallies: list[Tally]) -> Tally:
    """All of them together; of the times to a first token the worst."""
    found = Tally(**{f.name: sum(getattr(t, f.name) for t in tallies) for f in fields(Tally)})
    found.worst_ttft_s = max(t.worst_ttft_s for t in tallies)
    return found


def _growth(parts: list[Part]) -> tuple[float, float]:
    """By what share memory has grown after the first part, and by how many MB per minute."""
    after = parts[1:]
    if len(after) < 2:
        return 0.0, 0.0
    minutes = [sum(p.seconds for p in after[: i + 1]) / 60 for i in range(len(after))]
    slope, at_0 = statistics.linear_regression(minutes, [p.resident_mb for p in after])
    return slope * (minutes[-1] - minutes[0]) / (at_0 + slope * minutes[0]), slope


def _part(server: ServerProcess, asked: Load, until: Until, seed: int, known: list[Known]) -> Part:
    over = threading.Event()
    began = time.monotonic()
    with ThreadPoolExecutor(1) as background:
        changes = background.submit(_change_settings, server, asked, over, seed)
        try:
            tally = asyncio.run(load(server.url, until, seed, asked.at_once, known))
        finally:
            over.set()
        done = changes.result()
    # What the pool has in use at the end of a load is a matter of chance.
    server.adjust(ellm_device_kv_tokens=int(asked.pool_tokens * min(POOLS)))
    return Part(
        tally=tally,
        changes=done,
        seconds=time.monotonic() - began,
        resident_mb=_resident_bytes(server) / 1e6,
    )


def _change_settings(server: ServerProcess, asked: Load, over: threading.Event, seed: int) -> int:
    rng, changes = random.Random(seed), 0
    while not over.wait(CHANGE_S):
        chosen = rng.choice(POOLS), rng.choice(RATIOS)
        if seed == 0:  # steps restore the most then, and take all the memory that any later ones do
            chosen = min(POOLS), max(RATIOS)
        server.adjust(**asked.settings(*chosen))
        changes += 1
    return changes


def _resident_bytes(server: ServerProcess) -> int:
    process = psutil.Process(server.pid)
    return sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))


def minutes_in_parts(total: float) -> Iterator[Until]:
    """Four parts at least, of a minute or less, each from when it is asked for."""
    parts = max(4, math.ceil(total))
    for _ in range(parts):
        end = time.monotonic() + 60 * total / parts
        yield lambda _, end=end: time.monotonic() > end  # type: ignore[misc]  # binds `end` now


@click.command()
@click.option("--minutes", type=FiniteRange(0.1, 10**5), default=10.0, show_default=True)
@click.option("--at-once", type=click.IntRange(1, 10_000), default=20, show_default=True,
              help="Streams.")  # fmt: skip
@click.option("--max-queued", type=click.IntRange(1, 10_000),
              help="SGLang's --max-queued-requests; without it nobody is refused.")  # fmt: skip
@click.option("--policy", default=FIXED, show_default=True,
              help="eLLM's; others than the default choose the ratio themselves.")  # fmt: skip
@click.option("--host-tokens", type=TOKENS_OR_NONE, default=3000, show_default=True,
              help="Of the host tier; 0: none.")  # fmt: skip
@click.option("--layer-group", type=LAYERS, default=2, show_default=True, help="F.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def main(
    minutes: float,
    at_once: int,
    max_queued: int | None,
    policy: str,
    host_tokens: int,
    layer_group: int,
    as_json: bool,
) -> None:
    """Soak a server on the demo model; the exit status is 1 if anything is wrong after it."""
    asked = Load(at_once, host_tokens, layer_group, max_queued, policy)
    with stop_on_signals(), asked.server() as server:
        parts = soak(server, asked, minutes_in_parts(minutes), Console(stderr=True))
        report = inspect(server, asked, parts)
    click.echo(json_text(asdict(report)) if as_json else _told(report))
    raise SystemExit(bool(report.problems))


def _told(report: SoakReport) -> str:
    total = report.total
    return (
        f"{total.requests} requests: {total.completed} completed, {total.cut_off} cut off, "
        f"{total.timed_out} timed out, {total.failed} failed; {total.refused} times told to come "
        f"later; {total.checked} answers compared, {total.wrong} wrong; worst TTFT "
        f"{total.worst_ttft_s:.1f} s\n"
        f"{sum(part.changes for part in report.parts)} changes of pool and ratio; memory "
        f"{report.parts[-1].resident_mb:,.0f} MB, {report.growth:+.1%} "
        f"({report.mb_per_minute:+.2f} MB a minute); {report.fetched_units} units fetched, "
        f"{report.recomputed_tokens} tokens recomputed, {report.retractions} retractions\n"
        + ("; ".join(report.problems) or "all units are free, nothing leaks")
    )


if __name__ == "__main__":
    main()
