"""Load and goodput, eLLM (`fcfs` and a host tier) beside stock SGLang with as much device memory.

Every rate is replayed in every round, each with a seed of its own; then the largest rate at which
90 % of the requests meet both SLOs is searched for with each seed. Figures are means over the seeds
with 95 % confidence intervals. About 10 minutes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import click

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.client.replay import Request
from ellm_sgl.client.summary import ATTAINMENT, goodput
from ellm_sgl.client.workloads import to_requests
from ellm_sgl.config.click_types import MILLISECONDS, PER_SECOND, SECONDS
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.loads import starter
from ellm_sgl.eval.bench.result import Interval, Mean, Result, Table, Taken
from ellm_sgl.eval.bench.scenario import Say, Scenario, Setting, option, rounds_option

DEVICE_TOKENS, HOST_TOKENS = 2816, 16_384
SERVERS = {
    "ellm": starter("--ellm-policy", "fcfs", "--ellm-layer-group", 1,
                    "--ellm-device-kv-tokens", DEVICE_TOKENS, "--ellm-host-kv-tokens", HOST_TOKENS),
    "stock": starter("--max-total-tokens", DEVICE_TOKENS),
}  # fmt: skip
PRECISION = 0.1
"""Of the goodput search: stop when the ends differ by this share."""
FURTHER, FURTHEST = 1.5, 5
"""Where the highest rate is not too much, the search goes on by this factor, at most 4 times."""


@dataclass(frozen=True)
class LoadSweep(Scenario):
    rounds: int = rounds_option(3, least=2)
    rates: tuple[float, ...] = option(
        (4.0, 6.0, 9.0, 13.0), PER_SECOND, "Requests per second; may be given several times.",
        flag="--rate", multiple=True,
    )  # fmt: skip
    requests: int = option(40, click.IntRange(4, 10**6))
    ttft_slo_s: float = option(1.0, SECONDS)
    tpot_slo_ms: float = option(20.0, MILLISECONDS)

    cell_heading, cell_form = "requests/s", "{:g}"
    columns = (Mean("within SLOs\n%", "slo_attainment", "{:.0f}", 100),
               Mean("TTFT s", "ttft_mean", "{:.2f}"), Mean("TPOT ms", "tpot_mean", "{:.1f}", 1e3),
               Mean("tokens/s", "tokens_per_s"))  # fmt: skip

    def starters(self) -> loads.Starters:
        return SERVERS

    def cells(self) -> list[float]:
        return sorted(set(self.rates))

    def load(self, cell: float, seed: int) -> list[Request]:
        trace = loads.draw_trace(self.requests, cell, seed)
        ttft_slo_ms = self.ttft_slo_s * 1e3
        return to_requests(trace, seed, ttft_slo_ms=ttft_slo_ms, tpot_slo_ms=self.tpot_slo_ms)

    def warm_up(self, name: str, server: ServerProcess) -> None:
        loads.replayed(server, self.load(max(self.rates), self.rounds))

    def measure(self, server: ServerProcess, setting: Setting, load: list[Request]) -> Taken:
        return Taken(loads.figures(loads.served(server, load, setting.name)))

    def finish(
        self, servers: Mapping[str, ServerProcess], result: Result, say: Say
    ) -> dict[str, Any]:
        settings = self.settings()
        found: dict[str, list[float]] = {setting.name: [] for setting in settings}
        for seed in range(self.rounds):
            for s in settings[:: -1 if seed % 2 else 1]:
                found[s.name].append(self._goodput(servers[s.server], s, seed, result, say))
        return {name: tuple(values) for name, values in found.items()}

    def _goodput(
        self, server: ServerProcess, setting: Setting, number: int, result: Result, say: Say
    ) -> float:
        """Of one server with one seed's requests, between two rates of the sweep or beyond."""
        known = {s.cell: s.figures["slo_attainment"] for s in result.samples
                 if (s.setting, s.round) == (setting.name, number)}  # fmt: skip

        def attainment(rate: float) -> float:
            if rate not in known:
                taken = self.measure(server, setting, self.load(rate, number))
                known[rate] = taken.figures["slo_attainment"]
                say(f"searching, seed {number}, {setting.name}: {rate:.2f}/s, {known[rate]:.0%}")
            return known[rate]

        rates = self.cells()
        low = high = rates[0]
        beyond = (rates[-1] * FURTHER**i for i in range(1, FURTHEST))
        for high in itertools.chain(rates, beyond):
            if attainment(high) < ATTAINMENT:
                break
            low = high
        return goodput(attainment, low, high, precision=PRECISION)

    def tables(self, result: Result) -> list[Table]:
        (sweep,) = super().tables(result)
        form, rest = Mean("", "", "{:.2f}"), [""] * (len(sweep.headings) - 3)
        rows = [("goodput", name, form.interval(found), *rest)
                for name, found in result.extra.items()]  # fmt: skip
        return [Table(sweep.title, sweep.headings, (*sweep.rows, *rows))]

    def document(self, result: Result) -> dict[str, Any]:
        found = {name: {"by_seed": values, **asdict(Interval.of(values))}
                 for name, values in result.extra.items()}  # fmt: skip
        return {**super().document(result), "goodput": found}

    def plot(self, result: Result, figure: Any) -> None:
        """Attainment, TTFT and throughput over the rate, with their intervals."""
        figure.set_size_inches(11, 3.4)
        panels = (("slo_attainment", "requests within both SLOs"), ("ttft_mean", "mean TTFT (s)"),
                  ("tokens_per_s", "output tokens/s"))  # fmt: skip
        for axes, (name, label) in zip(figure.subplots(1, 3), panels, strict=True):
            for server in SERVERS:
                found = [Interval.of(result.values(r, server, name)) for r in self.cells()]
                half = [i.high - i.mean for i in found]
                axes.errorbar(self.cells(), [i.mean for i in found], half, marker="o", capsize=3,
                              label=server)  # fmt: skip
            axes.set(xlabel="requests/s", ylabel=label, ylim=(0, None))
            axes.grid(alpha=0.3)
        figure.axes[0].axhline(ATTAINMENT, color="grey", linestyle=":")
        figure.axes[0].legend()
