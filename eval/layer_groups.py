"""What the number of layers per group, F, costs and saves, as in the eLLM paper's Table 2.

`python -m ellm_sgl.eval.layer_groups [--rounds N] [--json]` measures for F of 1, 2, 4, 8

- on real servers on the demo model, side by side and loaded in turn: output tokens per second with
  all KV cached and with half of it fetched from the host in every step, and the share of the time
  that goes into bookkeeping;
- on the page table alone, for Llama2-13B and the paper's ShareGPT lengths: fragmentation (memory in
  allocated units that holds no token) and the bookkeeping's time per decode step.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click
import numpy as np
from rich.console import Console

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from ellm_sgl.client.traces import IntArray
from ellm_sgl.client.workloads import paper_workload
from ellm_sgl.eval.paper.claims import TABLE_2
from ellm_sgl.eval.simulator.machines import MODELS
from ellm_sgl.memory import PageTable, PoolShape
from ellm_sgl.serve.verify import generate

GROUPS = (1, 2, 4, 8)
RATIOS = (0.0, 0.5)
BLOCK_TOKENS = 16
PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 222, 96
POOL_TOKENS = 16_384
RUNNING, STEPS = 56, 256
"""Requests in the batch of the page table alone, and decode steps."""


@dataclass(frozen=True)
class Setting:
    """One F at one uncached ratio, on the real server; medians over rounds."""

    layer_group: int
    ratio: float
    tokens_per_s: float
    relative: float
    """Tokens per second over those of F = 1 in the same round."""
    page_table_share: float
    """Of the time, spent on bookkeeping."""


@dataclass(frozen=True)
class TableAlone:
    """One F on the page table alone."""

    layer_group: int
    fragmentation: float
    step_us: float
    """Bookkeeping of one decode step of RUNNING requests: median."""
    units: int
    """In use, in the mean."""


@dataclass(frozen=True)
class LayerGroupReport:
    server: tuple[Setting, ...]
    table: tuple[TableAlone, ...]


def measure_servers(rounds: int, console: Console) -> tuple[Setting, ...]:
    """One server for each F, loaded in turn; the first round warms up."""
    rng = random.Random(0)
    speeds: dict[tuple[int, float], list[float]] = {(f, r): [] for r in RATIOS for f in GROUPS}
    shares: dict[tuple[int, float], list[float]] = {key: [] for key in speeds}
    with contextlib.ExitStack() as stack:
        servers = {f: stack.enter_context(_server(f)) for f in GROUPS}
        for turn in range(rounds + 1):
            prompts = [
                [rng.randrange(32, 127) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)
            ]
            order = list(speeds)[:: -1 if turn % 2 else 1]
            for group, ratio in order:
                speed, share = _loaded(servers[group], ratio, prompts)
                if turn:
                    speeds[group, ratio].append(speed)
                    shares[group, ratio].append(share)
            console.print(f"round {turn}/{rounds} done", style="dim")
    return tuple(
        Setting(
            layer_group=group,
            ratio=ratio,
            tokens_per_s=statistics.median(values),
            relative=statistics.median(
                a / b for a, b in zip(values, speeds[1, ratio], strict=True)
            ),
            page_table_share=statistics.median(shares[group, ratio]),
        )
        for (group, ratio), values in speeds.items()
    )


def _server(group: int) -> ServerProcess:
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fixed-ratio", "--disable-radix-cache",
                 "--ellm-layer-group", str(group), "--ellm-device-kv-tokens", str(POOL_TOKENS),
                 "--ellm-host-kv-tokens", str(POOL_TOKENS)]  # fmt: skip
    return ServerProcess(arguments, {"OMP_NUM_THREADS": "1"})


def _loaded(server: ServerProcess, ratio: float, prompts: list[list[int]]) -> tuple[float, float]:
    """Output tokens per second, and the bookkeeping's share of the time."""
    server.adjust(ellm_ratio=ratio)
    before = server.state()["page_table_ms_total"]
    began = time.perf_counter()
    outputs = generate(server.url, prompts, OUTPUT_TOKENS)
    seconds = time.perf_counter() - began
    spent = (server.state()["page_table_ms_total"] - before) / 1e3
    return sum(len(o.token_ids) for o in outputs) / seconds, spent / seconds


