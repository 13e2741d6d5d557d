"""A load sweep and a goodput search on real servers, eLLM beside stock SGLang.

`python -m ellm_sgl.eval.load_sweep [--rate R ...] [--seeds N] [--plot FILE] [--json]` starts eLLM
(`fcfs` and a host tier) and stock SGLang with the same device memory, side by side, one under load
at a time. Every rate is replayed with every seed on both, in turn; then the largest rate at which
90 % of the requests meet both SLOs is searched for between two of these rates. Figures are means
over the seeds with 95 % confidence intervals (Student's t). About 10 minutes.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from scipy import stats

from ellm_sgl.client.goodput import ATTAINMENT, goodput
from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerError, ServerProcess, stop_on_signals
from ellm_sgl.client.replay import replay_to_end
from ellm_sgl.client.summary import summarize
from ellm_sgl.client.workloads import drawn, poisson_arrivals, to_requests
from ellm_sgl.config.click_types import MILLISECONDS, PER_SECOND, SECONDS
from ellm_sgl.eval.compare.scenario import LENGTHS

DEVICE_TOKENS, HOST_TOKENS = 2816, 16_384
SERVERS = {
    "ellm": ("--ellm-policy", "fcfs", "--ellm-layer-group", "1",
             "--ellm-device-kv-tokens", str(DEVICE_TOKENS),
             "--ellm-host-kv-tokens", str(HOST_TOKENS)),
    "stock": ("--max-total-tokens", str(DEVICE_TOKENS)),
}  # fmt: skip
PRECISION = 0.1
"""Of the goodput search: stop when the ends differ by this share."""
FURTHER, FURTHEST = 1.5, 5
"""Where the highest rate is not too much, the search goes on by this factor, at most 4 times."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Point:
    """One replay. Times in seconds."""

    server: str
    rate: float
    """Requests per second (Poisson)."""
    seed: int
    attainment: float
    """Share of the requests that met both SLOs."""
    tokens_per_s: float
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Interval:
        """Student's t; needs two values."""
        mean, error = statistics.fmean(values), float(stats.sem(values))
        half = float(stats.t.ppf(0.975, len(values) - 1)) * error
        return Interval(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Sweep:
    """What was found."""

    points: tuple[Point, ...]
    """Of the sweep; those of the search are not among them."""
    goodput: dict[str, tuple[float, ...]]
    """Requests per second by server, one per seed."""

    def interval(self, server: str, rate: float, name: str) -> Interval:
        chosen = [p for p in self.points if (p.server, p.rate) == (server, rate)]
        return Interval.of([getattr(p, name) for p in chosen])

    @property
    def rates(self) -> list[float]:
        return sorted({p.rate for p in self.points})

    def to_json(self) -> dict[str, Any]:
        return {
            "points": [asdict(p) for p in self.points],
            "goodput": {
                name: {"by_seed": values, **asdict(Interval.of(values))}
                for name, values in self.goodput.items()
            },
        }


@dataclass(frozen=True)
class Experiment:
    """What to replay."""

    rates: tuple[float, ...]
    seeds: int
    requests: int
    ttft_slo_s: float
    tpot_slo_ms: float

    def run(self, say: Say) -> Sweep:
        """Sweep, then search.

        Raises:
            ServerError: a server did not start, or requests failed.
            KeyboardInterrupt: asked to stop; no server is left.
        """
        with stop_on_signals(), ExitStack() as stack:
            servers = {}
            for name, flags in SERVERS.items():
                say(f"starting {name}")
                process = ServerProcess([*DEMO_ARGUMENTS, *flags], {"OMP_NUM_THREADS": "1"})
                servers[name] = stack.enter_context(process)
                self._point(servers[name], name, max(self.rates), self.seeds)  # the first is slow
            points = []
            for turn, (seed, rate) in enumerate(itertools.product(range(self.seeds), self.rates)):
                for name in list(servers)[:: -1 if turn % 2 else 1]:
                    points.append(self._point(servers[name], name, rate, seed))
                    p = points[-1]
                    say(f"seed {seed}, {rate:g}/s, {name}: {p.attainment:.0%} within both SLOs, "
                        f"{p.tokens_per_s:.0f} tokens/s")  # fmt: skip
            found = {
                name: tuple(self._search(servers[name], name, seed, points, say)
                            for seed in range(self.seeds))
                for name in servers
            }  # fmt: skip
        return Sweep(tuple(points), found)

    def _point(self, server: ServerProcess, name: str, rate: float, seed: int) -> Point:
        rng = np.random.default_rng(seed)
        trace = drawn(LENGTHS, poisson_arrivals(self.requests, rate, rng), rng)
        requests = to_requests(
            trace, seed, ttft_slo_ms=self.ttft_slo_s * 1e3, tpot_slo_ms=self.tpot_slo_ms
        )
        found = summarize(replay_to_end(server.url, requests))
        server.flush_cache()
        if found.failed:
            raise ServerError(f"{name}: {found.failed} requests failed\n{server.last_words()}")
        return Point(name, rate, seed, found.slo_attainment, found.tokens_per_s,
                     found.ttft.mean, found.tpot.mean)  # fmt: skip

    def _search(
        self, server: ServerProcess, name: str, seed: int, points: Sequence[Point], say: Say
    ) -> float:
        """Goodput with this seed's requests, between two rates of the sweep."""
        known = {p.rate: p.attainment for p in points if (p.server, p.seed) == (name, seed)}

        def attainment(rate: float) -> float:
            if rate not in known:
                known[rate] = self._point(server, name, rate, seed).attainment
                say(f"searching, seed {seed}, {name}: {rate:.2f}/s, {known[rate]:.0%}")
            return known[rate]

        low = high = min(self.rates)
        beyond = (max(self.rates) * FURTHER**i for i in range(1, FURTHEST))
        for high in itertools.chain(sorted(self.rates), beyond):
            if attainment(high) < ATTAINMENT:
                break
            low = high
        return goodput(attainment, low, high, precision=PRECISION)


def plot(sweep: Sweep, file: Path) -> None:
    """Attainment, TTFT and throughput over the rate, with their intervals."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = (("attainment", "requests within both SLOs"), ("ttft_s", "mean TTFT (s)"),
              ("tokens_per_s", "output tokens/s"))  # fmt: skip
    for axes, (name, label) in zip(figure.subplots(1, 3), panels, strict=True):
        for server in SERVERS:
            found = [sweep.interval(server, rate, name) for rate in sweep.rates]
            means = np.array([i.mean for i in found])
            half = means - np.array([i.low for i in found])
            axes.errorbar(sweep.rates, means, half, marker="o", capsize=3, label=server)
        axes.set_xlabel("requests/s")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].axhline(ATTAINMENT, color="grey", linestyle=":")
    figure.axes[0].legend()
    figure.savefig(file, dpi=120)


def table(sweep: Sweep) -> Table:
    """Means and intervals."""
    drawn_table = Table("requests/s", "server", box=box.SIMPLE, pad_edge=False)
    for heading in ("within SLOs", "TTFT s", "TPOT ms", "tokens/s"):
        drawn_table.add_column(heading, justify="right", no_wrap=True)
    for rate, server in itertools.product(sweep.rates, SERVERS):
        cells = (("attainment", 100, 0), ("ttft_s", 1, 2), ("tpot_s", 1e3, 1),
                 ("tokens_per_s", 1, 0))  # fmt: skip
        drawn_table.add_row(
            f"{rate:g}", server,
            *(_cell(sweep.interval(server, rate, name), by, digits) for name, by, digits in cells),
        )  # fmt: skip
    for server, found in sweep.goodput.items():
        drawn_table.add_row("goodput", server, _cell(Interval.of(found), 1, 2))
    return drawn_table


def _cell(interval: Interval, by: float, digits: int) -> str:
    half = (interval.high - interval.mean) * by
    return f"{interval.mean * by:.{digits}f} ± {half:.{digits}f}"


@click.command()
@click.option("--rate", "rates", type=PER_SECOND, multiple=True,
              default=(4.0, 6.0, 9.0, 13.0), show_default=True,
              help="Requests per second; may be given several times.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(2, 1000), default=3, show_default=True)
@click.option("--requests", type=click.IntRange(4, 10**6), default=40, show_default=True)
@click.option("--ttft-slo-s", type=SECONDS, default=1.0, show_default=True)
@click.option("--tpot-slo-ms", type=MILLISECONDS, default=20.0, show_default=True)
@click.option("--plot", "file", type=click.Path(path_type=Path, dir_okay=False),
              help="Write a plot to this PNG or SVG.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def main(
    rates: tuple[float, ...],
    seeds: int,
    requests: int,
    ttft_slo_s: float,
    tpot_slo_ms: float,
    file: Path | None,
    as_json: bool,
) -> None:
    """Sweep the load and search for the goodput, on real servers."""
    err = Console(stderr=True)
    experiment = Experiment(rates, seeds, requests, ttft_slo_s, tpot_slo_ms)
    try:
        found = experiment.run(lambda line: err.print(line, style="dim"))
    except ServerError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise click.Abort from None
    if file is not None:
        plot(found, file)
    if as_json:
        click.echo(json.dumps(found.to_json()))
        return
    Console().print(table(found))


if __name__ == "__main__":
    main()
