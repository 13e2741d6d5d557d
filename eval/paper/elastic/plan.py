"""Which simulations redo Figs. 9 to 11 of the paper on elastic memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ellm_sgl.client.traces import FloatArray, IntArray, Trace
from ellm_sgl.client.workloads import LENGTHS, poisson_arrivals
from ellm_sgl.eval.paper.bounds import mean_tokens, served
from ellm_sgl.eval.paper.elastic.claims import FIXED, OFFLINE, ONE, ONLINE, PAIR, SLO_SCALE, SMALL
from ellm_sgl.eval.paper.elastic.machines import (
    SHARING,
    kv_tokens,
    machine,
    most_rows,
    row_tokens,
)
from ellm_sgl.eval.paper.jobs import Job, LoadSpec
from ellm_sgl.eval.simulator import Load, Machine, Settings, SimReport, Simulation, simulate
from ellm_sgl.eval.simulator.report import sum_up
from ellm_sgl.eval.simulator.settings import device_model
from ellm_sgl.latency import StepWork

SYSTEMS = ("vllm", "vllm-cp", *SHARING)
"""vLLM, with chunked prefill (CP), and eLLM with parts of it."""
APART = "distserve"
RELATIVE_LOADS = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Over what vLLM's share of memory serves; the paper's rates are in its plots alone."""
FEWER = ("vllm", "vllm-cp", "ellm"), (1.0, 2.0, 3.0)
"""Systems and loads of ShareGPT, whose requests are too small to fill memory."""
REQUESTS = {"2k-2k": 200, "32k-2k": 40, "sharegpt": 600, "1k-512": 400}
OFFLINE_REQUESTS = {"2k-2k": 240, "32k-2k": 36, "128k-8k": 6}
TWICE = 1.5
"""The relative load that is also run with twice the requests, on 2k-2k."""
MAX_RUNNING = 256
"""vLLM's default of --max-num-seqs."""
STRIDE = 64


