"""Workloads: arrivals and lengths, drawn or read, and the requests made of them. By seed.

Length distributions. The eLLM paper gives means only: ShareGPT 222 tokens in and 1,346 out, L-Eval
35,956 in and 5,189 out. Token counts of texts are positive and skewed to the right, and their
logarithms are near normal: so each is a log-normal, cut off at a longest length, whose mean after
the cut is the paper's. Its spread (sigma of the logarithm) is an assumption: 1 for ShareGPT, whose
messages run from a word to a page, 0.5 for L-Eval, a benchmark of documents chosen to be long.
Nothing here was adjusted to results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ellm_sgl.client.replay import Request
from ellm_sgl.client.traces import FloatArray, IntArray, Trace

PAPER_GAP_S, PAPER_GAP_SD_S = 0.02215, 0.03749
"""Mean and standard deviation of the time between arrivals in the eLLM paper, in seconds."""

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


LENGTHS = {
    "sharegpt": Lengths(LogNormal(222, 1.0, 4096), LogNormal(1346, 1.0, 8192)),
    "l-eval": Lengths(LogNormal(35_956, 0.5, 131_072), LogNormal(5189, 0.5, 32_768)),
}
"""By data set, with the means that the eLLM paper gives."""


def poisson_arrivals(count: int, per_second: float, rng: np.random.Generator) -> FloatArray:
    """Arrival times in seconds, the first at 0; exponential gaps."""
    return _arrivals(rng.exponential(1 / per_second, count))


def gamma_arrivals(count: int, rng: np.random.Generator) -> FloatArray:
    """Arrival times in seconds, the first at 0; Gamma gaps of the paper's mean and deviation."""
    shape = (PAPER_GAP_S / PAPER_GAP_SD_S) ** 2
    return _arrivals(rng.gamma(shape, PAPER_GAP_S / shape, count))


def _arrivals(gaps: FloatArray) -> FloatArray:
    times = np.cumsum(gaps)
    return np.asarray(times - times[0] if len(times) else times, np.float64)


def drawn(lengths: Lengths, at_s: FloatArray, rng: np.random.Generator) -> Trace:
    """A trace of these arrivals with lengths drawn from distributions."""
    prompts = lengths.prompt.draw(len(at_s), rng)
    return Trace(at_s, prompts, lengths.output.draw(len(at_s), rng))


def sampled(
    lengths: tuple[IntArray, IntArray], at_s: FloatArray, rng: np.random.Generator
) -> Trace:
    """A trace of these arrivals with pairs of lengths picked from a file's."""
    rows = rng.integers(0, len(lengths[0]), len(at_s))
    return Trace(at_s, lengths[0][rows], lengths[1][rows])


def paper_workload(data_set: str, count: int, seed: int, per_second: float | None = None) -> Trace:
    """The eLLM paper's load: Gamma arrivals of its mean and deviation, lengths of a data set.

    Args:
        data_set: a key of `LENGTHS`.
        per_second: another mean rate, with gaps of the same shape.
    """
    rng = np.random.default_rng(seed)
    times = gamma_arrivals(count, rng)
    if per_second is not None:
        times = times * (1 / PAPER_GAP_S / per_second)
    return drawn(LENGTHS[data_set], times, rng)


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
