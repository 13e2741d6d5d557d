"""Servers, loads and counters that scenarios share."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ellm_sgl.client.generate import generate as complete
from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerError, ServerProcess
from ellm_sgl.client.replay import Outcome, Request, replay_to_end
from ellm_sgl.client.summary import summarize
from ellm_sgl.client.traces import Trace
from ellm_sgl.client.workloads import PRINTABLE, Lengths, LogNormal, drawn, poisson_arrivals
from ellm_sgl.eval.bench.result import MeasurementError, Taken
from ellm_sgl.sglang.versions import check_known

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""As for the demo: clients and tokenizers share the cores with the model."""
WARM_UP_REQUESTS, WARM_UP_TOKENS = 4, 32
LENGTHS = Lengths(LogNormal(96, 0.5, 256), LogNormal(256, 0.5, 640))
"""Tokens of prompts and outputs, of loads for the demo model."""
Prompts = list[tuple[int, ...]]
Starters = Mapping[str, Callable[[], ServerProcess]]
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")


def starter(
    *arguments: object,
    model: Sequence[str] = DEMO_ARGUMENTS,
    environment: Mapping[str, str] | None = None,
) -> Callable[[], ServerProcess]:
    """How a server is started; the demo model's unless told otherwise.

    Raises:
        UnknownVersionError: one with eLLM, which the SGLang that is installed would serve without.
    """
    words = [*model, *map(str, arguments)]
    if "--ellm-policy" in words:
        check_known()
    return lambda: ServerProcess(words, {**ENVIRONMENT, **(environment or {})})


def bare_model(path: str) -> tuple[str, ...]:
    """A local model that is sent token ids alone."""
    return ("--model-path", path, "--dtype", "float32", "--skip-tokenizer-init")


def draw_tokens(count: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choices(PRINTABLE, k=count))


def draw_prompts(seed: object, count: int, tokens: int) -> Prompts:
    """Token ids of so many prompts of one length."""
    rng = random.Random(str(seed))
    return [draw_tokens(tokens, rng) for _ in range(count)]


def draw_trace(count: int, per_second: float, seed: int, lengths: Lengths = LENGTHS) -> Trace:
    """Poisson arrivals."""
    rng = np.random.default_rng(seed)
    return drawn(lengths, poisson_arrivals(count, per_second, rng), rng)


def poisson(count: int, seconds: float, rng: random.Random) -> list[float]:
    """Times of arrivals, all in about so many seconds."""
    gaps = (rng.expovariate(count / seconds) for _ in range(count))
    return list(itertools.accumulate(gaps))


def generate(where: ServerProcess, prompts: Prompts, tokens: int) -> Taken:
    """Greedy outputs of prompts sent at once; figures: `tokens_per_s` and `seconds`."""
    begin = time.perf_counter()
    ids = complete(where.url, prompts, tokens)
    seconds = time.perf_counter() - begin
    return Taken({"tokens_per_s": sum(map(len, ids)) / seconds, "seconds": seconds}, ids)


def replayed(where: ServerProcess, requests: Sequence[Request]) -> list[Outcome]:
    """Every request's outcome; the prefix cache is empty before.

    Raises:
        ServerError: the server went away.
    """
    where.flush_cache()
    outcomes = replay_to_end(where.url, requests)
    if not where.alive():
        raise ServerError(f"the server went away:\n{where.last_words()}")
    return outcomes


def served(where: ServerProcess, requests: Sequence[Request], setting: str) -> list[Outcome]:
    """`replayed`, where figures mean nothing unless all requests are answered.

    Raises:
        ServerError: some failed.
    """
    outcomes = replayed(where, requests)
    if failed := sum(not o.complete for o in outcomes):
        raise ServerError(f"{setting}: {failed} requests failed\n{where.last_words()}")
    return outcomes


def short_replay(where: ServerProcess, requests: Sequence[Request]) -> None:
    """A few of the requests at once, with short answers: warms a server up."""
    few = requests[:WARM_UP_REQUESTS]
    replayed(where, [dataclasses.replace(r, at_s=0.0, output_tokens=WARM_UP_TOKENS) for r in few])


def figures(outcomes: Sequence[Outcome], prefix: str = "") -> dict[str, float]:
    """`Summary`, flat: `tokens_per_s`, `ttft_mean`, `tpot_p99`, ... (times in seconds)."""
    flat: dict[str, float] = {}
    for name, value in dataclasses.asdict(summarize(outcomes)).items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        flat |= {f"{prefix}{name}_{part}".rstrip("_"): float(v) for part, v in parts}
    return flat


def totals(where: ServerProcess) -> dict[str, float]:
    """eLLM's counters so far, without their `_total`."""
    state = where.state(integrity=False)
    return {k.removesuffix("_total"): float(v) for k, v in state.items() if k.endswith("_total")}


def since(where: ServerProcess, before: Mapping[str, float]) -> dict[str, float]:
    """What the counters have grown by."""
    return {name: value - before[name] for name, value in totals(where).items()}


def retracted(where: ServerProcess) -> float:
    """Requests that SGLang has retracted; stock SGLang tells of them in its log only."""
    return float(sum(map(int, _RETRACTED.findall(where.log.read_text(errors="replace")))))


def full_steps(where: ServerProcess, rows: int, last: int) -> list[dict[str, Any]]:
    """Of the last so many steps, those in which so many requests decoded.

    Raises:
        MeasurementError: there are none.
    """
    found = [s for s in where.steps()[-last:] if s["decode_rows"] == rows]
    if not found:
        raise MeasurementError(
            f"no step in which all {rows} requests decode: too slow a start; is the machine busy?"
        )
    return found
