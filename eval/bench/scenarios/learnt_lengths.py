"""Output lengths learnt on one half of a trace and used on the other, simulated: what knowing them
is worth.

Policies plan by what they know of output lengths. "Other half" and "same half" know the lengths of
all answers of that half of the trace beforehand, and learn nothing more; "on line" begins with
nothing and learns from answers as they end, as a server does; "nothing" never learns; "known" is
told each request's own length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import click

from ellm_sgl.client.traces import Trace, TraceError, read_azure
from ellm_sgl.config import ConfigError
from ellm_sgl.config.click_types import FACTOR, REQUESTS, TOKENS
from ellm_sgl.eval.bench.grid.capacity import Kind, capacity, mean_tokens
from ellm_sgl.eval.bench.result import Column, Paired, Taken
from ellm_sgl.eval.bench.scenario import Scenario, Setting, option, rounds_option
from ellm_sgl.eval.simulator import Load, Settings, preset, simulate
from ellm_sgl.eval.simulator.machines import PRESETS
from ellm_sgl.policies.lengths import Seen

KNOWN, SAME, OTHER, ON_LINE, NOTHING = "known", "same half", "other half", "on line", "nothing"
HALVES = "first", "second"
SLOS: Mapping[str, float] = {"loose": 4.0, "tight": 1.3}
"""Over the time per token at the load that is sustained."""


class Cell(NamedTuple):
    served: str
    """One of `HALVES`."""
    slo: str


class Served(NamedTuple):
    """A stretch of one half of the trace, and what may be known of its lengths."""

    trace: Trace
    slo_s: float
    known: Mapping[str, Seen]
    """By setting."""


@dataclass(frozen=True)
class LearntLengths(Scenario):
    rounds: int = rounds_option(4)
    trace: str | None = option(None, click.Path(dir_okay=False), "An Azure-format CSV file.")
    machine: str = option("llama2-13b", click.Choice(tuple(PRESETS)))
    policy: str = option("fcfs")
    requests: int = option(2400, REQUESTS, "Of a half, in each round; others in the next.")
    load_factor: float = option(
        1.0, FACTOR, "Requests per second over what the machine can sustain.", flag="--load"
    )
    max_new_tokens: int = option(1024, TOKENS, "What requests say they may generate.")

    cell_heading, cell_form = "half served, SLO", "{}, {}"
    against: ClassVar = dict.fromkeys((ON_LINE, OTHER, SAME, NOTHING), KNOWN)
    columns = (Column("tokens/s within\nthe SLO", "slo_tokens_per_s"),
               Paired("of\nknown's", "slo_tokens_per_s"),
               Column("within", "tpot_attainment", "{:.1%}"),
               Column("tokens/s", "tokens_per_s"),
               Column("TTFT s\nmean", "ttft_mean", "{:.1f}"),
               Column("p99", "ttft_p99", "{:.1f}"),
               Column("p99\nTPOT ms", "tpot_p99", "{:.1f}", 1e3))  # fmt: skip

    def check(self) -> None:
        self._half(HALVES[0])

    def starters(self) -> Mapping[str, Any]:
        return {"simulator": nullcontext}

    def settings(self) -> Sequence[Setting]:
        return [Setting(name, "simulator") for name in (KNOWN, SAME, OTHER, ON_LINE, NOTHING)]

    def cells(self) -> tuple[Cell, ...]:
        return tuple(Cell(half, slo) for half in HALVES for slo in SLOS)

    def warm_up(self, name: str, server: Any) -> None:
        """There is nothing to warm."""

    def load(self, cell: Cell, seed: int) -> Served:
        """Requests that follow one another, from another place in the half for each seed, as often
        as the machine can take them."""
        own = self._half(cell.served)
        (other,) = (self._half(half) for half in HALVES if half != cell.served)
        begin = seed * self.requests % (len(own) - self.requests + 1)
        trace = own.part(begin, begin + self.requests)
        kinds = [Kind(float(own.prompt_tokens.mean()), float(own.output_tokens.mean()))]
        machine = preset(self.machine)
        most = capacity(machine, kinds, machine.kv_tokens / mean_tokens(kinds))
        rate = self.load_factor * most.requests_per_s * float(trace.at_s[-1]) / len(trace)
        known = {SAME: _lengths(own), OTHER: _lengths(other), NOTHING: Seen.nothing()}
        return Served(trace.scaled(rate), SLOS[cell.slo] * most.token_s, known)

    def measure(self, server: Any, setting: Setting, load: Served) -> Taken:
        said = None if setting.name == KNOWN else self.max_new_tokens
        settings = Settings(
            policy=self.policy, tpot_slo_s=load.slo_s, lengths=load.known.get(setting.name)
        )
        requests = Load.of(load.trace, said, load.slo_s)
        found = simulate(preset(self.machine), settings, requests).summary
        return Taken(
            {
                "slo_tokens_per_s": found.slo_tokens_per_s,
                "tpot_attainment": found.tpot_attainment,
                "tokens_per_s": found.tokens_per_s,
                "ttft_mean": found.ttft.mean,
                "ttft_p99": found.ttft.p99,
                "tpot_p99": found.tpot.p99,
            }
        )

    def _half(self, half: str) -> Trace:
        """Of the trace.

        Raises:
            ConfigError: none was given.
            TraceError: it has fewer requests than a round serves, or cannot be read.
        """
        if self.trace is None:
            raise ConfigError("no trace to learn from; give --trace FILE")
        whole = _read(self.trace)
        middle = len(whole) // 2
        if middle < max(self.requests, 2):
            raise TraceError(
                f"{self.trace}: {len(whole):,} requests; give --requests {middle} or fewer"
            )
        return whole.part(0, middle) if half == HALVES[0] else whole.part(middle, len(whole))


@cache
def _read(file: str) -> Trace:
    return read_azure(Path(file))


def _lengths(trace: Trace) -> Seen:
    """The last token of an answer has no KV: a server counts lengths without it."""
    return Seen.of(trace.output_tokens - 1)
