"""Two servers on one machine that are busy by turns: what each has of all the memory, of half of
it, and of a budget that both share.

Bursts of requests, all sent at once, on one server and then on the other; prefix caches are emptied
before each. Every round has new servers, a pair for each way, since two processes of one program
differ.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import click

from ellm_sgl.budget import path_of
from ellm_sgl.client.division import ALONE, HALVES, SHARED, Division
from ellm_sgl.client.process import DEMO_MODEL, ServerProcess
from ellm_sgl.client.replay import Request
from ellm_sgl.config.click_types import REQUESTS, TOKENS
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.result import SAME_OUTPUT, Column, Paired, Result, Taken
from ellm_sgl.eval.bench.scenario import Scenario, Setting, option, rounds_option
from ellm_sgl.eval.simulator.machines import read_model
from ellm_sgl.memory.arena import HUGE_PAGE

ELEMENT_BYTES = 4
Pair = tuple[ServerProcess, ServerProcess]
Bursts = Sequence[Sequence[Request]]
_TURNS = itertools.count()


@dataclass(frozen=True)
class Colocated(Scenario):
    rounds: int = rounds_option(6)
    requests: int = option(24, REQUESTS, "Of a burst.")
    prompt_tokens: int = option(128, TOKENS)
    output_tokens: int = option(256, TOKENS, "At most.")
    bursts: int = option(4, click.IntRange(1, 1000), "On each server, in a round.")

    anew = True
    reference = ALONE
    against: ClassVar = {HALVES: ALONE, SHARED: ALONE}
    columns = (Column("tokens/s", "tokens_per_s"),
               Paired("of each alone", "tokens_per_s", "{:.3f}"),
               Column("TTFT s,\nmean/p99", "ttft_mean", "{:.2f}", more=("ttft_p99",)),
               Column("longest\npause s", "longest_pause", "{:.2f}"),
               Column("same\noutput", SAME_OUTPUT, "{:.0%}"))  # fmt: skip

    def starters(self) -> Mapping[str, Callable[[], contextlib.AbstractContextManager[Pair]]]:
        """Which pair is started first changes by turns: they are not alike in that either."""
        shape = read_model(DEMO_MODEL / "config.json").in_elements_of(ELEMENT_BYTES)
        division = Division.for_bursts(
            self.requests,
            self.prompt_tokens + self.output_tokens,
            shape.kv_bytes_per_token,
            HUGE_PAGE,
        )
        budget = f"bench-{os.getpid()}"
        arguments = {
            ALONE: division.fixed(division.tokens),
            HALVES: division.fixed(division.half),
            SHARED: division.shared(budget),
        }
        ways = list(arguments)[:: -1 if next(_TURNS) % 2 else 1]
        return {
            way: partial(
                _pair, loads.starter(model=arguments[way]), budget if way == SHARED else None
            )
            for way in ways
        }

    def settings(self) -> list[Setting]:
        return [Setting(name, name) for name in (ALONE, HALVES, SHARED)]

    def load(self, cell: str, seed: int) -> Bursts:
        prompts = (
            loads.draw_prompts((seed, number), self.requests, self.prompt_tokens)
            for number in range(2 * self.bursts)
        )
        return [
            [Request(0.0, prompt, self.output_tokens, exact=False) for prompt in burst]
            for burst in prompts
        ]

    def warm_up(self, name: str, server: Pair) -> None:
        """Each takes all that it can have."""
        for one, burst in zip(server, self.load("", self.rounds), strict=False):
            loads.served(one, burst, name)

    def measure(self, server: Pair, setting: Setting, load: Bursts) -> Taken:
        found = [loads.served(server[i % 2], burst, setting.name) for i, burst in enumerate(load)]
        bursts = [loads.figures(burst) for burst in found]
        outcomes = [outcome for burst in found for outcome in burst]
        figures, seconds = loads.figures(outcomes), [burst["seconds"] for burst in bursts]
        return Taken(
            {
                "tokens_per_s": figures["output_tokens"] / sum(seconds),
                "ttft_mean": figures["ttft_mean"],
                "ttft_p99": figures["ttft_p99"],
                "longest_pause": max(outcome.longest_pause_s for outcome in outcomes),
            },
            [outcome.output_ids for outcome in outcomes],
            {"seconds": seconds},
        )

    def notes(self, result: Result) -> list[str]:
        if not {ALONE, HALVES, SHARED} <= result.settings:
            return []
        ratio = result.ratio("", SHARED, HALVES, "ttft_p99")
        spread = statistics.mean(
            _deviation(sample.detail["seconds"]) for sample in result.of("", ALONE)
        )
        return [
            f"p99 TTFT of {SHARED}, of that of {HALVES}: {ratio.median:.2f}",
            f"{ALONE}: bursts of a round differ by {spread:.1%} (standard deviation)",
        ]


@contextlib.contextmanager
def _pair(start: Callable[[], ServerProcess], budget: str | None) -> Iterator[Pair]:
    """Two servers; the budget that they share is gone with them."""
    try:
        with start() as one, start() as other:
            yield one, other
    finally:
        if budget is not None:
            path_of(budget).unlink(missing_ok=True)


def _deviation(seconds: Sequence[float]) -> float:
    """Of one burst (there are two at least), as a share of the mean."""
    return statistics.stdev(seconds) / statistics.mean(seconds)
