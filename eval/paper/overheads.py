"""Fig. 16 and Table 2's overhead, timed on this machine: decisions, the page table's look-up, and
its bookkeeping of a decode step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ellm_sgl.client.traces import IntArray
from ellm_sgl.client.workloads import LENGTHS
from ellm_sgl.eval.paper.claims import BATCH_8, CASES, CHAT_70B, MAX_RUNNING, RUNNING, Case
from ellm_sgl.eval.paper.jobs import paper_machine
from ellm_sgl.eval.paper.plan import AS_PRINTED, tpot_slo_s
from ellm_sgl.eval.simulator import Machine
from ellm_sgl.eval.simulator.machines import DEVICES, MODELS, assemble
from ellm_sgl.memory import PageTable, PoolShape
from ellm_sgl.policies import SystemState
from ellm_sgl.policies.testing.bench import PolicyBench, bench
from ellm_sgl.policies.testing.generate import make_state, requests

SOLVERS: Mapping[str, Mapping[str, object]] = {
    "fcfs": {},
    "fcfs, SLSQP": AS_PRINTED | {"solver": "slsqp"},
}
"""The default, and the paper's way to solve: options of `fcfs`."""
CALLS = 100
LOOKUPS = 20_000
STEPS, BLOCK_TOKENS = 64, 16
STAGED_LAYERS = 8
"""Of what a step restores: two layer groups of 4."""


@dataclass(frozen=True)
class Decisions:
    """Decision times of one load's busy server."""

    name: str
    solver: str
    """A key of `SOLVERS`."""
    running: int
    waiting: int
    bench: PolicyBench


@dataclass(frozen=True)
class Lookup:
    """Times of one look-up in the page table: the unit of a request's token in a layer."""

    mean_us: float
    p90_us: float
    most_us: float


@dataclass(frozen=True)
class Overheads:
    """All that is timed here."""

    decisions: list[Decisions]
    lookup: Lookup
    table_seconds: dict[int, float]
    """By F: bookkeeping of one decode step of 70B."""


def measure(groups: tuple[int, ...]) -> Overheads:
    """Takes some ten seconds. The machine should be quiet."""
    eight = assemble(MODELS["llama2-70b"], DEVICES["a100-80g"], 8, "8 devices", nvlink=False)
    loads = [(", ".join(c), paper_machine(c[0]), c, MAX_RUNNING) for c in CASES]
    loads.append((f"{CHAT_70B[0]}, 8 devices, {CHAT_70B[1]}", eight, CHAT_70B, BATCH_8))
    layers = MODELS["llama2-70b"].layers
    return Overheads(
        [_decisions(*load, solver) for load in loads for solver in SOLVERS],
        lookup_times(layers),
        {group: table_seconds(layers, group) for group in groups},
    )


def _decisions(name: str, machine: Machine, case: Case, bound: int, solver: str) -> Decisions:
    states: list[SystemState] = []

    def busy(rng: np.random.Generator, room: float) -> SystemState:
        states.append(busy_state(machine, case, bound, rng, room))
        return states[-1]

    timed = bench("fcfs", SOLVERS[solver], CALLS, busy)
    return Decisions(name, solver, len(states[0].running), len(states[0].waiting), timed)


def busy_state(
    machine: Machine, case: Case, bound: int, rng: np.random.Generator, room: float
) -> SystemState:
    """A server of this load: what runs is half way on average and would fill 1 / `room` of memory,
    or is as many as may run; as many wait as may run.

    Args:
        bound: requests that may run.
        room: memory over what runs, where the bound allows more.
    """
    prompts, outputs = LENGTHS[case[1]].draw(2 * bound, rng)
    now = prompts + (rng.random(2 * bound) * outputs).astype(np.int64)
    held = (now // BLOCK_TOKENS + 1) * BLOCK_TOKENS
    fitting = int(np.searchsorted(np.cumsum(held[:bound]), machine.kv_tokens / room))
    count = min(max(fitting, 1), bound)
    short = max(0.0, 1.0 - machine.kv_tokens / held[:count].sum())
    blocks = np.ceil(short * held[:count] / BLOCK_TOKENS).astype(np.int64)
    uncached = np.minimum(blocks, now[:count] // BLOCK_TOKENS) * BLOCK_TOKENS
    slo_s = tpot_slo_s(case)
    return make_state(
        requests(
            now[:count], prompt_tokens=prompts[:count], uncached_tokens=uncached,
            request_id=np.arange(count), tpot_slo_s=slo_s, max_new_tokens=outputs[:count],
        ),
        requests(
            prompts[bound:], request_id=np.arange(bound, 2 * bound), tpot_slo_s=slo_s,
            max_new_tokens=outputs[bound:], waited_s=10.0,
        ),
        device_tokens=max(machine.kv_tokens, int((held[:count] - uncached).sum())),
        host_tokens=machine.host_tokens or 0,
        block_tokens=BLOCK_TOKENS,
        max_running=bound,
        max_restored_tokens=int(now[:count].sum()),
        staging_overhead=STAGED_LAYERS / machine.shape.layers,
        model=machine.shape,
        hardware=machine.profile,
        tpot_slo_s=slo_s,
    )  # fmt: skip


def lookup_times(layers: int, lookups: int = LOOKUPS) -> Lookup:
    """Time look-ups of any request's any token in any layer, one by one."""
    lengths = np.full(MAX_RUNNING, 1024)
    table = _filled(PoolShape(layers, 4, BLOCK_TOKENS), lengths)
    rng = np.random.default_rng(0)
    asked = zip(
        rng.integers(0, len(lengths), lookups).tolist(),
        rng.integers(0, int(lengths.min()), lookups).tolist(),
        rng.integers(0, layers, lookups).tolist(),
        strict=True,
    )
    times = np.zeros(lookups)
    for place, (request, token, layer) in enumerate(asked):
        begin = time.perf_counter()
        block = table.blocks_of(request)[token // BLOCK_TOKENS]
        unit = table.units[block, table.shape.group_of(layer)]
        times[place] = time.perf_counter() - begin
        assert unit >= 0
    micro = times * 1e6
    return Lookup(float(micro.mean()), float(np.percentile(micro, 90)), float(micro.max()))


def table_seconds(layers: int, group: int) -> float:
    """Time per decode step to extend every request by one token, place new blocks, and look up
    one unit per request and layer group; median of many steps."""
    tokens = int(sum((LENGTHS["sharegpt"].prompt.mean, LENGTHS["sharegpt"].output.mean / 2)))
    count = round(RUNNING["ellm"])
    table = _filled(PoolShape(layers, group, BLOCK_TOKENS), np.full(count, tokens), STEPS)
    last = np.array([table.blocks_of(r)[-1] for r in range(count)], np.int32)
    times = []
    for step in range(STEPS):
        begin = time.perf_counter()
        if (tokens + step) % BLOCK_TOKENS == 0:
            last = table.allocate(count)
            table.place(last)
        table.extend_each(range(count), last)
        # Every unit's address, as a step reads it.
        table.units[np.concatenate([table.blocks_of(r) for r in range(count)])].sum()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def _filled(shape: PoolShape, lengths: IntArray, further: int = 0) -> PageTable:
    """A table of requests of these tokens, all cached, with room for so many more of each."""
    blocks = sum(shape.blocks_for(n + further) for n in lengths.tolist())
    table = PageTable(shape, blocks, blocks * shape.num_groups)
    for request, length in enumerate(lengths.tolist()):
        own = table.allocate(shape.blocks_for(length))
        table.place(own)
        table.map(request, own, length)
    return table
