"""The same load on eLLM, its baseline modes and stock SGLang, in turn. About 15 minutes.

Arrivals, lengths and prompts are the same for all; the servers share the machine, but only one is
under load at a time. Each round starts them anew: two processes of the same program differ, by up
to a tenth of their speed, for as long as they live. Ample memory is eLLM's own server with all the
memory it wants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess, has_tokenizer
from ellm_sgl.client.replay import Outcome, Request
from ellm_sgl.client.summary import summarize
from ellm_sgl.client.traces import Trace, TraceError, read_azure
from ellm_sgl.client.workloads import to_requests
from ellm_sgl.config import ConfigError
from ellm_sgl.config.click_types import FACTOR, LAYERS, MILLISECONDS, SECONDS, FiniteRange
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.loads import LENGTHS
from ellm_sgl.eval.bench.result import SAME_OUTPUT, Column, Result, Table, Taken
from ellm_sgl.eval.bench.scenario import Say, Scenario, Setting, option, rounds_option

AMPLE, ELLM, STOCK = "ample", "ellm", "stock"
OUTPUTS = KNOWN, UNKNOWN = "known", "unknown"
BLOCK_TOKENS = 16
UNKNOWN_MAX_TOKENS = 1024
"""What requests allow for where output lengths are unknown."""
PER_SECOND = 16.0
"""Requests that arrive: faster than any server ends them, so that memory is what is short."""
LONGEST_WINDOW_S, WINDOWS = 1.0, 20
"""Of the plot: at least so many windows over a cell's longest run."""
COUNTERS = ("recomputed_tokens", "fetched_units", "swap_stall_ms")
FIGURES = ("slo_attainment", "longest_pause_s", "preempted", *COUNTERS, SAME_OUTPUT)
"""Of a run in the JSON document, beside its `summary`."""


class Cell(NamedTuple):
    """One load."""

    factor: float
    """KV tokens of all requests at their ends, as a multiple of the device's."""
    outputs: str
    """`KNOWN`: the server may rely on the lengths. `UNKNOWN`: clients stop early."""


