"""The same load on eLLM, its baseline modes and stock SGLang, in turn. About half an hour.

Arrivals, lengths and prompts are the same for all; the servers share the machine, but only one is
under load at a time. Each round starts them anew: two processes of the same program differ, by up
to a tenth of their speed, for as long as they live. So does each kind of output lengths: eLLM
learns lengths from the answers it has given. Ample memory is eLLM's own server with all the
memory it wants. eLLM is held against the baseline with the most tokens per second within the SLO.

The loads are for the demo model: oversubscribed, 24 requests whose KV is 1.5 and 3 times what the
device holds; burst, 40 requests at once that answer 600 tokens on average and may answer 3,000;
steady, 48 requests, eight a second, 300 tokens on average of 1,024. In the last two nobody knows
how long answers are, and the device holds 5,000 tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.client.replay import Outcome, Request
from ellm_sgl.client.summary import summarize
from ellm_sgl.config import ConfigError
from ellm_sgl.config.click_types import LAYERS, MILLISECONDS, SEED, FiniteRange
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.comparison.contenders import ELLM, STOCK, Contender, contenders
from ellm_sgl.eval.bench.comparison.load import LOADS, OUTPUTS, Cell, Load
from ellm_sgl.eval.bench.comparison.report import (
    AMPLE,
    SLO_TOKENS,
    TOKENS,
    baselines,
    best_table,
    draw,
    ratios,
)
from ellm_sgl.eval.bench.result import SAME_OUTPUT, Column, Result, Table, Taken
from ellm_sgl.eval.bench.scenario import Say, Scenario, Setting, option, rounds_option

COUNTERS = ("recomputed_tokens", "fetched_units", "swap_stall_ms")
FIGURES = ("longest_pause_s", "preempted", *COUNTERS)
"""Of a run in the JSON document, beside its `summary`."""


@dataclass(frozen=True)
class Compare(Scenario):
    rounds: int = rounds_option(2)
    preset: str = option(
        "oversubscribed",
        click.Choice([*LOADS]),
        "The next five options change its figures.",
        flag="--load",
    )
    requests: int | None = option(None, click.IntRange(4, 10**6), "At the largest factor.")
    factors: tuple[float, ...] = option(
        (),
        FiniteRange(1, 1000),
        "Multiple of device memory; may be given several times.",
        flag="--factor",
        multiple=True,
    )
    outputs: tuple[str, ...] = option(
        (),
        click.Choice(OUTPUTS),
        "Whether servers may rely on output lengths, or clients stop early; likewise.",
        multiple=True,
    )
    tpot_slo_ms: float | None = option(
        None, MILLISECONDS, "Of every request; eLLM's servers are told.  [burst, steady: 20]"
    )
    trace: str | None = option(
        None,
        about="Arrivals and lengths from an Azure-format CSV file, scaled to this machine.",
        metavar="FILE",
    )
    seed: int = option(0, SEED, "Of the first round's load; each round has the next.")
    conservativeness: tuple[float, ...] = option(
        (0.0, 0.3, 1.0),
        FiniteRange(0, 10**6),
        "SGLang's --schedule-conservativeness; several times. 0: vLLM's admission.",
        multiple=True,
    )
    servers: tuple[str, ...] = option(
        (),
        about="Only these, for instance ellm,recompute,swap.",
        metavar="NAME,...",
        text="",
        callback=lambda _, __, text: tuple(text.split(",")) if text else (),
        show_default=False,
    )
    """Names of those to run; empty: all."""
    model_path: str | None = option(
        None, about="A local model.  [default: the demo model]", metavar="DIR"
    )
    policy: str = option("fcfs", about="eLLM's.")
    layer_group: int = option(1, LAYERS)

    anew = True
    reference = AMPLE
    cell_form = "{:.3g} x memory, output lengths {}"
    columns = (
        Column("output\ntokens/s", TOKENS),
        Column("in SLO\ntokens/s", SLO_TOKENS),
        Column("in\nSLO", "tpot_attainment", "{:.0%}"),
        Column("TTFT s\nmean/p99", "ttft_mean", "{:.1f}", more=("ttft_p99",)),
        Column("TPOT ms\nmean/p99", "tpot_mean", scale=1e3, more=("tpot_p99",)),
        Column("longest\npause s", "longest_pause_s", "{:.2f}"),
        Column("pre-\nempted", "preempted"),
        Column("same\noutput", SAME_OUTPUT, "{:.0%}"),
    )

    def check(self) -> None:
        every = dataclasses.replace(self, servers=()).contenders()
        if unknown := set(self.servers).difference(every):
            raise ConfigError(
                f"--servers {','.join(sorted(unknown))}: give some of {', '.join(every)}"
            )
        for cell in self.cells():
            self.load(cell, 0)

    @property
    def sent(self) -> Load:
        """The preset, with what was given besides."""
        names = ("requests", "factors", "outputs", "tpot_slo_ms", "trace")
        given = {name: getattr(self, name) for name in names}
        return dataclasses.replace(
            LOADS[self.preset], **{name: value for name, value in given.items() if value}
        )

    def contenders(self) -> dict[str, Contender]:
        """In the order of the table."""
        every = contenders(
            self.sent,
            model_path=self.model_path,
            policy=self.policy,
            layer_group=self.layer_group,
            conservativeness=self.conservativeness,
        )
        return {name: c for name, c in every.items() if not self.servers or name in self.servers}

    def starters(self) -> loads.Starters:
        given = self.contenders()
        if ELLM in given:
            given = {AMPLE: given[ELLM], **given}
        return {
            name: loads.starter(model=c.arguments, environment=c.environment)
            for name, c in given.items()
        }

    def settings(self) -> list[Setting]:
        """Ample memory first, on a server of its own: output lengths that it learns are no help to
        the other. Of eLLM's, the value is the device's KV tokens."""
        names, load = list(self.contenders()), self.sent
        ours = [Setting(AMPLE, AMPLE, load.ample_tokens), Setting(ELLM, ELLM, load.device_tokens)]
        baselines = [Setting(name, name) for name in names if name != ELLM]
        return [*ours, *baselines] if ELLM in names else baselines

    def cells(self) -> list[Cell]:
        return self.sent.cells()

    def lives(self) -> list[list[Cell]]:
        every = self.cells()
        return [
            [c for c in every if c.outputs == kind] for kind in dict.fromkeys(self.sent.outputs)
        ]

    def load(self, cell: Cell, seed: int) -> list[Request]:
        return self.sent.drawn(cell, self.seed + seed)

    def warm_up(self, name: str, server: ServerProcess) -> None:
        loads.short_replay(server, self.load(self.cells()[0], 10_000))

    def measure(self, server: ServerProcess, setting: Setting, load: list[Request]) -> Taken:
        if setting.value is not None:
            server.adjust(ellm_device_kv_tokens=setting.value)
        stock, before = setting.server.startswith(STOCK), loads.retracted(server)
        begun = {} if stock else loads.totals(server)
        done = loads.replayed(server, load)
        counted = dict.fromkeys(("pauses", *COUNTERS), 0.0) if stock else loads.since(server, begun)
        return self.taken(done, counted | {"retracted": loads.retracted(server) - before})

    def taken(self, outcomes: Sequence[Outcome], counted: Mapping[str, float]) -> Taken:
        """One run's figures.

        Args:
            outcomes: of all requests.
            counted: what `pauses`, `COUNTERS`, and SGLang's retractions, have grown by.
        """
        times = np.sort(np.concatenate([o.token_s for o in outcomes]))
        found = loads.figures(outcomes) | {
            "longest_pause_s": max(o.longest_pause_s for o in outcomes),
            "preempted": counted["retracted"] + counted["pauses"],
            **{name: counted[name] for name in COUNTERS},
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

    def tables(self, result: Result) -> list[Table]:
        """One for each cell, and eLLM beside the best baseline of each."""
        headings = ("", *(c.heading for c in self.columns))
        rounds = f"(medians of {self.rounds} rounds)"
        found = [
            Table(f"{self.title(cell)} {rounds}", headings, tuple(self.rows(result, cell)))
            for cell in self.cells()
        ]
        return [*found, *best_table(result, self.cells(), self.title)]

    def notes(self, result: Result) -> list[str]:
        failed = {name: 0.0 for name in (s.name for s in self.settings())}
        for sample in result.samples:
            failed[sample.setting] += sample.figures["failed"]
        told = ", ".join(f"{count:.0f} of {name}" for name, count in failed.items() if count)
        return [f"requests that failed: {told}; ratios leave out loads with any"] if told else []

    def document(self, result: Result) -> dict[str, Any]:
        """Without the arrival of every token."""
        whole = baselines(result)
        runs = [
            {"server": s.setting, "baseline": s.setting in whole, "cell": s.cell._asdict(),
             "round": s.round, "summary": s.detail["summary"],
             **{name: s.figures[name] for name in FIGURES},
             SAME_OUTPUT: s.figures.get(SAME_OUTPUT)}
            for s in result.samples
        ]  # fmt: skip
        return {
            "scenario": asdict(self),
            "load": asdict(self.sent),
            "device_tokens": self.sent.device_tokens,
            "attention_backends": dict(result.extra),
            "runs": runs,
            "ratios": ratios(result, self.cells()),
        }

    def plot(self, result: Result, figure: Any) -> None:
        """The first round's output tokens per second over time, one panel per cell."""
        names = [s.name for s in self.settings() if s.name in result.settings]
        for panel, cell in self.panels(figure):
            draw(panel, {n: result.of(cell, n)[0].detail["tokens_at_s"] for n in names})
            panel.set(title=self.title(cell))
        figure.axes[-1].set_xlabel("seconds from the first request")
        figure.axes[0].legend(ncols=4, fontsize=8)
