"""fcfs with and without rotation on the device, on one server whose policy is switched.

What rotation brings: more requests in flight, earlier first tokens, no fewer tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.client.replay import Outcome, Request
from ellm_sgl.config.click_types import LAYERS, MILLISECONDS, REQUESTS, SECONDS, TOKENS
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.result import SAME_OUTPUT, Column, Paired, Result, Taken
from ellm_sgl.eval.bench.scenario import Say, Scenario, Setting, option, rounds_option

PLAIN, ROTATING = "plain", "rotating"
PROMPT_TOKENS, OUTPUT_TOKENS = (64, 192), (32, 384)


def under_way(outcomes: Sequence[Outcome]) -> tuple[int, float]:
    """Requests between their first and last token: at most, and in the mean over that time."""
    spans = [(o.token_s[0], o.token_s[-1]) for o in outcomes if o.token_s]
    # In the order of time; what ends goes before what begins then.
    changes = sorted(change for a, b in spans for change in ((a, 1), (b, -1)))
    times, steps = np.array(changes).T
    level = np.cumsum(steps)
    lasting = np.diff(times)
    return int(level.max()), float((level[:-1] * lasting).sum() / lasting.sum())


@dataclass(frozen=True)
class Rotation(Scenario):
    rounds: int = rounds_option(3)
    device_tokens: int = option(3072, TOKENS)
    requests: int = option(48, REQUESTS)
    seconds: float = option(4.0, SECONDS, "In which they arrive.")
    slo_ms: float = option(60.0, MILLISECONDS, "TPOT SLO.")
    layer_group: int = option(2, LAYERS, "F.")

    reference = PLAIN
    against: ClassVar = {ROTATING: PLAIN}
    columns = (Column("tokens/s", "tokens_per_s"), Paired("of plain", "tokens_per_s", "{:.3f}"),
               Column("in flight", "mean_under_way", "{:.1f}"),
               Paired("of plain", "mean_under_way"),
               Column("TTFT s", "ttft_mean", "{:.2f}"), Paired("of plain", "ttft_mean"),
               Paired("last token\nof plain", "last_token_s"),
               Column("p99\nTPOT ms", "tpot_p99", "{:.1f}", 1e3),
               Column("within\nSLO", "within_slo", "{:.0%}"),
               Column("same\noutput", SAME_OUTPUT, "{:.0%}"))  # fmt: skip

    def starters(self) -> loads.Starters:
        return {"server": loads.starter(
            "--ellm-policy", "fcfs", "--ellm-tpot-slo-ms", self.slo_ms,
            "--ellm-layer-group", self.layer_group, "--ellm-device-kv-tokens", self.device_tokens,
            "--ellm-host-kv-tokens", 16 * self.device_tokens,
        )}  # fmt: skip

    def settings(self) -> list[Setting]:
        return [
            Setting(PLAIN, "server", {"rotate": False}),
            Setting(ROTATING, "server", {"rotate": True}),
        ]

    def load(self, cell: str, seed: int) -> list[Request]:
        """Poisson arrivals of requests of unequal lengths, which the server knows."""
        rng, requests = random.Random(seed), []
        for at in loads.poisson(self.requests, self.seconds, rng):
            prompt = loads.draw_tokens(rng.randint(*PROMPT_TOKENS), rng)
            requests.append(Request(at, prompt, rng.randint(*OUTPUT_TOKENS)))
        return requests

    def warm_up(self, name: str, server: ServerProcess) -> None:
        loads.short_replay(server, self.load("", self.rounds))

    def measure(self, server: ServerProcess, setting: Setting, load: list[Request]) -> Taken:
        server.switch_policy("fcfs", **setting.value)
        before = loads.totals(server)
        done = loads.served(server, load, setting.name)
        most, mean = under_way(done)
        found = {**loads.figures(done), **loads.since(server, before),
                 "most_under_way": most, "mean_under_way": mean}  # fmt: skip
        met = [o.complete and o.tpot_s * 1e3 <= self.slo_ms for o in done]
        found["within_slo"] = float(np.mean(met))
        found["last_token_s"] = float(np.mean([o.token_s[-1] - o.sent_s for o in done]))
        return Taken(found, [o.output_ids for o in done])

    def finish(
        self, servers: Mapping[str, ServerProcess], result: Result, say: Say
    ) -> dict[str, Any]:
        return {"integrity": servers["server"].state()["integrity"]}

    def notes(self, result: Result) -> list[str]:
        return [f"page table: {result.extra['integrity']}"]

    def document(self, result: Result) -> dict[str, Any]:
        return {**super().document(result), **result.extra}
