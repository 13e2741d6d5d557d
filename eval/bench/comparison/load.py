"""What is sent: requests whose KV is a multiple of what the device holds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ellm_sgl.client.replay import Request
from ellm_sgl.client.traces import Trace, TraceError, read_azure
from ellm_sgl.client.workloads import Lengths, LogNormal, to_requests
from ellm_sgl.eval.bench.loads import LENGTHS, draw_trace

OUTPUTS = KNOWN, UNKNOWN = "known", "unknown"
BLOCK_TOKENS = 16


class Cell(NamedTuple):
    """One row of loads, by seed."""

    factor: float
    """KV tokens of all requests at their ends, as a multiple of the device's."""
    outputs: str
    """`KNOWN`: the server may rely on the lengths. `UNKNOWN`: clients stop early."""


@dataclass(frozen=True)
class Load:
    """Poisson arrivals, and a device that is too small for them."""

    requests: int
    """At the largest factor; at smaller ones fewer, so that the device is the same."""
    per_second: float
    lengths: Lengths
    max_new_tokens: int
    """What requests allow for where output lengths are unknown."""
    factors: tuple[float, ...]
    outputs: tuple[str, ...]
    tpot_slo_ms: float | None = None
    """Of all requests; servers are told."""
    trace: str | None = None
    """Azure-format CSV file that arrivals and lengths come from, scaled to the above."""

    @property
    def mean_tokens(self) -> float:
        """KV of a request at its end."""
        return self.lengths.prompt.mean + self.lengths.output.mean

    @property
    def device_tokens(self) -> int:
        """KV tokens of the device: the mean of what the requests need, over the largest factor."""
        need = self.requests * self.mean_tokens
        return int(need / max(self.factors)) // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def ample_tokens(self) -> int:
        """More than any load needs, with room for what admission keeps free."""
        longest = self.lengths.prompt.longest + self.max_new_tokens
        return self.requests * longest // BLOCK_TOKENS * BLOCK_TOKENS

    def cells(self) -> list[Cell]:
        return [Cell(f, outputs) for f in self.factors for outputs in self.outputs]

    def drawn(self, cell: Cell, seed: int) -> list[Request]:
        """The requests of one cell.

        Where output lengths are unknown, prompts, arrivals and the lengths that clients take are
        those of `KNOWN`, unless the model ends sooner.

        Raises:
            TraceError: `trace` cannot be read, or has too few requests.
        """
        count = max(round(self.requests * cell.factor / max(self.factors)), 2)
        if self.trace is None:
            trace = draw_trace(count, self.per_second, seed, self.lengths)
        else:
            trace = self._scaled(Path(self.trace), count, seed)
        requests = to_requests(trace, seed, tpot_slo_ms=self.tpot_slo_ms)
        if cell.outputs == KNOWN:
            return requests
        return [
            dataclasses.replace(
                r, output_tokens=self.max_new_tokens, exact=False, stop_after=r.output_tokens
            )
            for r in requests
        ]

    def _scaled(self, file: Path, count: int, seed: int) -> Trace:
        """Requests of a trace that follow one another, from another place for each seed: as many
        per second, and as many tokens on average, as drawn ones would have."""
        whole = read_azure(file)
        if len(whole) < count:
            raise TraceError(
                f"{file}: {len(whole)} requests; give --requests {len(whole)} or fewer"
            )
        begin = seed * count % (len(whole) - count + 1)
        cut = whole.part(begin, begin + count)
        per_second = (count - 1) / max(float(cut.at_s[-1]), 1e-3)
        tokens = float((cut.prompt_tokens + cut.output_tokens).mean())
        return cut.scaled(rate=self.per_second / per_second, lengths=self.mean_tokens / tokens)


def _chat(mean: float, longest: int) -> Lengths:
    """Outputs with the spread that `workloads.LENGTHS` gives ShareGPT's."""
    return Lengths(LENGTHS.prompt, LogNormal(mean, 1.0, longest))


LOADS = {
    # Faster than any server ends them, so that memory is what is short.
    "oversubscribed": Load(24, 16.0, LENGTHS, 1024, (1.5, 3.0), OUTPUTS),
    # The factors of the next two are those of a device of 5,000 tokens.
    "burst": Load(40, 100.0, _chat(600, 3000), 3000, (5.568,), (UNKNOWN,), 20.0),
    "steady": Load(48, 8.0, _chat(300, 1024), 1024, (3.8016,), (UNKNOWN,), 20.0),
}
"""For the demo model, by the name that `--load` takes."""
