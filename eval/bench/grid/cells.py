"""Machines and loads of the regret grid."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ellm_sgl.client.process import DEMO_MODEL
from ellm_sgl.client.traces import Trace
from ellm_sgl.client.workloads import LENGTHS, Lengths, LogNormal, drawn, gamma_arrivals
from ellm_sgl.config import ConfigError
from ellm_sgl.config.ranges import shown
from ellm_sgl.eval.bench.grid.capacity import Capacity, Kind, capacity, mean_tokens
from ellm_sgl.eval.simulator import Load, Machine, preset
from ellm_sgl.eval.simulator.machines import (
    Device,
    assemble,
    device_named,
    read_model,
    read_unquantised,
)

SHAREGPT = LENGTHS["sharegpt"]
SHORT = Lengths(LogNormal(96, 0.6, 512), LogNormal(300, 1.0, 1024))
CORE = Device(
    "one core", 4e9, 85e9, 38e9, 12e9,
    step_overhead_s=4e-3, row_overhead_s=3e-4, restore_overhead_s=2e-3, phase_change_s=2e-3,
    fetch_share=1.6, packing=0.5, overlap=0.0,
)  # fmt: skip
"""About one of a server's, as `ellm-sgl calibrate` finds it."""


class Cell(NamedTuple):
    """A machine and a load."""

    machine: str
    load: float
    """Requests per second over what the machine can sustain."""
    lengths: str
    slo: str
    memory: int
    """How many requests of mean lengths there is room for."""
    restore: str
    """What policies restore by."""
    host: float | None = None
    """Host memory, for policies and baselines: how many times the device's. None: all it takes."""


@cache
def _demo() -> Machine:
    model = read_model(DEMO_MODEL / "config.json")
    return assemble(model, CORE, 1, "demo")


MACHINES: Mapping[str, tuple[Callable[[], Machine], Lengths]] = {
    "llama2-13b": (lambda: preset("llama2-13b"), SHAREGPT),
    "llama2-70b": (lambda: preset("llama2-70b"), SHAREGPT),
    "llama3-8b": (lambda: preset("llama3-8b"), SHAREGPT),
    "demo": (_demo, SHORT),
}
"""The paper's, one whose weights take most of memory, and a small model on a processor."""
LOADS = (0.5, 1.0, 3.0)
MEMORY = 32, 16
SCARCE: tuple[tuple[str, float | None], ...] = (("recompute", 0), ("swap", None), ("both", 1))
"""Ways to restore with the smaller memory, and the host's."""
KINDS = ("known", "unknown", "long-tailed", "shifting")
SLOS: Mapping[str, float] = {"none": math.inf, "loose": 4.0, "tight": 1.3}
"""Over the time per token at the load that is sustained."""
TAIL_SIGMA = 1.6
SHIFT = 0.5, 1.5
"""Answers of the first half and of the second get so many times as long."""


def grid(machines: tuple[str, ...]) -> Iterator[Cell]:
    """Every load, kind of lengths and SLO; and with less memory, under overload, with each way
    to restore alone, and with both where the host holds as much as the device."""
    for machine in machines:
        for kind in KINDS:
            for slo in SLOS:
                for load in LOADS:
                    yield Cell(machine, load, kind, slo, MEMORY[0], "both")
                for restore, host in SCARCE:
                    yield Cell(machine, LOADS[-1], kind, slo, MEMORY[1], restore, host)


@cache
def named(machine: str) -> tuple[Machine, Lengths]:
    """One of `MACHINES`; or a model's configuration on a device, with the paper's lengths.

    Raises:
        ConfigError: it is neither, or cannot be read.
    """
    if machine in MACHINES:
        whole, lengths = MACHINES[machine]
        return whole(), lengths
    path, _, name = machine.rpartition(":")
    if not path:
        known = ", ".join(MACHINES)
        raise ConfigError(f"no machine {shown(machine)}: give {known}, or CONFIG.json:DEVICE")
    model, device = read_unquantised(Path(path)), device_named(name)
    return assemble(model, device, 1, machine), SHAREGPT


def machine_of(cell: Cell) -> Machine:
    whole, lengths = named(cell.machine)
    tokens = int(cell.memory * mean_tokens([_kind(lengths)]))
    return whole.limited(tokens, None if cell.host is None else int(cell.host * tokens))


def load_of(cell: Cell, count: int, seed: int) -> Load:
    """So many requests."""
    lengths, most = named(cell.machine)[1], _capacity(cell.machine, cell.memory)
    rng = np.random.default_rng(seed)
    if cell.lengths == "long-tailed":
        tail = dataclasses.replace(lengths.output, sigma=TAIL_SIGMA)
        lengths = dataclasses.replace(lengths, output=tail)
    trace = drawn(lengths, gamma_arrivals(count, cell.load * most.requests_per_s, rng), rng)
    longest = lengths.output.longest
    if cell.lengths == "shifting":
        times = np.where(np.arange(count) < count // 2, *SHIFT)
        output = np.clip((trace.output_tokens * times).astype(np.int64), 1, longest)
        trace = Trace(trace.at_s, trace.prompt_tokens, output)
    said = None if cell.lengths == "known" else longest
    return Load.of(trace, said, SLOS[cell.slo] * most.token_s)


@cache
def _capacity(machine: str, memory: int) -> Capacity:
    """Of requests of mean lengths that fill memory."""
    whole, lengths = named(machine)
    return capacity(whole, [_kind(lengths)], memory)


def _kind(lengths: Lengths) -> Kind:
    return Kind(lengths.prompt.mean, lengths.output.mean)
