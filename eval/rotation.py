"""What turns on the device bring: more requests under way, earlier first tokens, no fewer tokens.

`python -m ellm_sgl.eval.rotation [--rounds N] [--json]` replays one load against `fcfs` without and
with `rotate`, in turn, on one server whose policy is switched, and compares round by round.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from ellm_sgl.client.replay import Outcome, Request, replay
from ellm_sgl.client.summary import Summary, summarize
from ellm_sgl.config.click_types import LAYERS, MILLISECONDS, REQUESTS, ROUNDS, SECONDS, TOKENS

SETTINGS = {"plain": {}, "rotating": {"rotate": True}}
"""Options of `fcfs`."""
PROMPT_TOKENS = (64, 192)
OUTPUT_TOKENS = (32, 384)


@dataclass(frozen=True)
class Round:
    """One replay under one setting."""

    summary: Summary
    most_under_way: int
    """Requests between their first and last token at once, at most,"""
    mean_under_way: float
    """and in the mean over time."""
    within_slo: float
    """Share of the requests whose average time per output token met the SLO."""
    fetched_ahead_units: int
    fetched_units: int
    """Those ahead included."""
    saved_units: int
    recomputed_tokens: int
    swap_stall_ms: float
    retractions: int


@dataclass(frozen=True)
class RotationReport:
    """All rounds, and medians over rounds of the ratios within each, rotating over plain."""

    device_tokens: int
    requests: int
    tpot_slo_ms: float
    rounds: dict[str, list[Round]]
    under_way: float
    """Mean requests under way."""
    ttft: float
    """Mean time to first token."""
    latency: float
    """Mean time to the last token."""
    throughput: float
    same_output: bool
    """Every request got the same tokens in every replay of its round."""
    integrity: str


def load(count: int, seconds: float, seed: int) -> list[Request]:
    """Poisson arrivals of requests of unequal lengths, which the server knows."""
    rng = random.Random(seed)
    at, requests = 0.0, []
    for _ in range(count):
        at += rng.expovariate(count / seconds)
        prompt = tuple(rng.randrange(32, 127) for _ in range(rng.randint(*PROMPT_TOKENS)))
        requests.append(Request(at, prompt, rng.randint(*OUTPUT_TOKENS)))
    return requests


def measure(
    rounds: int, device_tokens: int, count: int, seconds: float, slo_ms: float, layer_group: int
) -> RotationReport:
    """Replay with and without turns; a first, short replay warms up and is dropped."""
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fcfs", "--ellm-tpot-slo-ms", str(slo_ms),
                 "--ellm-layer-group", str(layer_group),
                 "--ellm-device-kv-tokens", str(device_tokens),
                 "--ellm-host-kv-tokens", str(16 * device_tokens)]  # fmt: skip
    results: dict[str, list[Round]] = {name: [] for name in SETTINGS}
    same = True
    with (
        Progress(console=Console(stderr=True)) as bar,
        ServerProcess(arguments, {"OMP_NUM_THREADS": "1"}) as server,
    ):
        replay(server.url, load(8, 1.0, seed=99))
        task = bar.add_task("replays", total=rounds * len(SETTINGS))
        for number in range(rounds):
            requests = load(count, seconds, seed=number)
            outputs = []
            for name in SETTINGS if number % 2 == 0 else reversed(SETTINGS):
                server.switch_policy("fcfs", **SETTINGS[name])
                server.flush_cache()
                before = server.state()
                outcomes = replay(server.url, requests)
                results[name].append(_round(outcomes, slo_ms, before, server.state()))
                outputs.append([o.output_ids for o in outcomes])
                bar.advance(task)
            same &= outputs[0] == outputs[1]
        integrity = server.state()["integrity"]
    return _report(device_tokens, count, slo_ms, results, same, integrity)


def under_way(outcomes: Sequence[Outcome]) -> tuple[int, float]:
    """Requests between their first and last token: at most, and in the mean over that time."""
    begun = np.array([o.token_s[0] for o in outcomes if o.token_s])
    ended = np.array([o.token_s[-1] for o in outcomes if o.token_s])
    times = np.concatenate((begun, ended))
    change = np.concatenate((np.ones(len(begun)), -np.ones(len(ended))))
    order = np.lexsort((change, times))
    level = np.cumsum(change[order])
    spans = np.diff(times[order])
    return int(level.max()), float((level[:-1] * spans).sum() / spans.sum())


def _round(
    outcomes: Sequence[Outcome], slo_ms: float, before: dict[str, float], after: dict[str, float]
) -> Round:
    most, mean = under_way(outcomes)

    def new(name: str) -> int:
        return int(after[f"{name}_total"] - before[f"{name}_total"])

    return Round(
        summary=summarize(outcomes),
        most_under_way=most,
        mean_under_way=mean,
        within_slo=float(np.mean([o.complete and o.tpot_s * 1e3 <= slo_ms for o in outcomes])),
        fetched_ahead_units=new("fetched_ahead_units"),
        fetched_units=new("fetched_units"),
        saved_units=new("saved_units"),
        recomputed_tokens=new("recomputed_tokens"),
        swap_stall_ms=after["swap_stall_ms_total"] - before["swap_stall_ms_total"],
        retractions=new("retractions"),
    )


def _report(
    device_tokens: int,
    count: int,
    slo_ms: float,
    results: dict[str, list[Round]],
    same: bool,
    integrity: str,
) -> RotationReport:
    pairs = list(zip(results["plain"], results["rotating"], strict=True))

    def last_token_s(done: Round) -> float:
        return done.summary.ttft.mean + done.summary.tpot.mean * done.summary.output_tokens / count

    return RotationReport(
        device_tokens=device_tokens,
        requests=count,
        tpot_slo_ms=slo_ms,
        rounds=results,
        under_way=statistics.median(r.mean_under_way / p.mean_under_way for p, r in pairs),
        ttft=statistics.median(r.summary.ttft.mean / p.summary.ttft.mean for p, r in pairs),
        latency=statistics.median(last_token_s(r) / last_token_s(p) for p, r in pairs),
        throughput=statistics.median(
            r.summary.tokens_per_s / p.summary.tokens_per_s for p, r in pairs
        ),
        same_output=same,
        integrity=integrity,
    )


@click.command()
@click.option("--rounds", type=ROUNDS, default=3, show_default=True)
@click.option("--device-tokens", type=TOKENS, default=3072, show_default=True)
@click.option("--requests", "count", type=REQUESTS, default=48, show_default=True)
@click.option(
    "--seconds", type=SECONDS, default=4.0, show_default=True, help="In which they arrive."
)
@click.option("--slo-ms", type=MILLISECONDS, default=60.0, show_default=True, help="TPOT SLO.")
@click.option("--layer-group", type=LAYERS, default=2, show_default=True, help="F.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def main(
    rounds: int,
    device_tokens: int,
    count: int,
    seconds: float,
    slo_ms: float,
    layer_group: int,
    as_json: bool,
) -> None:
    """Compare fcfs with and without turns on the device."""
    report = measure(rounds, device_tokens, count, seconds, slo_ms, layer_group)
    if as_json:
        click.echo(json.dumps(asdict(report)))
        return
    for name, done in report.rounds.items():
        for one in done:
            s = one.summary
            click.echo(
                f"{name:9} {s.tokens_per_s:5.0f} tokens/s  TTFT {s.ttft.mean:5.2f} s  TPOT mean "
                f"{s.tpot.mean * 1e3:4.1f}, p99 {s.tpot.p99 * 1e3:5.1f} ms  within SLO "
                f"{one.within_slo:.0%}  under way {one.mean_under_way:4.1f}, at most "
                f"{one.most_under_way}  fetched {one.fetched_units} ({one.fetched_ahead_units} "
                f"ahead), waited {one.swap_stall_ms:.0f} ms, recomputed {one.recomputed_tokens}"
            )
    click.echo(
        f"rotating over plain: under way {report.under_way:.2f}, mean TTFT {report.ttft:.2f}, "
        f"throughput {report.throughput:.3f}; outputs {'equal' if report.same_output else 'DIFFER'}"
    )


if __name__ == "__main__":
    main()
