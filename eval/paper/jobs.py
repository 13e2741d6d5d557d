"""Simulations as jobs: small, picklable, run on a pool of processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace

from ellm_sgl.client.traces import LONGEST_TOKENS, Trace
from ellm_sgl.client.workloads import paper_workload
from ellm_sgl.eval.paper.claims import HOST_BYTES, Case
from ellm_sgl.eval.simulator import Load, Machine, Settings, SimReport, preset, simulate

MAX_NEW_TOKENS = {"sharegpt": 4096, "l-eval": 16_384}
"""What requests say they may generate: servers do not know output lengths."""


@dataclass(frozen=True)
class LoadSpec:
    """A load to draw: the paper's arrivals and a data set's lengths."""

    data_set: str
    requests: int
    per_second: float | None = None
    """None: the paper's rate."""
    tpot_slo_s: float = float("inf")
    largest: int = LONGEST_TOKENS
    """Tokens that a request may have, prompt and output: larger ones are left out."""

    def draw(self) -> Load:
        trace = paper_workload(self.data_set, self.requests, 0, self.per_second)
        kept = trace.prompt_tokens + trace.output_tokens <= self.largest
        sent = Trace(trace.at_s[kept], trace.prompt_tokens[kept], trace.output_tokens[kept])
        return Load.of(sent, MAX_NEW_TOKENS[self.data_set], self.tpot_slo_s)


def paper_machine(name: str) -> Machine:
    """A preset, with the host memory that the paper gives it."""
    machine = preset(name)
    if name not in HOST_BYTES:
        return machine
    return machine.limited(None, machine.host_tokens_in(HOST_BYTES[name]))


@dataclass(frozen=True)
class Job:
    """One simulation. Those are equal that simulate the same, for whatever figure."""

    figure: str = field(compare=False)
    variant: str = field(compare=False)
    machine: str
    """A preset."""
    load: LoadSpec
    settings: Settings
    x: float = field(default=0.0, compare=False)
    """Where it stands on the figure's axis."""

    @property
    def case(self) -> Case:
        return self.machine, self.load.data_set

    def run(self) -> SimReport:
        return simulate(paper_machine(self.machine), self.settings, self.load.draw())


@dataclass(frozen=True)
class Done:
    """A job and its result."""

    job: Job
    sim: SimReport


def run_job(job: Job) -> Done:
    return Done(job, job.run())


def distinct(jobs: Sequence[Job]) -> list[Job]:
    """The first of each that are the same simulation."""
    return [job for number, job in enumerate(jobs) if job not in jobs[:number]]


def run_all(jobs: Sequence[Job], workers: int, tick: Callable[[Done], None]) -> list[Done]:
    """Run all jobs, those that are `distinct`; results in the jobs' order.

    Args:
        jobs: what to run.
        workers: processes.
        tick: called as each of the distinct ones is done.
    """
    run = distinct(jobs)
    found = _run(run, workers, tick)
    return [replace(found[run.index(job)], job=job) for job in jobs]


def _run(jobs: Sequence[Job], workers: int, tick: Callable[[Done], None]) -> list[Done]:
    if workers == 1:
        results = []
        for job in jobs:
            results.append(run_job(job))
            tick(results[-1])
        return results
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context)
    try:
        futures = [pool.submit(run_job, job) for job in jobs]
        for future in as_completed(futures):
            tick(future.result())
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
