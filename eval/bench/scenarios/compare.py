"""The same load on eLLM, its baseline modes and stock SGLang (`oversubscribed`).

Each round has processes of its own: two of the same program differ, by up to a tenth of their
speed, for as long as they live. Ample memory is eLLM's own server with all the memory it wants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.client.replay import Outcome, Request
from ellm_sgl.client.summary import summarize
from ellm_sgl.config import ConfigError
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.columns import Column
from ellm_sgl.eval.bench.loads import Starters
from ellm_sgl.eval.bench.oversubscribed import AMPLE, ELLM, STOCK, Cell, Oversubscribed
from ellm_sgl.eval.bench.result import SAME_OUTPUT, Result, Taken
from ellm_sgl.eval.bench.scenario import Say, Setting

LONGEST_WINDOW_S, WINDOWS = 1.0, 20
"""Of the plot: at least so many windows over a cell's longest run."""
COUNTERS = ("pauses", "recomputed_tokens", "fetched_units", "swap_stall_ms")
FIGURES = ("slo_attainment", "longest_pause_s", "preempted", *COUNTERS[1:], SAME_OUTPUT)
"""Of a run in the JSON document, beside its `summary`."""


@dataclass(frozen=True)
class Compare(Oversubscribed):
    """The same load on eLLM, its baseline modes and stock SGLang, in turn. About 15 minutes.

    Arrivals, lengths and prompts are the same for all; the servers share the machine, but only
    one is under load at a time; each round starts them anew. Ample memory is eLLM's own server
    with all the memory it wants.
    """

    anew = True
    reference = AMPLE
    table_per_cell = True
    columns = (
        Column("output\ntokens/s", "tokens_per_s"),
        Column("TTFT s\nmean/p50/p99", "ttft_mean", "{:.1f}", more=("ttft_p50", "ttft_p99")),
        Column("TPOT ms\nmean/p50/p99", "tpot_mean", scale=1e3, more=("tpot_p50", "tpot_p99")),
        Column("in\nSLO", "slo_attainment", "{:.0%}"),
        Column("longest\npause s", "longest_pause_s", "{:.2f}"),
        Column("pre-\nempted", "preempted"),
        Column("same\noutput", SAME_OUTPUT, "{:.0%}"),
    )

    def check(self) -> None:
        every = dataclasses.replace(self, servers=()).contenders()
        if unknown := set(self.servers).difference(known := [c.name for c in every]):
            raise ConfigError(
                f"--servers {','.join(sorted(unknown))}: give some of {', '.join(known)}"
            )
        for cell in self.cells():
            self.load(cell, 0)

    def starters(self) -> Starters:
        return {c.name: loads.starter(model=c.arguments) for c in self.contenders()}

    def settings(self) -> list[Setting]:
        """Ample memory first; of eLLM's, the value is the device's KV tokens."""
        names = [c.name for c in self.contenders()]
        ours = {AMPLE: self.ample_tokens, ELLM: self.device_tokens} if ELLM in names else {}
        return [
            *(Setting(name, ELLM, tokens) for name, tokens in ours.items()),
            *(Setting(name, name) for name in names if name != ELLM),
        ]

    def warm_up(self, name: str, server: ServerProcess) -> None:
        loads.short_replay(server, self.load(self.cells()[0], 10_000))

    def measure(self, server: ServerProcess, setting: Setting, load: list[Request]) -> Taken:
        if setting.value is not None:
            server.adjust(ellm_device_kv_tokens=setting.value)
        stock, before = setting.server.startswith(STOCK), loads.retracted(server)
        begun = {} if stock else loads.totals(server)
        done = loads.replayed(server, load)
        counted = dict.fromkeys(COUNTERS, 0.0) if stock else loads.since(server, begun)
        return self.taken(done, counted | {"retracted": loads.retracted(server) - before})

    def taken(self, outcomes: Sequence[Outcome], counted: Mapping[str, float]) -> Taken:
        """One run's figures.

        Args:
            outcomes: of all requests.
            counted: what `COUNTERS`, and SGLang's retractions, have grown by.
        """
        gaps = [float(np.diff(o.token_s).max()) for o in outcomes if len(o.token_s) > 1]
        times = np.sort(np.concatenate([o.token_s for o in outcomes]))
        in_time = [
            o.complete and o.ttft_s <= self.ttft_slo_s
            and (len(o.token_s) < 2 or o.tpot_s * 1e3 <= self.tpot_slo_ms)
            for o in outcomes
        ]  # fmt: skip
        found = loads.figures(outcomes) | {
            "slo_attainment": float(np.mean(in_time)),
            "longest_pause_s": max(gaps, default=0.0),
            "preempted": counted["retracted"] + counted["pauses"],
            **{name: counted[name] for name in COUNTERS[1:]},
        }
        detail = {"summary": asdict(summarize(outcomes)), "tokens_at_s": times.tolist()}
        return Taken(found, [o.output_ids for o in outcomes], detail)

    def finish(
        self, servers: Mapping[str, ServerProcess], result: Result, say: Say
    ) -> dict[str, str]:
        """The attention backends of stock SGLang: a comparison of different ones says nothing."""
        return {
            name: s.attention_backend() for name, s in servers.items() if name.startswith(STOCK)
        }

    def ratios(self, result: Result) -> list[dict[str, Any]]:
        """eLLM in each cell beside the whole-request baseline with the highest median throughput
        and beside ample memory: medians over rounds of the ratios within each round. Empty where
        eLLM, or every baseline, was left out."""
        baselines = self._baselines(result)
        return [self._ratios_of(result, cell, baselines) for cell in self.cells()
                if ELLM in result.settings and baselines]  # fmt: skip

    def _baselines(self, result: Result) -> list[str]:
        return [c.name for c in self.contenders() if c.baseline and c.name in result.settings]

    def _ratios_of(self, result: Result, cell: Cell, baselines: Sequence[str]) -> dict[str, Any]:
        best = max(baselines, key=lambda name: result.median(cell, name, "tokens_per_s"))
        of_best = result.ratio(cell, ELLM, best, "tokens_per_s")
        return {
            "cell": asdict(cell),
            "best": best,
            "of_best": of_best.median,
            "of_best_interval": of_best.to_json()["interval"],
            "of_ample": result.ratio(cell, ELLM, AMPLE, "tokens_per_s").median,
            "tpot_p99_of_best": result.ratio(cell, ELLM, best, "tpot_p99").median,
            "ttft_mean_of_best": result.ratio(cell, ELLM, best, "ttft_mean").median,
        }

    def notes(self, result: Result) -> list[str]:
        return [
            f"{Cell(**r['cell']).title}: eLLM {r['of_best']:.2f} x the tokens/s of {r['best']}, "
            f"the best baseline (p99 TPOT {r['tpot_p99_of_best']:.2f} x, mean TTFT "
            f"{r['ttft_mean_of_best']:.2f} x), {r['of_ample']:.2f} x ample memory"
            for r in self.ratios(result)
        ]

    def document(self, result: Result) -> dict[str, Any]:
        """Without the arrival of every token."""
        baselines = self._baselines(result)
        runs = [
            {"server": s.setting, "baseline": s.setting in baselines, "cell": asdict(s.cell),
             "round": s.round, "summary": s.detail["summary"],
             **{name: s.figures[name] for name in FIGURES}}
            for s in result.samples
        ]  # fmt: skip
        return {
            "scenario": asdict(self),
            "device_tokens": self.device_tokens,
            "attention_backends": dict(result.extra),
            "runs": runs,
            "ratios": self.ratios(result),
        }

    def plot(self, result: Result, figure: Any) -> None:
        """The first round's output tokens per second over time, one panel per cell."""
        panels = figure.subplots(len(self.cells()), 1, squeeze=False)[:, 0]
        names = [s.name for s in self.settings() if s.name in result.settings]
        for panel, cell in zip(panels, self.cells(), strict=True):
            series = {n: result.of(cell, n)[0].detail["tokens_at_s"] for n in names}
            longest_s = max(max(times, default=0.0) for times in series.values())
            window_s = min(LONGEST_WINDOW_S, longest_s / WINDOWS) or LONGEST_WINDOW_S
            for name, times in series.items():
                edges = np.arange(0.0, max(times, default=0.0) + 2 * window_s, window_s)
                counts, _ = np.histogram(times, edges)
                panel.step(edges[:-1], counts / window_s, where="post", label=name)
            panel.set(title=cell.title, ylabel="output tokens/s", ylim=(0, None))
        panels[-1].set_xlabel("seconds from the first request")
        panels[0].legend(ncols=4, fontsize=8)
