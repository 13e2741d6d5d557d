"""What the number of layers per group, F, costs and saves: throughput, bookkeeping, fragmentation.

As in the eLLM paper's Table 2, for F of 1, 2, 4 and 8: one server for each, with all KV cached, and
with half of it fetched from the host in every step. And the page table alone: with `--rounds 0` no
server is started, and nothing else is measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.result import Column, Paired, Result, Table, Taken
from ellm_sgl.eval.bench.scenario import Scenario, Setting, rounds_option
from ellm_sgl.eval.paper.claims import TABLE_2

if TYPE_CHECKING:
    from ellm_sgl.eval.bench.page_table import TableAlone

GROUPS = {f"F = {f}": f for f in (1, 2, 4, 8)}
PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS, POOL_TOKENS = 16, 222, 96, 16_384
Load = tuple[float, loads.Prompts]
"""The uncached ratio, and prompts."""


@dataclass(frozen=True)
class LayerGroups(Scenario):
    rounds: int = rounds_option(3, least=0)

    against: ClassVar = dict.fromkeys(GROUPS, "F = 1")
    cell_heading, cell_form = "uncached", "r = {}"
    columns = (Column("tokens/s", "tokens_per_s"), Paired("of F = 1", "tokens_per_s", "{:.3f}"),
               Column("bookkeeping's\nshare of time", "page_table_share", "{:.2%}"))  # fmt: skip

    def starters(self) -> loads.Starters:
        flags = ("--ellm-policy", "fixed-ratio", "--disable-radix-cache",
                 "--ellm-device-kv-tokens", POOL_TOKENS, "--ellm-host-kv-tokens", POOL_TOKENS,
                 "--ellm-layer-group")  # fmt: skip
        return {name: loads.starter(*flags, group) for name, group in GROUPS.items()}

    def cells(self) -> tuple[float, ...]:
        return (0.0, 0.5)

    def load(self, cell: float, seed: int) -> Load:
        return cell, loads.draw_prompts(seed, PROMPTS, PROMPT_TOKENS)

    def measure(self, server: ServerProcess, setting: Setting, load: Load) -> Taken:
        ratio, prompts = load
        server.adjust(ellm_ratio=ratio)
        before = loads.totals(server)
        found = loads.generate(server, prompts, OUTPUT_TOKENS).figures
        spent_s = loads.since(server, before)["page_table_ms"] / 1e3
        return Taken({**found, "page_table_share": spent_s / found["seconds"]})

    @cached_property
    def alone(self) -> tuple[TableAlone, ...]:
        from ellm_sgl.eval.bench.page_table import measure_table

        return tuple(map(measure_table, GROUPS.values()))

    def tables(self, result: Result) -> list[Table]:
        rows = []
        for t in self.alone:
            said = TABLE_2.get(t.layer_group)
            paper = [f"{said.fragmentation:.2%}", f"{said.table_share:.2%}"] if said else ["", ""]
            rows.append((f"F = {t.layer_group}", f"{t.fragmentation:.2%}", paper[0],
                         f"{t.step_us:.0f}", paper[1]))  # fmt: skip
        headings = ("", "fragmentation", "paper", "bookkeeping,\nus per step", "paper's share")
        return [*super().tables(result), Table("The page table alone", headings, tuple(rows))]

    def document(self, result: Result) -> dict[str, Any]:
        servers = [
            {"layer_group": group, "ratio": cell,
             "tokens_per_s": result.median(cell, name, "tokens_per_s"),
             "page_table_share": result.median(cell, name, "page_table_share")}
            for cell in self.cells() for name, group in GROUPS.items() if result.samples
        ]  # fmt: skip
        table = [asdict(t) for t in self.alone]
        return {**super().document(result), "server": servers, "table": table}
