"""Two classes of requests under pressure: what the urgent ones gain, and what it costs.

`python -m ellm_sgl.eval.priorities [--model-path DIR] [--rounds N] [--json]` replays one load
against `fcfs`, `fcfs` as in the paper and `slo-priority` in turn, on one server whose policy is
switched, and compares round by round. Urgent requests are short questions; the others bring long
prompts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from ellm_sgl.client.process import DEMO_MODEL, ServerProcess
from ellm_sgl.client.replay import Outcome, Request, replay
from ellm_sgl.client.summary import Summary, summarize
from ellm_sgl.config.click_types import REQUESTS, ROUNDS, SECONDS, SEED, SHARE, TOKENS

POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "fcfs": ("fcfs", {}),
    "fcfs, paper": ("fcfs", {"pause": False}),
    "slo-priority": ("slo-priority", {}),
}
"""What is compared: names of policies, and their options."""
OURS = "slo-priority"
URGENT = 10
URGENT_TOKENS = 96
"""Of an urgent request: prompt tokens, and at most so many of output."""


@dataclass(frozen=True)
class Gains:
    """slo-priority against another policy: medians over rounds of the ratios within each."""

    ttft: float
    """p99 TTFT of the urgent class under the other, over that under slo-priority."""
    tpot: float
    """The same of p99 TPOT."""
    throughput: float
    """All tokens per second under slo-priority, over those under the other."""


@dataclass(frozen=True)
class Round:
    """One replay under one policy."""

    everybody: Summary
    urgent: Summary
    others: Summary


@dataclass(frozen=True)
class PriorityReport:
    """All rounds, and what slo-priority gains against each other policy."""

    model_path: str
    device_tokens: int
    load: Load
    rounds: dict[str, list[Round]]
    gains: dict[str, Gains]


@dataclass(frozen=True)
class Load:
    """Two classes of requests, each with Poisson arrivals."""

    requests: int
    urgent_share: float
    prompt_tokens: int
    """Of each request that is not urgent,"""
    output_tokens: int
    """and the most tokens of its answer."""
    seconds: float
    """In which all arrive."""

    def draw(self, seed: int) -> list[Request]:
        rng = random.Random(seed)
        at, requests = 0.0, []
        for _ in range(self.requests):
            at += rng.expovariate(self.requests / self.seconds)
            urgent = rng.random() < self.urgent_share
            tokens = URGENT_TOKENS if urgent else self.prompt_tokens
            prompt = tuple(rng.randrange(32, 127) for _ in range(tokens))
            most = URGENT_TOKENS if urgent else self.output_tokens
            priority = URGENT if urgent else 0
            requests.append(Request(at, prompt, most, exact=False, priority=priority))
        return requests


def measure(
    model_path: str, rounds: int, device_tokens: int, load: Load, seed: int
) -> PriorityReport:
    """Replay under all policies in turn; a first, short replay warms up and is dropped."""
    memory = ["--ellm-device-kv-tokens", str(device_tokens), "--ellm-layer-group", "2"]
    model = ["--model-path", model_path, "--dtype", "float32", "--skip-tokenizer-init"]
    arguments = [*model, "--ellm-policy", "fcfs", "--disable-radix-cache", *memory]
    results: dict[str, list[Round]] = {name: [] for name in POLICIES}
    with (
        Progress(console=Console(stderr=True)) as bar,
        ServerProcess(arguments, {"OMP_NUM_THREADS": "1"}) as server,
    ):
        replay(server.url, replace(load, requests=8, seconds=1.0).draw(seed - 1))
        task = bar.add_task("replays", total=rounds * len(POLICIES))
        for number in range(rounds):
            requests = load.draw(seed + number)
            for label in POLICIES if number % 2 == 0 else reversed(POLICIES):
                name, options = POLICIES[label]
                server.switch_policy(name, **options)
                results[label].append(_round(replay(server.url, requests)))
                bar.advance(task)
    gains = {name: _gains(results[name], results[OURS]) for name in results if name != OURS}
    return PriorityReport(model_path, device_tokens, load, results, gains)


def _round(outcomes: Sequence[Outcome]) -> Round:
    urgent = [o for o in outcomes if o.request.priority == URGENT]
    others = [o for o in outcomes if o.request.priority != URGENT]
    return Round(summarize(outcomes), summarize(urgent), summarize(others))


def _gains(other: Sequence[Round], ours: Sequence[Round]) -> Gains:
    pairs = list(zip(other, ours, strict=True))
    return Gains(
        ttft=median(o.urgent.ttft.p99 / u.urgent.ttft.p99 for o, u in pairs),
        tpot=median(o.urgent.tpot.p99 / u.urgent.tpot.p99 for o, u in pairs),
        throughput=median(u.everybody.tokens_per_s / o.everybody.tokens_per_s for o, u in pairs),
    )


@click.command()
@click.option("--model-path", default=str(DEMO_MODEL), help="A local model.  [default: the demo's]")
@click.option("--rounds", type=ROUNDS, default=3, show_default=True)
@click.option("--device-tokens", type=TOKENS, default=8192, show_default=True)
@click.option("--requests", type=REQUESTS, default=90, show_default=True)
@click.option("--urgent-share", type=SHARE, default=0.13, show_default=True)
@click.option(
    "--prompt-tokens", type=TOKENS, default=768, show_default=True, help="Of those not urgent."
)
@click.option(
    "--output-tokens", type=TOKENS, default=128, show_default=True, help="At most; not urgent."
)
@click.option(
    "--seconds", type=SECONDS, default=18.0, show_default=True, help="In which they arrive."
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the first round's load.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def main(
    model_path: str, rounds: int, device_tokens: int, seed: int, as_json: bool, **load: Any
) -> None:
    """Compare slo-priority with fcfs on two classes of requests."""
    report = measure(model_path, rounds, device_tokens, Load(**load), seed)
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
    for name, gains in report.gains.items():
        click.echo(
            f"against {name}: urgent p99 TTFT {gains.ttft:.2f} x better, p99 TPOT "
            f"{gains.tpot:.2f} x better, total throughput {gains.throughput:.3f} of it"
        )


if __name__ == "__main__":
    main()
