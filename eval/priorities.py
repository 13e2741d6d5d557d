"""Two classes of requests under pressure: what the urgent ones gain, and what it costs.

`python -m ellm_sgl.eval.priorities [--rounds N] [--json]` replays one load against `fcfs` and
`slo-priority` in turn, on one server whose policy is switched, and compares round by round.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click
import httpx
from rich.console import Console
from rich.progress import Progress

from ellm_sgl.eval.replay import Outcome, Request, replay
from ellm_sgl.eval.summary import Summary, summarize
from ellm_sgl.serve.process import DEMO_ARGUMENTS, ServerProcess

POLICIES = ("fcfs", "slo-priority")
PROMPT_TOKENS = 96
URGENT_SHARE = 0.25
URGENT = 10


@dataclass(frozen=True)
class Round:
    """One replay under one policy."""

    everybody: Summary
    urgent: Summary
    others: Summary


@dataclass(frozen=True)
class PriorityReport:
    """All rounds, and medians over rounds of the ratios within each."""

    device_tokens: int
    requests: int
    rounds: dict[str, list[Round]]
    ttft_gain: float
    """p99 TTFT of the urgent class under fcfs, over that under slo-priority."""
    tpot_gain: float
    """The same of p99 TPOT."""
    throughput_ratio: float
    """All tokens per second under slo-priority, over those under fcfs."""


def load(count: int, output_tokens: int, seconds: float, seed: int) -> list[Request]:
    """Poisson arrivals of requests whose answers may be so long; a quarter is urgent."""
    rng = random.Random(seed)
    at, requests = 0.0, []
    for _ in range(count):
        at += rng.expovariate(count / seconds)
        prompt = tuple(rng.randrange(32, 127) for _ in range(PROMPT_TOKENS))
        priority = URGENT if rng.random() < URGENT_SHARE else 0
        requests.append(Request(at, prompt, output_tokens, exact=False, priority=priority))
    return requests


def measure(
    rounds: int, device_tokens: int, count: int, output_tokens: int, seconds: float
) -> PriorityReport:
    """Replay under both policies in turn; a first, short replay warms up and is dropped."""
    memory = ["--ellm-device-kv-tokens", str(device_tokens), "--ellm-layer-group", "2"]
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", POLICIES[0], "--disable-radix-cache", *memory]
    results: dict[str, list[Round]] = {name: [] for name in POLICIES}
    with (
        Progress(console=Console(stderr=True)) as bar,
        ServerProcess(arguments, {"OMP_NUM_THREADS": "1"}) as server,
    ):
        replay(server.url, load(8, 64, 1.0, seed=99))
        task = bar.add_task("replays", total=rounds * len(POLICIES))
        for number in range(rounds):
            requests = load(count, output_tokens, seconds, seed=number)
            for name in POLICIES if number % 2 == 0 else reversed(POLICIES):
                answer = httpx.post(f"{server.url}/ellm/policy", json={"name": name}, timeout=60)
                answer.raise_for_status()
                results[name].append(_round(replay(server.url, requests)))
                bar.advance(task)
    return _report(device_tokens, count, results)


def _round(outcomes: Sequence[Outcome]) -> Round:
    urgent = [o for o in outcomes if o.request.priority == URGENT]
    others = [o for o in outcomes if o.request.priority != URGENT]
    return Round(summarize(outcomes), summarize(urgent), summarize(others))


def _report(device_tokens: int, count: int, results: dict[str, list[Round]]) -> PriorityReport:
    pairs = list(zip(results["fcfs"], results["slo-priority"], strict=True))
    return PriorityReport(
        device_tokens=device_tokens,
        requests=count,
        rounds=results,
        ttft_gain=statistics.median(f.urgent.ttft.p99 / s.urgent.ttft.p99 for f, s in pairs),
        tpot_gain=statistics.median(f.urgent.tpot.p99 / s.urgent.tpot.p99 for f, s in pairs),
        throughput_ratio=statistics.median(
            s.everybody.tokens_per_s / f.everybody.tokens_per_s for f, s in pairs
        ),
    )


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--device-tokens", default=3072, show_default=True)
@click.option("--requests", "count", default=48, show_default=True)
@click.option("--output-tokens", default=384, show_default=True, help="At most, per request.")
@click.option("--seconds", default=6.0, show_default=True, help="In which they arrive.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def main(
    rounds: int, device_tokens: int, count: int, output_tokens: int, seconds: float, as_json: bool
) -> None:
    """Compare slo-priority with fcfs on two classes of requests."""
    report = measure(rounds, device_tokens, count, output_tokens, seconds)
    if as_json:
        click.echo(json.dumps(asdict(report)))
        return
    for name, done in report.rounds.items():
        for one in done:
            click.echo(
                f"{name:13} {one.everybody.tokens_per_s:5.0f} tokens/s  urgent: "
                f"p99 TTFT {one.urgent.ttft.p99:6.2f} s, p99 TPOT {one.urgent.tpot.p99 * 1e3:6.1f} "
                f"ms  others: {one.others.ttft.p99:6.2f} s, {one.others.tpot.p99 * 1e3:6.1f} ms"
            )
    click.echo(
        f"urgent p99 TTFT {report.ttft_gain:.2f} x better, p99 TPOT {report.tpot_gain:.2f} x "
        f"better, total throughput {report.throughput_ratio:.3f} of fcfs's"
    )


if __name__ == "__main__":
    main()