def _decode(table: PageTable, requests: Sequence[int]) -> None:
    """A token more for each of these."""
    begins = table.lengths_of(requests) % BLOCK_TOKENS == 0
    new = table.allocate(int(np.count_nonzero(begins)))
    table.place(new)
    last = np.array([table.blocks_of(r)[-1] for r in requests], np.int32)
    last[begins] = new
    table.extend_each(requests, last)


def measure_table(group: int, seed: int = 0) -> TableAlone:
    """Decode steps of a batch in which a request that ends is followed by a new one."""
    layers = MODELS["llama2-13b"].layers
    shape = PoolShape(layers, group, BLOCK_TOKENS)
    trace = paper_workload("sharegpt", 40 * RUNNING, seed)
    lengths = trace.prompt_tokens + trace.output_tokens
    batch = _midway(trace.prompt_tokens, lengths, np.random.default_rng(seed))
    blocks = int(sum(shape.blocks_for(int(n)) for n in np.sort(lengths)[-RUNNING:]))
    table = PageTable(shape, blocks, blocks * shape.num_groups)
    for request, (length, _) in enumerate(batch):
        _enter(table, request, length)
    waiting = iter(zip(trace.prompt_tokens.tolist(), lengths.tolist(), strict=True))
    held = wasted = 0
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        decoding = []
        for request, (length, last) in enumerate(batch):
            if length >= last:
                _leave(table, request)
                batch[request] = next(waiting)
                _enter(table, request, batch[request][0])
            else:
                decoding.append(request)
                batch[request] = (length + 1, last)
        _decode(table, decoding)
        times.append(time.perf_counter() - began)
        # A unit holds BLOCK_TOKENS tokens of F layers; of the last group, fewer layers.
        held += table.used_units * BLOCK_TOKENS * group
        wasted += table.used_units * BLOCK_TOKENS * group - layers * sum(n for n, _ in batch)
    return TableAlone(
        layer_group=group,
        fragmentation=wasted / held,
        step_us=statistics.median(times) * 1e6,
        units=round(held / STEPS / BLOCK_TOKENS / group),
    )


def _midway(prompt: IntArray, last: IntArray, rng: np.random.Generator) -> list[tuple[int, int]]:
    """(tokens now, tokens at its end) of requests as one finds them in a server that has run for
    long: long answers are under way more often, each at any point."""
    output = last - prompt
    chosen = rng.choice(len(output), RUNNING, p=output / output.sum())
    done = (rng.random(RUNNING) * output[chosen]).astype(np.int64)
    return list(zip((prompt[chosen] + done).tolist(), last[chosen].tolist(), strict=True))


def _enter(table: PageTable, request: int, length: int) -> None:
    blocks = table.allocate(table.shape.blocks_for(length))
    table.place(blocks)
    table.map(request, blocks, length)


def _leave(table: PageTable, request: int) -> None:
    blocks = table.blocks_of(request).copy()
    table.unmap(request)
    table.release(blocks)


@click.command()
@click.option(
    "--rounds",
    type=click.IntRange(0, 10_000),
    default=3,
    show_default=True,
    help="0: the page table alone.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def main(rounds: int, as_json: bool) -> None:
    """Measure throughput, bookkeeping and fragmentation for F of 1, 2, 4 and 8."""
    server = measure_servers(rounds, Console(stderr=True)) if rounds else ()
    report = LayerGroupReport(server, tuple(measure_table(group) for group in GROUPS))
    if as_json:
        click.echo(json.dumps(asdict(report)))
        return
    for s in report.server:
        click.echo(
            f"F = {s.layer_group}, r = {s.ratio}: {s.tokens_per_s:5.0f} tokens/s, {s.relative:.3f} "
            f"of F = 1; bookkeeping {s.page_table_share:.2%} of the time"
        )
    for t in report.table:
        fragmentation, share = TABLE_2.get(t.layer_group, (None, None))
        paper = "" if fragmentation is None else f" (paper {fragmentation:.2%}, {share:.2%})"
        click.echo(
            f"F = {t.layer_group}: fragmentation {t.fragmentation:.2%}, bookkeeping "
            f"{t.step_us:.0f} us per step{paper}"
        )


if __name__ == "__main__":
    main()
