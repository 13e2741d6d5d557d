"""Steps with and without copies beside computation, at every split of the layers.

Two servers with a host tier, one with `--ellm-overlap off`, at every split between layers that are
fetched and layers that are recomputed: what the parts of restoration bring.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import ClassVar

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.config.click_types import SHARE
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.result import Column, Paired, Taken
from ellm_sgl.eval.bench.scenario import Scenario, Setting, option, rounds_option

PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS, POOL_TOKENS = 8, 224, 24, 8192
MEMORY = ("--ellm-policy", "fixed-ratio", "--disable-radix-cache", "--ellm-layer-group", 1,
          "--ellm-device-kv-tokens", POOL_TOKENS,
          "--ellm-host-kv-tokens", POOL_TOKENS)  # fmt: skip
NAMES = {
    (split, overlap): f"{split[0]} fetched : {split[1]} recomputed, overlap {overlap}"
    for split in ((1, 0), (3, 1), (1, 1), (0, 1))
    for overlap in ("on", "off")
    if (split, overlap) != ((0, 1), "off")  # without copies there is nothing to overlap
}
"""By ((l1, l2), overlap): of l1 + l2 layers l1 are fetched and l2 are recomputed."""


@dataclass(frozen=True)
class Ablation(Scenario):
    rounds: int = rounds_option(5)
    ratio: float = option(0.6, SHARE, "r of every request.")

    against: ClassVar = dict.fromkeys(NAMES.values(), NAMES[(1, 0), "on"])
    columns = (Column("step\nms", "step_ms", "{:.1f}"), Paired("of the\nfirst row", "step_ms"),
               Column("waited\nms", "stall_ms", "{:.2f}"), Column("fetched\nunits", "fetched"),
               Column("recomputed\nrows", "recomputed"), Column("ring\nunits", "ring"))  # fmt: skip

    def starters(self) -> loads.Starters:
        return {o: loads.starter(*MEMORY, "--ellm-overlap", o) for o in ("on", "off")}

    def settings(self) -> list[Setting]:
        return [Setting(name, overlap, split) for (split, overlap), name in NAMES.items()]

    def load(self, cell: str, seed: int) -> loads.Prompts:
        return loads.draw_prompts(seed, PROMPTS, PROMPT_TOKENS)

    def measure(self, server: ServerProcess, setting: Setting, load: loads.Prompts) -> Taken:
        server.switch_policy("fixed-ratio", ratio=self.ratio, layers=setting.value)
        before = loads.totals(server)
        loads.generate(server, load, OUTPUT_TOKENS)
        steps = loads.full_steps(server, PROMPTS, OUTPUT_TOKENS)
        counted = loads.since(server, before)
        return Taken({
            "step_ms": 1e3 * statistics.median(s["seconds"] for s in steps),
            "stall_ms": 1e3 * statistics.fmean(s["swap_stall_s"] for s in steps),
            "fetched": counted["fetched_units"] / (OUTPUT_TOKENS - 1),
            "recomputed": counted["recomputed_tokens"] / (OUTPUT_TOKENS - 1),
            "ring": counted["borrowed_units"] / (OUTPUT_TOKENS - 1),
        })  # fmt: skip
