"""What `ellm-sgl compare` compares: servers, loads, and how far the loads exceed memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess, has_tokenizer
from ellm_sgl.client.replay import Request
from ellm_sgl.client.traces import Trace, TraceError, read_azure
from ellm_sgl.client.workloads import Lengths, LogNormal, drawn, poisson_arrivals, to_requests
from ellm_sgl.config.click_types import FACTOR, LAYERS, MILLISECONDS, SECONDS, FiniteRange
from ellm_sgl.eval.bench.scenario import Scenario, option, rounds_option

BLOCK_TOKENS = 16
AMPLE, ELLM, STOCK = "ample", "ellm", "stock"
KNOWN, UNKNOWN = "known", "unknown"
OUTPUTS = (KNOWN, UNKNOWN)

LENGTHS = Lengths(LogNormal(96, 0.5, 256), LogNormal(256, 0.5, 640))
"""Tokens of prompts and outputs."""
UNKNOWN_MAX_TOKENS = 1024
"""What requests allow for where output lengths are unknown."""
PER_SECOND = 16.0
"""Requests that arrive: faster than any server ends them, so that memory is what is short."""


@dataclass(frozen=True)
class Cell:
    """One load."""

    factor: float
    """KV tokens of all requests at their ends, as a multiple of the device's."""
    outputs: str
    """`KNOWN`: the server may rely on the lengths. `UNKNOWN`: clients stop early."""

    @property
    def title(self) -> str:
        return f"{self.factor:g} x memory, output lengths {self.outputs}"


@dataclass(frozen=True)
class Contender:
    """One server."""

    name: str
    arguments: tuple[str, ...]
    baseline: bool = True
    """Whether it moves whole requests; eLLM is compared with the best of these."""


def _read_names(_: Any, __: Any, text: str | None) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _read_outputs(_: Any, __: Any, text: str) -> tuple[str, ...]:
    return OUTPUTS if text == "both" else (text,)


SCENARIO = (
    ("oversubscribed",),
    "Requests whose KV is a multiple of device memory, with output lengths known and unknown.",
)
ABOUT = {
    "factors": "Multiple of device memory; may be given several times.",
    "outputs": "Whether servers may rely on output lengths, or clients stop early.",
    "conservativeness": "SGLang's --schedule-conservativeness to try beside its default; several "
    "times.",
    "servers": "Only these, for instance ellm,recompute,swap.",
    "trace": "Arrivals and lengths from an Azure-format CSV file, scaled to this machine.",
}


@dataclass(frozen=True)
class Oversubscribed(Scenario[ServerProcess, list[Request]]):
    """Requests whose KV is a multiple of device memory, and the servers that get them."""

    rounds: int = rounds_option(2)
    scenario: str = option("oversubscribed", click.Choice(SCENARIO[0]), SCENARIO[1])
    requests: int = option(24, click.IntRange(4, 10**6), "At most at once.")
    """At the largest factor; at smaller ones fewer, so that the device is the same."""
    factors: tuple[float, ...] = option(
        (1.5, 3.0), FiniteRange(1, 1000), ABOUT["factors"], flag="--factor", multiple=True
    )
    outputs: tuple[str, ...] = option(
        OUTPUTS, click.Choice([*OUTPUTS, "both"]), ABOUT["outputs"],
        text="both", callback=_read_outputs,
    )  # fmt: skip
    conservativeness: tuple[float, ...] = option(
        (0.3,), FACTOR, ABOUT["conservativeness"], multiple=True
    )
    servers: tuple[str, ...] = option(
        (),
        None,
        ABOUT["servers"],
        metavar="NAME,...",
        text="",
        callback=_read_names,
        show_default=False,
    )
    """Names of those to run; empty: all."""
    trace: str | None = option(None, None, ABOUT["trace"], metavar="FILE")
    model_path: str | None = option(
        None, None, "A local model.  [default: the demo model]", metavar="DIR"
    )
    policy: str = option("fcfs", None, "eLLM's.")
    layer_group: int = option(1, LAYERS)
    tpot_slo_ms: float = option(50.0, MILLISECONDS, "To count requests in SLO.")
    ttft_slo_s: float = option(10.0, SECONDS, "Likewise.")

    def cells(self) -> list[Cell]:
        return [Cell(f, outputs) for f in self.factors for outputs in self.outputs]

    def title(self, cell: Cell) -> str:
        return cell.title

    def load(self, cell: Cell, seed: int) -> list[Request]:
        """The requests of one cell; the same for every server.

        Where output lengths are unknown, prompts, arrivals and the lengths that clients take are
        those of `KNOWN`, unless the model ends sooner.

        Raises:
            TraceError: `trace` cannot be read, or has too few requests.
        """
        rng = np.random.default_rng(seed)
        count = max(round(self.requests * cell.factor / max(self.factors)), 2)
        if self.trace is None:
            trace = drawn(LENGTHS, poisson_arrivals(count, PER_SECOND, rng), rng)
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

    def contenders(self) -> list[Contender]:
        """The servers, in the order of the table; `AMPLE` is `ELLM`'s with more memory."""
        model: tuple[str, ...] = DEMO_ARGUMENTS
        if self.model_path is not None:
            model = ("--model-path", self.model_path)
            if not has_tokenizer(self.model_path):
                model += ("--skip-tokenizer-init",)
        common = (*model, "--disable-radix-cache")
        device = ("--ellm-device-kv-tokens", str(self.device_tokens),
                  "--ellm-layer-group", str(self.layer_group))  # fmt: skip
        host = ("--ellm-host-kv-tokens", str(self.ample_tokens))
        # One process serves both: its pool is ample, and is used in part.
        wide = ("--ellm-device-kv-tokens", str(self.ample_tokens), *device[2:])
        ellm = Contender(ELLM, (*common, "--ellm-policy", self.policy, *wide, *host), False)
        whole = [
            Contender("recompute", (*common, "--ellm-mode", "recompute", *device)),
            Contender("swap", (*common, "--ellm-mode", "swap", *device, *host)),
            Contender("hcache", (*common, "--ellm-mode", "hcache", *device, *host)),
            Contender(STOCK, (*common, "--max-total-tokens", str(self.device_tokens))),
        ]
        tuned = [
            Contender(
                f"{c.name} {value:g}", (*c.arguments, "--schedule-conservativeness", str(value))
            )
            for c in whole
            if c.name in ("recompute", STOCK)
            for value in self.conservativeness
        ]
        every = [ellm, *sorted([*whole, *tuned], key=lambda c: c.name)]
        return [c for c in every if not self.servers or c.name in self.servers]


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
