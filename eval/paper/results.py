"""Everything that the report is made of: results of all jobs, by figure, the comparisons that it
makes of them, and what is measured on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ellm_sgl.eval.paper.bounds import TOKENS, Bounds, bounds
from ellm_sgl.eval.paper.jobs import Done, distinct, run_all
from ellm_sgl.eval.paper.measured import Measured
from ellm_sgl.eval.paper.plan import GROUPS, SMALL, plan
from ellm_sgl.eval.simulator import MODES, Settings, preset
from ellm_sgl.eval.simulator.machines import PRESETS
from ellm_sgl.memory import PageTable, PoolShape
from ellm_sgl.policies.testing.bench import PolicyBench, bench

BASELINES = MODES[1:]
BATCH, STEPS, BLOCK_TOKENS = 56, 64, 16
"""Requests of `TOKENS` tokens whose bookkeeping is timed, decode steps, and tokens of a block."""


@dataclass(frozen=True)
class Results:
    """Everything that the report is made of."""

    done: Sequence[Done]
    bounds: Sequence[Bounds]
    decisions: dict[str, PolicyBench]
    """Times of the policies' answers, on this machine."""
    table_seconds: dict[int, float]
    """By F: the page table's bookkeeping of one decode step, on this machine."""
    latency_model: str
    scale: float
    measured: Measured
    """What real servers did."""

    def of(self, figure: str) -> list[Done]:
        return [d for d in self.done if d.job.figure == figure]

    def variants(self, figure: str) -> dict[str, list[Done]]:
        """Results of a figure by variant, each along the figure's axis; of several at one place,
        the one with the most requests within their SLOs, then with the most tokens per second."""
        found: dict[str, dict[float, Done]] = {}
        for done in self.of(figure):
            group = found.setdefault(done.job.variant, {})
            if done.job.x not in group or _merit(done) > _merit(group[done.job.x]):
                group[done.job.x] = done
        return {name: [group[x] for x in sorted(group)] for name, group in found.items()}

    @property
    def goodputs(self) -> dict[str, float]:
        """Of each mode, at the better of its settings, in requests per second."""
        found: dict[str, float] = {}
        for done in self.of("15"):
            found[done.job.variant] = max(found.get(done.job.variant, 0.0), done.goodput)
        return found

    def comparisons(self) -> Iterator[Comparison]:
        """eLLM beside the best baseline, per load of Figs. 10 and 12."""
        groups: dict[str, list[Done]] = {}
        for done in self.of("10"):
            load = f"{done.job.machine}, {done.job.load.data_set}"
            groups.setdefault(load, []).append(done)
        for load, runs in groups.items():
            yield Comparison(load, runs)


@dataclass(frozen=True)
class Comparison:
    """One load, all modes, each at two settings of SGLang's conservativeness."""

    load: str
    """Machine and data set."""
    runs: Sequence[Done]

    def best(self, mode: str) -> Done:
        """The better of a mode's two settings, by tokens per second."""
        return max(
            (d for d in self.runs if d.job.variant == mode),
            key=lambda d: d.sim.summary.tokens_per_s,
        )

    @property
    def gains(self) -> dict[str, float]:
        """Tokens per second of eLLM over each baseline, each at its better setting."""
        ours = self.best("ellm").sim.summary.tokens_per_s
        return {m: ours / self.best(m).sim.summary.tokens_per_s for m in BASELINES}

    @property
    def ttft_gains(self) -> dict[str, float]:
        """TTFT of each baseline over eLLM's."""
        ours = self.best("ellm").sim.summary.ttft.mean
        return {m: self.best(m).sim.summary.ttft.mean / ours for m in BASELINES}

    @property
    def refused(self) -> int:
        """Requests that the baselines cannot take at all."""
        return max(d.sim.refused for d in self.runs)


def _merit(done: Done) -> tuple[float, float]:
    summary = done.sim.summary
    return summary.slo_attainment, summary.tokens_per_s


def evaluate(
    scale: float,
    latency_model: str,
    workers: int,
    measured: Measured,
    begin: Callable[[int], None],
    tick: Callable[[Done], None],
) -> Results:
    """Simulate and measure all that the report shows.

    Args:
        scale: of the number of requests; 1 is the full evaluation.
        latency_model: "roofline" or "paper".
        workers: processes.
        measured: what real servers did.
        begin: called with the number of simulations.
        tick: called as each is done.
    """
    # First, while this machine is quiet.
    timed = {name: bench(name, {}, calls=100) for name in ("fcfs", "slo-priority")}
    tables = {group: _table_seconds(preset(SMALL).shape.layers, group) for group in GROUPS}
    jobs = plan(scale, latency_model)
    begin(len(distinct(jobs)))
    done = run_all(jobs, workers, tick)
    settings = Settings(latency_model=latency_model)
    limits = [bounds(preset(name), settings) for name in PRESETS]
    return Results(done, limits, timed, tables, latency_model, scale, measured)


def _table_seconds(layers: int, group: int) -> float:
    """Time per decode step to extend every request by one token, place new blocks, and look up
    one unit per request and layer group; median of many steps."""
    shape = PoolShape(layers, group, BLOCK_TOKENS)
    blocks = BATCH * shape.blocks_for(TOKENS + STEPS)
    table = PageTable(shape, blocks, blocks * shape.num_groups)
    requests = range(BATCH)
    for request in requests:
        own = table.allocate(shape.blocks_for(TOKENS))
        table.place(own)
        table.map(request, own, TOKENS)
    last = np.array([table.blocks_of(r)[-1] for r in requests], np.int32)
    times = []
    for step in range(STEPS):
        begin = time.perf_counter()
        if (TOKENS + step) % BLOCK_TOKENS == 0:
            last = table.allocate(BATCH)
            table.place(last)
        table.extend_each(requests, last)
        # Every unit's address, as a step reads it.
        table.units[np.concatenate([table.blocks_of(r) for r in requests])].sum()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))
