"""slo-priority beside fcfs where urgent requests come among others, simulated: what the urgent
gain, and what it costs.

Urgent requests are short chats, with an SLO on the time per token or with their priority alone.
"Alone" is what they come to with nobody else on the machine: no policy can do better by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import click
import numpy as np

from ellm_sgl.client.summary import Summary
from ellm_sgl.client.workloads import LENGTHS, Lengths, LogNormal, drawn, gamma_arrivals
from ellm_sgl.config.click_types import FACTOR, FiniteRange
from ellm_sgl.eval.bench.grid.capacity import Kind, capacity, mean_tokens
from ellm_sgl.eval.bench.result import Column, Paired, Taken
from ellm_sgl.eval.bench.scenario import Scenario, Setting, option, rounds_option
from ellm_sgl.eval.simulator import Load, Machine, Settings, preset, simulate
from ellm_sgl.eval.simulator.machines import PRESETS
from ellm_sgl.eval.simulator.settings import device_model
from ellm_sgl.latency import StepWork

SHARE = FiniteRange(0, 1, low_open=True)
OURS = "slo-priority"
URGENT = 10
CHATS = Lengths(LogNormal(150, 0.8, 1024), LogNormal(200, 0.8, 1024))
"""Tokens of urgent requests."""
OTHERS: Mapping[str, Lengths] = {
    "answers": LENGTHS["sharegpt"],
    "documents": Lengths(LogNormal(3000, 0.6, 16_384), LogNormal(300, 0.8, 1024)),
}
"""What the others are long in."""
SLOS = "told", "none"


class Cell(NamedTuple):
    machine: str
    others: str
    memory: float
    """A share of the device's KV tokens."""
    slo: str
    """One of `SLOS`."""


class Mixture(NamedTuple):
    """A load, and what serves it."""

    machine: Machine
    requests: Load
    alone: Summary
    """Of the urgent requests, with nobody else."""


@dataclass(frozen=True)
class MixedLoad(Scenario):
    rounds: int = rounds_option(5)
    machines: tuple[str, ...] = option(
        ("llama2-13b", "llama3-8b"), click.Choice(tuple(PRESETS)), flag="--machine", multiple=True
    )
    others: tuple[str, ...] = option(tuple(OTHERS), click.Choice(tuple(OTHERS)), multiple=True)
    memory: tuple[float, ...] = option((1.0, 0.3), SHARE, "Of the device's.", multiple=True)
    requests: int = option(200, click.IntRange(10, 100_000), "Of each cell.")
    urgent_share: float = option(0.2, SHARE)
    load_factor: float = option(
        1.0, FACTOR, "Requests per second over what the machine can sustain.", flag="--load"
    )
    slo: float = option(2.0, FACTOR, "The urgent's, over the time per token of one alone.")

    cell_heading, cell_form = "machine, others, memory, urgent's SLO", "{}, {}, {:.0%}, {}"
    against: ClassVar = {OURS: "fcfs"}
    columns = (Column("tokens/s", "tokens_per_s"),
               Paired("of\nfcfs's", "tokens_per_s"),
               Column("urgent p99 TTFT s/\nalone", "urgent_ttft_p99", "{:.2f}",
                      more=("alone_ttft_p99",)),
               Paired("times\nbetter", "urgent_ttft_p99", inverse=True),
               Column("p99 TPOT ms/\nalone", "urgent_tpot_p99", "{:.1f}", 1e3,
                      more=("alone_tpot_p99",)),
               Paired("times\nbetter", "urgent_tpot_p99", inverse=True),
               Column("in\nSLO", "urgent_attainment", "{:.0%}"),
               Column("others' p99\nTTFT s", "others_ttft_p99", "{:.1f}"),
               Column("p99\nTPOT ms", "others_tpot_p99", "{:.1f}", 1e3))  # fmt: skip

    def starters(self) -> Mapping[str, Any]:
        return {"simulator": nullcontext}

    def settings(self) -> Sequence[Setting]:
        return [Setting(policy, "simulator") for policy in ("fcfs", OURS)]

    def cells(self) -> tuple[Cell, ...]:
        return tuple(
            Cell(machine, others, memory, slo)
            for machine in self.machines
            for others in self.others
            for memory in self.memory
            for slo in SLOS
        )

    def warm_up(self, name: str, server: Any) -> None:
        """There is nothing to warm."""

    def load(self, cell: Cell, seed: int) -> Mixture:
        """Both classes, with arrivals that vary as the paper's do."""
        whole, others = preset(cell.machine), OTHERS[cell.others]
        machine = whole.limited(int(cell.memory * whole.kv_tokens), None)
        kinds = [_kind(CHATS, self.urgent_share), _kind(others, 1 - self.urgent_share)]
        most = capacity(machine, kinds, machine.kv_tokens / mean_tokens(kinds))
        rng = np.random.default_rng(seed)
        rate = self.load_factor * most.requests_per_s
        at_s, is_urgent = gamma_arrivals(self.requests, rate, rng), np.zeros(self.requests, bool)
        is_urgent[rng.permutation(self.requests)[: self._urgent_count]] = True
        slo_s = self.slo * _token_alone_s(machine) if cell.slo == "told" else np.inf
        urgent, rest = (
            Load.of(drawn(lengths, at_s[own], rng), lengths.output.longest, slo, priority=rank)
            for lengths, own, slo, rank in (
                (CHATS, is_urgent, slo_s, URGENT),
                (others, ~is_urgent, np.inf, 0),
            )
        )
        alone = simulate(machine, Settings(), urgent).summary
        return Mixture(machine, Load.together(urgent, rest), alone)

    @property
    def _urgent_count(self) -> int:
        return min(max(round(self.urgent_share * self.requests), 1), self.requests - 1)

    def measure(self, server: Any, setting: Setting, load: Mixture) -> Taken:
        found = simulate(load.machine, Settings(policy=setting.name), load.requests)
        urgent, others = found.classes
        return Taken(
            {
                "tokens_per_s": found.summary.tokens_per_s,
                "steady_tokens_per_s": found.summary.steady_tokens_per_s,
                "urgent_ttft_p99": urgent.ttft.p99,
                "urgent_tpot_p99": urgent.tpot.p99,
                "urgent_attainment": urgent.tpot_attainment,
                "alone_ttft_p99": load.alone.ttft.p99,
                "alone_tpot_p99": load.alone.tpot.p99,
                "others_ttft_p99": others.ttft.p99,
                "others_tpot_p99": others.tpot.p99,
            }
        )


def _kind(lengths: Lengths, share: float) -> Kind:
    return Kind(lengths.prompt.mean, lengths.output.mean, share)


def _token_alone_s(machine: Machine) -> float:
    """Time per token of an urgent request of mean lengths with nobody else."""
    tokens = mean_tokens([_kind(CHATS, 1.0)])
    return float(device_model(machine, Settings()).step_seconds(StepWork(1, tokens)))
