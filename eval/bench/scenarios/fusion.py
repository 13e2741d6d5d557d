"""Time of a step that recomputes, in one pass and in two.

Two servers, `--ellm-fusion on` and `off`; `fixed-ratio` leaves a share of the tokens uncached. A
step's time is the server's own, from its start to the start of the next; only steps in which all
requests decode count.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, ClassVar

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.config.click_types import SHARE, TOKENS
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.result import SAME_OUTPUT, Column, Paired, Result, Taken
from ellm_sgl.eval.bench.scenario import Scenario, Setting, model_option, option, rounds_option

SHAPES = ((1, 64), (1, 256), (4, 64), (4, 256), (16, 64), (16, 256))
"""(requests, prompt tokens of each)."""
OUTPUT_TOKENS, POOL_TOKENS = 40, 16_384
FUSED, SEPARATE = "one pass", "two passes"


@dataclass(frozen=True)
class Fusion(Scenario):
    rounds: int = rounds_option(5)
    model_path: str = model_option()
    ratio: float = option(0.4, SHARE, "Share of each request's tokens to leave uncached.")
    largest: int = option(4096, TOKENS, "Most tokens of a load.")

    reference = FUSED
    against: ClassVar = {SEPARATE: FUSED}
    cell_heading, cell_form = "load", "{} x {} tokens"
    columns = (Column("step ms", "step_ms", "{:.2f}"), Paired("ratio", "step_ms"),
               Column("recomputed\nrows", "recomputed_rows"),
               Column("same\noutput", SAME_OUTPUT, "{:.0%}"))  # fmt: skip

    def starters(self) -> loads.Starters:
        flags = ("--ellm-policy", "fixed-ratio", "--ellm-ratio", self.ratio,
                 "--ellm-device-kv-tokens", POOL_TOKENS, "--ellm-fusion")  # fmt: skip
        model = loads.bare_model(self.model_path)
        passes = {FUSED: "on", SEPARATE: "off"}
        return {name: loads.starter(*flags, fused, model=model) for name, fused in passes.items()}

    def cells(self) -> list[tuple[int, int]]:
        return [(count, tokens) for count, tokens in SHAPES if count * tokens <= self.largest]

    def load(self, cell: tuple[int, int], seed: int) -> loads.Prompts:
        return loads.draw_prompts((cell, seed), *cell)

    def measure(self, server: ServerProcess, setting: Setting, load: loads.Prompts) -> Taken:
        outputs = loads.generate(server, load, OUTPUT_TOKENS).outputs
        steps = loads.full_steps(server, len(load), OUTPUT_TOKENS)
        return Taken({
            "step_ms": 1e3 * statistics.median(s["seconds"] for s in steps),
            "recomputed_rows": statistics.mean(s["restored_tokens"] for s in steps),
        }, outputs)  # fmt: skip

    def document(self, result: Result) -> dict[str, Any]:
        shapes = [
            {"requests": cell[0], "prompt_tokens": cell[1],
             "fused_ms": result.median(cell, FUSED, "step_ms"),
             "separate_ms": result.median(cell, SEPARATE, "step_ms"),
             "ratio": result.ratio(cell, SEPARATE, FUSED, "step_ms").median}
            for cell in self.cells()
        ]  # fmt: skip
        return {**super().document(result), "loads": shapes}
