"""Figures of a replay: throughput, latencies, SLO attainment; and goodput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ellm_sgl.client.replay import Outcome

ATTAINMENT = 0.9
"""Share of the requests that have to meet their SLOs."""


@dataclass(frozen=True)
class Spread:
    """A latency over requests (or tokens), in seconds. nan where there was none."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: npt.ArrayLike) -> Spread:
        known = np.asarray(values, float)
        known = known[~np.isnan(known)]
        if len(known) == 0:
            return Spread(*[float("nan")] * 4)
        return Spread(float(known.mean()), *np.percentile(known, [50, 90, 99]).tolist())


@dataclass(frozen=True)
class Summary:
    """One replay against one server."""

    requests: int
    failed: int
    seconds: float
    """From the first request sent to the last token."""
    output_tokens: int
    tokens_per_s: float
    """Output tokens per second, over `seconds`."""
    steady_tokens_per_s: float
    """Output tokens per second before the drain tail: from the first request sent until no request
    waits for its first token any more."""
    slo_tokens_per_s: float
    """Output tokens of the requests that completed within their TPOT SLOs, per second of `seconds`:
    the throughput of the eLLM paper (§6.1)."""
    ttft: Spread
    tpot: Spread
    itl: Spread
    """Time between tokens of one request, over all tokens."""
    slo_attainment: float
    """Share of the requests that completed within both of their SLOs (within those they have)."""
    tpot_attainment: float
    """Share of the requests that completed within their TPOT SLOs: the SLO attainment of the eLLM
    paper (§6.2)."""


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """The figures of a replay; requests that failed count as SLOs missed."""
    began = min((o.sent_s for o in outcomes), default=0.0)
    times = np.array([at for o in outcomes for at in o.token_s])
    seconds = float(times.max(initial=began)) - began
    drain = max((o.token_s[0] for o in outcomes if o.token_s), default=began)
    in_time = [meets_tpot_slo(o) for o in outcomes]
    tokens = sum(len(o.token_s) for o, met in zip(outcomes, in_time, strict=True) if met)
    gaps = [np.diff(o.token_s) for o in outcomes if len(o.token_s) > 1]
    return Summary(
        requests=len(outcomes),
        failed=sum(not o.complete for o in outcomes),
        seconds=seconds,
        output_tokens=len(times),
        tokens_per_s=per_second(len(times), seconds),
        steady_tokens_per_s=per_second(int((times <= drain).sum()), drain - began),
        slo_tokens_per_s=per_second(tokens, seconds),
        ttft=Spread.of([o.ttft_s for o in outcomes]),
        tpot=Spread.of([o.tpot_s for o in outcomes]),
        itl=Spread.of(np.concatenate(gaps) if gaps else []),
        slo_attainment=float(np.mean([meets_slos(o) for o in outcomes])) if outcomes else 0.0,
        tpot_attainment=float(np.mean(in_time)) if outcomes else 0.0,
    )


def per_second(tokens: int, seconds: float) -> float:
    """Tokens per second; 0 of no time."""
    return tokens / seconds if seconds > 0 else 0.0


def meets_slos(outcome: Outcome) -> bool:
    """Whether a request completed within the SLOs it came with."""
    slo = outcome.request.ttft_slo_ms
    late = slo is not None and outcome.ttft_s * 1e3 > slo
    return meets_tpot_slo(outcome) and not late


def meets_tpot_slo(outcome: Outcome) -> bool:
    """Whether a request completed within the TPOT SLO it came with."""
    slo = outcome.request.tpot_slo_ms
    return outcome.complete and not (slo is not None and outcome.tpot_s * 1e3 > slo)


def goodput(
    attainment: Callable[[float], float],
    low: float,
    high: float,
    precision: float = 0.05,
) -> float:
    """The largest rate in [low, high] at which `ATTAINMENT` of the requests meet their SLOs (as in
    DistServe, OSDI'24), by bisection on its logarithm.

    Args:
        attainment: share of the requests that meet their SLOs at a rate; taken to fall with it.
        low, high: requests per second.
        precision: stop when the ends differ by this share.

    Returns:
        Requests per second; 0 if even `low` is too many.
    """
    if not 0 < low <= high:
        raise ValueError(f"give rates 0 < low <= high, not {low} and {high}")
    if attainment(low) < ATTAINMENT:
        return 0.0
    if attainment(high) >= ATTAINMENT:
        return high
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        if attainment(middle) >= ATTAINMENT:
            low = middle
        else:
            high = middle
    return low