@dataclass(frozen=True)
class ElasticLoad(LoadSpec):
    """Fixed lengths, or ShareGPT's; Poisson arrivals, or all at once (no rate)."""

    ttft_slo_s: float = float("inf")

    def draw(self) -> Load:
        rng = np.random.default_rng(0)
        prompts, outputs = self._lengths(rng)
        at_s: FloatArray = np.zeros(self.requests)
        if self.per_second is not None:
            at_s = poisson_arrivals(self.requests, self.per_second, rng)
        trace = Trace(at_s, prompts, outputs)
        return Load.of(trace, None, self.tpot_slo_s, self.ttft_slo_s)

    def _lengths(self, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        if self.data_set not in FIXED:
            return LENGTHS[self.data_set].draw(self.requests, rng)
        prompt, output = FIXED[self.data_set]
        return np.full(self.requests, prompt), np.full(self.requests, output)


@dataclass(frozen=True)
class ElasticJob(Job):
    """A system on a machine of the paper on elastic memory."""

    kv_tokens: int = field(default=0)

    def run(self) -> SimReport:
        found, load = machine(self.machine).limited(self.kv_tokens, None), self.load.draw()
        if self.settings.prefilled:
            return _apart(found, self.settings, load)
        return simulate(found, self.settings, load)


def _apart(one: Machine, settings: Settings, load: Load) -> SimReport:
    """A prefilling instance, and a decoding one of the same kind that fetches what it computed.
    KV that waits to be fetched takes no room."""
    first = np.ones(len(load), np.int64)
    prompts = dataclasses.replace(load, output_tokens=first, max_new_tokens=first)
    own = dataclasses.replace(settings, mode="recompute", prefilled=False)
    prefilling = Simulation(one, own, prompts)
    prefilling.run()
    handed_on = dataclasses.replace(load, at_s=prefilling.progress.first_s)
    decoding = Simulation(one, settings, handed_on)
    decoding.run()
    decoding.load = load  # first tokens are as late as they were asked for
    return sum_up(decoding)


def lengths(data_set: str) -> tuple[float, float]:
    """Mean prompt and output tokens."""
    return FIXED[data_set] if data_set in FIXED else mean_tokens(data_set)


def slos(name: str, data_set: str, latency_model: str) -> tuple[float, float]:
    """TTFT and TPOT SLO, in seconds: of a request alone, half way through its output, scaled."""
    prompt, output = lengths(data_set)
    device = device_model(machine(name), Settings(latency_model=latency_model))
    pairs = prompt * (prompt + 1) / 2
    ttft = device.step_seconds(StepWork(0, 0, prefill_rows=prompt, prefill_pairs=pairs))
    tpot = device.step_seconds(StepWork(1, prompt + output / 2))
    return SLO_SCALE * float(ttft), SLO_SCALE * float(tpot)


def unit_rate(name: str, data_set: str, latency_model: str) -> float:
    """Requests per second at relative load 1: what vLLM's share of memory serves."""
    own = machine(name).limited(kv_tokens(name, "vllm"), None)
    settings = Settings(latency_model=latency_model, max_running=MAX_RUNNING)
    return served(own, settings, *lengths(data_set))


def plan(scale: float, latency_model: str) -> list[Job]:
    """All jobs; arguments as of the EuroSys paper's `plan`."""
    return [*_online(scale, latency_model), *_offline(scale, latency_model)]


def _online(scale: float, latency_model: str) -> Iterator[Job]:
    """Figs. 9 and 10."""
    for data_set in ONLINE:
        systems, loads = (SYSTEMS, RELATIVE_LOADS) if data_set in FIXED else FEWER
        for system in systems:
            for x in loads:
                yield _job("elastic 9", system, SMALL, data_set, scale, latency_model, x)
    for system in ("vllm", "ellm"):
        yield _job("elastic 9, twice", system, SMALL, ONLINE[0], 2 * scale, latency_model, TWICE)
    for system in ("vllm", "vllm-cp", "ellm", APART):
        for x in RELATIVE_LOADS:
            yield _job("elastic 10", system, PAIR, "1k-512", scale, latency_model, x)


def _offline(scale: float, latency_model: str) -> Iterator[Job]:
    """Fig. 11."""
    for data_set in OFFLINE:
        for system in ("vllm", "vllm-cp", "intra", "host"):
            yield _job("elastic 11", system, SMALL, data_set, scale, latency_model, None)


def _job(
    figure: str,
    system: str,
    name: str,
    data_set: str,
    scale: float,
    latency_model: str,
    x: float | None,
) -> Job:
    """Args: x: the relative load; None: all requests at once, no SLOs."""
    ttft, tpot = slos(name, data_set, latency_model)
    rate = None if x is None else x * unit_rate(name, data_set, latency_model)
    count = (OFFLINE_REQUESTS if x is None else REQUESTS)[data_set]
    no_slo = float("inf")
    load = ElasticLoad(
        data_set,
        max(round(count * scale), 2),
        rate,
        no_slo if x is None else tpot,
        ttft_slo_s=no_slo if x is None else ttft,
    )
    one = ONE if system == APART else name
    settings = Settings(
        admission="vllm",
        latency_model=latency_model,
        max_running=MAX_RUNNING,
        stride=STRIDE,
        tpot_slo_s=load.tpot_slo_s,
        chunk_tokens=most_rows(one, system),
        **_of(system, one),
    )
    return ElasticJob(figure, system, one, load, settings, x or 0.0, kv_tokens(one, system))


def _of(system: str, name: str) -> dict[str, Any]:
    """Settings of a system."""
    if system == APART:
        return {"mode": "swap", "prefilled": True}
    mode = "swap" if system in ("host", "ellm") else "recompute"
    found: dict[str, Any] = {"mode": mode}
    if system == "vllm-cp":
        found["mixed_chunks"] = True
    if system in SHARING:
        found["activation_tokens"] = row_tokens(machine(name))
        found["host_scaling"] = system == "ellm"
    return found
