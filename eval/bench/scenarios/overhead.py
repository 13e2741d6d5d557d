"""eLLM off, or with nothing to do, beside stock SGLang; and what the C++ kernels gain. Each round
starts the servers anew: two processes of one program differ by more than what is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import click

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.config.click_types import REQUESTS, TOKENS
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.result import Column, Paired, Taken
from ellm_sgl.eval.bench.scenario import Scenario, Setting, option, rounds_option

POOL_TOKENS = 40_000
OFF = ("--max-total-tokens", POOL_TOKENS)
SERVERS: loads.Starters = {
    "stock": loads.starter(*OFF, environment={"SGLANG_PLUGINS": "ellm_cpu"}),
    "off": loads.starter(*OFF, "--attention-backend", "torch_native"),
    "off, ellm_cpu": loads.starter(*OFF),
    "r = 0": loads.starter("--ellm-policy", "fixed-ratio", "--ellm-device-kv-tokens", POOL_TOKENS),
}
"""SGLang with only the CPU platform loaded; the plugin loaded and eLLM not enabled, with SGLang's
attention as in `stock`, and with the C++ kernels, as is the default; eLLM on, everything fits."""


@dataclass(frozen=True)
class Overhead(Scenario):
    rounds: int = rounds_option(20)
    requests: int = option(24, REQUESTS)
    prompt_tokens: int = option(128, TOKENS)
    output_tokens: int = option(96, TOKENS)
    anew = True
    only: tuple[str, ...] = option(
        (), click.Choice(list(SERVERS)), "Only these.", flag="--server", multiple=True
    )

    against: ClassVar = {"off": "stock", "off, ellm_cpu": "off", "r = 0": "off, ellm_cpu"}
    columns = (
        Column("tokens/s", "tokens_per_s"),
        Paired("of the row above", "tokens_per_s", "{:.3f}"),
    )

    def starters(self) -> loads.Starters:
        return {name: start for name, start in SERVERS.items() if name in (self.only or SERVERS)}

    def load(self, cell: str, seed: int) -> loads.Prompts:
        return loads.draw_prompts(seed, self.requests, self.prompt_tokens)

    def measure(self, server: ServerProcess, setting: Setting, load: loads.Prompts) -> Taken:
        return loads.generate(server, load, self.output_tokens)