@dataclass(frozen=True)
class Compare(Scenario):
    rounds: int = rounds_option(2)
    scenario: str = option(
        "oversubscribed",
        click.Choice(["oversubscribed"]),
        "Requests whose KV is a multiple of device memory, with output lengths known and unknown.",
    )
    requests: int = option(24, click.IntRange(4, 10**6), "At most at once.")
    """At the largest factor; at smaller ones fewer, so that the device is the same."""
    factors: tuple[float, ...] = option(
        (1.5, 3.0),
        FiniteRange(1, 1000),
        "Multiple of device memory; may be given several times.",
        flag="--factor",
        multiple=True,
    )
    outputs: tuple[str, ...] = option(
        OUTPUTS,
        click.Choice([*OUTPUTS, "both"]),
        "Whether servers may rely on output lengths, or clients stop early.",
        text="both",
        callback=lambda _, __, text: OUTPUTS if text == "both" else (text,),
    )
    conservativeness: tuple[float, ...] = option(
        (0.3,),
        FACTOR,
        "SGLang's --schedule-conservativeness to try beside its default; several times.",
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
    trace: str | None = option(
        None,
        about="Arrivals and lengths from an Azure-format CSV file, scaled to this machine.",
        metavar="FILE",
    )
    model_path: str | None = option(
        None, about="A local model.  [default: the demo model]", metavar="DIR"
    )
    policy: str = option("fcfs", about="eLLM's.")
    layer_group: int = option(1, LAYERS)
    tpot_slo_ms: float = option(50.0, MILLISECONDS, "To count requests in SLO.")
    ttft_slo_s: float = option(10.0, SECONDS, "Likewise.")

    anew = True
    reference = AMPLE
    cell_form = "{:g} x memory, output lengths {}"
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
        if unknown := set(self.servers).difference(every):
            raise ConfigError(
                f"--servers {','.join(sorted(unknown))}: give some of {', '.join(every)}"
            )
        for cell in self.cells():
            self.load(cell, 0)

    @property
    def device_tokens(self) -> int:
        """KV tokens of the device: the mean of what the load needs, over its factor."""
        need = self.requests * (LENGTHS.prompt.mean + LENGTHS.output.mean)
        return int(need / max(self.factors)) // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def ample_tokens(self) -> int:
        """More than any load needs, with room for what admission keeps free."""
        longest = LENGTHS.prompt.longest + UNKNOWN_MAX_TOKENS
        return self.requests * longest // BLOCK_TOKENS * BLOCK_TOKENS

    def contenders(self) -> dict[str, tuple[str, ...]]:
        """Arguments of the servers, in the order of the table. All but `ELLM` move whole requests:
        eLLM is compared with the best of these."""
        group = ("--ellm-layer-group", str(self.layer_group))
        device = ("--ellm-device-kv-tokens", str(self.device_tokens), *group)
        host = ("--ellm-host-kv-tokens", str(self.ample_tokens))
        # One process serves `AMPLE` too: its pool is ample, and is used in part.
        wide = ("--ellm-device-kv-tokens", str(self.ample_tokens), *group)
        baselines: dict[str, tuple[str, ...]] = {
            "hcache": ("--ellm-mode", "hcache", *device, *host),
            "recompute": ("--ellm-mode", "recompute", *device),
            STOCK: ("--max-total-tokens", str(self.device_tokens)),
            "swap": ("--ellm-mode", "swap", *device, *host),
        }
        for name in ("recompute", STOCK):
            for value in self.conservativeness:
                tuned = ("--schedule-conservativeness", str(value))
                baselines[f"{name} {value:g}"] = (*baselines[name], *tuned)
        ellm = ("--ellm-policy", self.policy, *wide, *host)
        every = {ELLM: ellm, **dict(sorted(baselines.items()))}
        model: tuple[str, ...] = DEMO_ARGUMENTS
        if self.model_path is not None:
            tokenizer = () if has_tokenizer(self.model_path) else ("--skip-tokenizer-init",)
            model = ("--model-path", self.model_path, *tokenizer)
        return {name: (*model, "--disable-radix-cache", *own) for name, own in every.items()
                if not self.servers or name in self.servers}  # fmt: skip

    def starters(self) -> loads.Starters:
        return {name: loads.starter(model=words) for name, words in self.contenders().items()}

    def settings(self) -> list[Setting]:
        """Ample memory first; of eLLM's, the value is the device's KV tokens."""
        names = list(self.contenders())
        ours = [Setting(AMPLE, ELLM, self.ample_tokens), Setting(ELLM, ELLM, self.device_tokens)]
        baselines = [Setting(name, name) for name in names if name != ELLM]
        return [*ours, *baselines] if ELLM in names else baselines

    def cells(self) -> list[Cell]:
        return [Cell(f, outputs) for f in self.factors for outputs in self.outputs]

    def load(self, cell: Cell, seed: int) -> list[Request]:
        """The requests of one cell; the same for every server.

        Where output lengths are unknown, prompts, arrivals and the lengths that clients take are
        those of `KNOWN`, unless the model ends sooner.

        Raises:
            TraceError: `trace` cannot be read, or has too few requests.
        """
        count = max(round(self.requests * cell.factor / max(self.factors)), 2)
        if self.trace is None:
            trace = loads.draw_trace(count, PER_SECOND, seed)
        else:
            trace = _scaled(Path(self.trace), count, seed)
        requests = to_requests(trace, seed)
        if cell.outputs == KNOWN:
            return requests
        return [
            dataclasses.replace(
                r, output_tokens=UNKNOWN_MAX_TOKENS, exact=False, stop_after=r.output_tokens
            )
            for r in requests
        ]

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
        """One for each cell."""
        headings = ("", *(c.heading for c in self.columns))
        rounds = f"(medians of {self.rounds} rounds)"
        return [
            Table(f"{self.title(cell)} {rounds}", headings, tuple(self.rows(result, cell)))
            for cell in self.cells()
        ]

    def ratios(self, result: Result) -> list[dict[str, Any]]:
        """eLLM in each cell beside the whole-request baseline with the highest median throughput
        and beside ample memory: medians over rounds of the ratios within each round. Empty where
        eLLM, or every baseline, was left out."""
        baselines = self._baselines(result)
        if ELLM not in result.settings or not baselines:
            return []
        found = []
        for cell in self.cells():
            speeds = {name: result.median(cell, name, "tokens_per_s") for name in baselines}
            best = max(speeds, key=speeds.__getitem__)
            of_best = result.ratio(cell, ELLM, best, "tokens_per_s")
            found.append({
                "cell": cell._asdict(),
                "best": best,
                "of_best": of_best.median,
                "of_best_interval": of_best.interval,
                "of_ample": result.ratio(cell, ELLM, AMPLE, "tokens_per_s").median,
                "tpot_p99_of_best": result.ratio(cell, ELLM, best, "tpot_p99").median,
                "ttft_mean_of_best": result.ratio(cell, ELLM, best, "ttft_mean").median,
            })  # fmt: skip
        return found

    def _baselines(self, result: Result) -> list[str]:
        return sorted(result.settings - {AMPLE, ELLM})

    def notes(self, result: Result) -> list[str]:
        return [
            f"{self.title(Cell(**r['cell']))}: eLLM {r['of_best']:.2f} x the tokens/s of "
            f"{r['best']}, the best baseline (p99 TPOT {r['tpot_p99_of_best']:.2f} x, mean TTFT "
            f"{r['ttft_mean_of_best']:.2f} x), {r['of_ample']:.2f} x ample memory"
            for r in self.ratios(result)
        ]

    def document(self, result: Result) -> dict[str, Any]:
        """Without the arrival of every token."""
        baselines = self._baselines(result)
        runs = [
            {"server": s.setting, "baseline": s.setting in baselines, "cell": s.cell._asdict(),
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
        names = [s.name for s in self.settings() if s.name in result.settings]
        for panel, cell in self.panels(figure):
            series = {n: result.of(cell, n)[0].detail["tokens_at_s"] for n in names}
            longest_s = max(max(times, default=0.0) for times in series.values())
            window_s = min(LONGEST_WINDOW_S, longest_s / WINDOWS) or LONGEST_WINDOW_S
            for name, times in series.items():
                edges = np.arange(0.0, max(times, default=0.0) + 2 * window_s, window_s)
                counts, _ = np.histogram(times, edges)
                panel.step(edges[:-1], counts / window_s, where="post", label=name)
            panel.set(title=self.title(cell), ylabel="output tokens/s", ylim=(0, None))
        figure.axes[-1].set_xlabel("seconds from the first request")
        figure.axes[0].legend(ncols=4, fontsize=8)


def _scaled(file: Path, count: int, seed: int) -> Trace:
    """Requests of a trace that follow one another, from another place for each seed: as many per
    second, and as many tokens on average, as the drawn loads have."""
    whole = read_azure(file)
    if len(whole) < count:
        raise TraceError(f"{file}: {len(whole)} requests; give --requests {len(whole)} or fewer")
    begin = seed * count % (len(whole) - count + 1)
    part = slice(begin, begin + count)
    at_s = whole.at_s[part] - whole.at_s[begin]
    cut = Trace(at_s, whole.prompt_tokens[part], whole.output_tokens[part])
    per_second = (count - 1) / max(float(at_s[-1]), 1e-3)
    tokens = float((cut.prompt_tokens + cut.output_tokens).mean())
    wanted = LENGTHS.prompt.mean + LENGTHS.output.mean
    return cut.scaled(rate=PER_SECOND / per_second, lengths=wanted / tokens)
