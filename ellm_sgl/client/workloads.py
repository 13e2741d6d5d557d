"""Workloads: arrivals and lengths, drawn or read, and the requests made of them. By seed.

Length distributions. The eLLM paper gives means only: ShareGPT 222 tokens in and 1,346 out, L-Eval
35,956 in and 5,189 out. Token counts of texts are positive and skewed to the right, and their
logarithms are near normal: so each is a log-normal, cut off at a longest length, whose mean after
the cut is the paper's. Its spread (sigma of the logarithm) is an assumption: 1 for ShareGPT, whose
messages run from a word to a page, 0.5 for L-Eval, a benchmark of documents chosen to be long.
Nothing here was adjusted to results.

Contexts. The paper serves Llama-2, whose context is 4,096 tokens: a ShareGPT request ends there,
prompt and output together. L-Eval's mean prompt alone is nine times that. The paper does not say
how it was served; here requests have the lengths stated, as if the model took them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ellm_sgl.client.replay import Request
from ellm_sgl.client.traces import FloatArray, IntArray, Trace

PAPER_GAP_S, PAPER_GAP_SD_S = 0.02215, 0.03749
"""Mean and standard deviation of the time between arrivals in the eLLM paper's trace, in seconds
(§6.1)."""
PAPER_RATES = {"sharegpt": 50.0, "l-eval": 12.5}
"""Requests per second that the paper states by data set: the first 3,000 intervals of the trace,
25 a second, halved and doubled (§6.1). The mean above would be 45.1 a second before that."""

PRINTABLE = range(32, 127)
"""Token ids of prompts: the printable characters of a byte-level model, and in any vocabulary."""


@dataclass(frozen=True)
class LogNormal:
    """Token counts: log-normal, cut off at `longest`, with mean `mean` after the cut."""

    mean: float
    sigma: float
    """Standard deviation of the logarithm."""
    longest: int

    def draw(self, count: int, rng: np.random.Generator) -> IntArray:
        lengths = np.exp(self._mu() + self.sigma * rng.standard_normal(count))
        return np.asarray(np.rint(np.clip(lengths, 1, self.longest)), np.int64)

    def _mu(self) -> float:
        """Mean of the logarithm that gives `mean`, by bisection."""
        low, high = math.log(self.mean) - self.sigma**2 - 1, math.log(self.longest)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._cut_mean(middle) < self.mean else (low, middle)
        return low

    def _cut_mean(self, mu: float) -> float:
        """E[min(X, longest)] of a log-normal X."""
        z = (math.log(self.longest) - mu) / self.sigma
        below = math.exp(mu + self.sigma**2 / 2) * _normal(z - self.sigma)
        return below + self.longest * (1 - _normal(z))


def _normal(z: float) -> float:
    """Standard normal distribution function."""
    return (1 + math.erf(z / math.sqrt(2))) / 2


@dataclass(frozen=True)
class Lengths:
    """Prompt and output lengths, drawn independently."""

    prompt: LogNormal
    output: LogNormal
    context: int | None = None
    """The model's: an output ends where prompt and output have so many tokens. None: no bound."""

    def draw(self, count: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Prompt and output tokens of so many requests."""
        prompts = self.prompt.draw(count, rng)
        outputs = self.output.draw(count, rng)
        if self.context is not None:
            outputs = np.minimum(outputs, self.context - prompts)
        return prompts, outputs


LENGTHS = {
    "sharegpt": Lengths(LogNormal(222, 1.0, 3072), LogNormal(1346, 1.0, 4096 - 222), 4096),
    "l-eval": Lengths(LogNormal(35_956, 0.5, 131_072), LogNormal(5189, 0.5, 32_768)),
}
"""By data set, with the means that the eLLM paper gives."""


def poisson_arrivals(count: int, per_second: float, rng: np.random.Generator) -> FloatArray:
    """Arrival times in seconds, the first at 0; exponential gaps."""
    return _arrivals(rng.exponential(1 / per_second, count))


def gamma_arrivals(count: int, per_second: float, rng: np.random.Generator) -> FloatArray:
    """Arrival times in seconds, the first at 0; Gamma gaps that vary as the paper's do."""
    shape = (PAPER_GAP_S / PAPER_GAP_SD_S) ** 2
    return _arrivals(rng.gamma(shape, 1.0, count)) / (shape * per_second)


def _arrivals(gaps: FloatArray) -> FloatArray:
    times = np.cumsum(gaps)
    return np.asarray(times - times[0] if len(times) else times, np.float64)


def drawn(lengths: Lengths, at_s: FloatArray, rng: np.random.Generator) -> Trace:
    """A trace of these arrivals with lengths drawn from distributions."""
    return Trace(at_s, *lengths.draw(len(at_s), rng))


def sampled(
    lengths: tuple[IntArray, IntArray], at_s: FloatArray, rng: np.random.Generator
) -> Trace:
    """A trace of these arrivals with pairs of lengths picked from a file's."""
    rows = rng.integers(0, len(lengths[0]), len(at_s))
    return Trace(at_s, lengths[0][rows], lengths[1][rows])


def paper_workload(data_set: str, count: int, seed: int, per_second: float | None = None) -> Trace:
    """The eLLM paper's load: Gamma arrivals that vary as its do, lengths of a data set.

    Args:
        data_set: a key of `LENGTHS`.
        per_second: the mean rate, instead of the paper's for this data set.
    """
    rng = np.random.default_rng(seed)
    rate = PAPER_RATES[data_set] if per_second is None else per_second
    return drawn(LENGTHS[data_set], gamma_arrivals(count, rate, rng), rng)


def to_requests(
    trace: Trace,
    seed: int,
    *,
    tpot_slo_ms: float | None = None,
    ttft_slo_ms: float | None = None,
) -> list[Request]:
    """Requests to send: random prompts of the trace's lengths, and exactly its lengths out."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            at_s=at,
            prompt=tuple(rng.integers(PRINTABLE.start, PRINTABLE.stop, prompt).tolist()),
            output_tokens=output,
            tpot_slo_ms=tpot_slo_ms,
            ttft_slo_ms=ttft_slo_ms,
        )
        for at, prompt, output in zip(
            trace.at_s.tolist(),
            trace.prompt_tokens.tolist(),
            trace.output_tokens.tolist(),
            strict=True,
        )
    ]
