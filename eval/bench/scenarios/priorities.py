"""slo-priority beside fcfs on two classes of requests: what the urgent gain, and what it costs.

One server whose policy is switched. Urgent requests are short questions; the others bring long
prompts. Ratios are of the other policies over `slo-priority`, tokens per second the other way
round: above 1 is better in latency, and what is left of the throughput.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.client.replay import Request
from ellm_sgl.config.click_types import MILLISECONDS, REQUESTS, SECONDS, SEED, SHARE, TOKENS
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.result import Column, Paired, Taken
from ellm_sgl.eval.bench.scenario import Scenario, Setting, model_option, option, rounds_option

OURS = "slo-priority"
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "fcfs": ("fcfs", {}), "fcfs, paper": ("fcfs", {"pause": False}), OURS: (OURS, {}),
}  # fmt: skip
URGENT = 10
URGENT_TOKENS = 96
"""Of an urgent request: prompt tokens, and at most so many of output."""


@dataclass(frozen=True)
class Priorities(Scenario):
    rounds: int = rounds_option(3)
    model_path: str = model_option()
    device_tokens: int = option(8192, TOKENS)
    requests: int = option(90, REQUESTS)
    urgent_share: float = option(0.13, SHARE)
    prompt_tokens: int = option(768, TOKENS, "Of those not urgent.")
    output_tokens: int = option(128, TOKENS, "At most; not urgent.")
    seconds: float = option(18.0, SECONDS, "In which they arrive.")
    tpot_slo_ms: float = option(20.0, MILLISECONDS, "Of every request; policies are told.")
    seed: int = option(0, SEED, "Of the first round's load.")

    against: ClassVar = {"fcfs": OURS, "fcfs, paper": OURS}
    columns = (Column("tokens/s", "tokens_per_s"),
               Paired("kept by\nours", "tokens_per_s", inverse=True),
               Column("in SLO\ntokens/s", "slo_tokens_per_s"),
               Paired("kept by\nours", "slo_tokens_per_s", inverse=True),
               Column("in\nSLO", "tpot_attainment", "{:.0%}"),
               Column("urgent p99\nTTFT s", "urgent_ttft_p99", "{:.2f}"),
               Paired("times\nbetter", "urgent_ttft_p99"),
               Column("p99\nTPOT ms", "urgent_tpot_p99", "{:.1f}", 1e3),
               Paired("times\nbetter", "urgent_tpot_p99"),
               Column("others' p99\nTTFT s", "others_ttft_p99", "{:.2f}"),
               Column("p99\nTPOT ms", "others_tpot_p99", "{:.1f}", 1e3))  # fmt: skip

    def starters(self) -> loads.Starters:
        flags = ("--ellm-policy", "fcfs", "--disable-radix-cache", "--ellm-layer-group", 2,
                 "--ellm-device-kv-tokens", self.device_tokens)  # fmt: skip
        return {"server": loads.starter(*flags, model=loads.bare_model(self.model_path))}

    def settings(self) -> list[Setting]:
        return [Setting(name, "server", policy) for name, policy in POLICIES.items()]

    def load(self, cell: str, seed: int) -> list[Request]:
        """Both classes, with Poisson arrivals."""
        rng, requests = random.Random(self.seed + seed), []
        for at in loads.poisson(self.requests, self.seconds, rng):
            urgent = rng.random() < self.urgent_share
            prompt = loads.draw_tokens(URGENT_TOKENS if urgent else self.prompt_tokens, rng)
            most = URGENT_TOKENS if urgent else self.output_tokens
            priority = URGENT if urgent else 0
            requests.append(Request(at, prompt, most, exact=False, priority=priority,
                                    tpot_slo_ms=self.tpot_slo_ms))  # fmt: skip
        return requests

    def warm_up(self, name: str, server: ServerProcess) -> None:
        loads.short_replay(server, self.load("", self.rounds))

    def measure(self, server: ServerProcess, setting: Setting, load: list[Request]) -> Taken:
        name, options = setting.value
        server.switch_policy(name, **options)
        done = loads.served(server, load, setting.name)
        urgent = [o for o in done if o.request.priority == URGENT]
        others = [o for o in done if o.request.priority != URGENT]
        parts = {"": done, "urgent_": urgent, "others_": others}
        return Taken({k: v for p, part in parts.items() for k, v in loads.figures(part, p).items()})
