"""What eLLM costs when it is off or has nothing to do, and what the C++ kernels gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import click

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.config.click_types import REQUESTS, TOKENS
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.columns import Column, Paired
from ellm_sgl.eval.bench.loads import Prompts, Starters, starter
from ellm_sgl.eval.bench.result import Taken
from ellm_sgl.eval.bench.scenario import Scenario, Setting, option, rounds_option

POOL_TOKENS = 40_000
OFF = ("--max-total-tokens", POOL_TOKENS)
SERVERS: Starters = {
    "stock": starter(*OFF, environment={"SGLANG_PLUGINS": "ellm_cpu"}),
    "off": starter(*OFF, "--attention-backend", "torch_native"),
    "off, ellm_cpu": starter(*OFF),
    "r = 0": starter("--ellm-policy", "fixed-ratio", "--ellm-device-kv-tokens", POOL_TOKENS),
}
"""SGLang with only the CPU platform loaded; the plugin loaded and eLLM not enabled, with SGLang's
attention as in `stock`, and with the C++ kernels, as is the default; eLLM on, everything fits."""


@dataclass(frozen=True)
class Overhead(Scenario[ServerProcess, Prompts]):
    """eLLM off, or with nothing to do, beside stock SGLang."""

    rounds: int = rounds_option(20)
    requests: int = option(24, REQUESTS)
    prompt_tokens: int = option(128, TOKENS)
    output_tokens: int = option(96, TOKENS)
    only: tuple[str, ...] = option(
        (), click.Choice(list(SERVERS)), "Only these.", flag="--server", multiple=True
    )

    against: ClassVar = {"off": "stock", "off, ellm_cpu": "off", "r = 0": "off, ellm_cpu"}
    columns = (
        Column("tokens/s", "tokens_per_s"),
        Paired("of the row above", "tokens_per_s", "{:.3f}"),
    )

    def starters(self) -> Starters:
        return {name: start for name, start in SERVERS.items() if name in (self.only or SERVERS)}

    def load(self, cell: str, seed: int) -> Prompts:
        return loads.draw_prompts(seed, self.requests, self.prompt_tokens)

    def measure(self, server: ServerProcess, setting: Setting, load: Prompts) -> Taken:
        return loads.generate(server, load, self.output_tokens)
