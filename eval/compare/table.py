"""The comparison as tables of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ellm_sgl.eval.compare.results import Comparison, Ratios, in_order, tokens_per_s
from ellm_sgl.eval.compare.scenario import AMPLE, Cell

HEADINGS = ("output\ntokens/s", "TTFT s\nmean/p50/p99", "TPOT ms\nmean/p50/p99", "in\nSLO",
            "longest\npause s", "pre-\nempted", "same\noutput")  # fmt: skip


def render(comparison: Comparison) -> Iterator[RenderableType]:
    """A table per cell, and what eLLM's figures are beside the others."""
    for cell in comparison.scenario.cells:
        yield _table(comparison, cell)
    for ratios in comparison.ratios():
        yield Text(_sentence(ratios))


def _table(comparison: Comparison, cell: Cell) -> Table:
    scenario = comparison.scenario
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        title=f"{cell.title} (medians of {scenario.rounds} rounds)",
    )
    table.add_column("server", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for server in in_order(comparison, cell):
        table.add_row(server, *_row(comparison, cell, server))
    return table


def _row(comparison: Comparison, cell: Cell, server: str) -> list[str]:
    def median(figure: str, part: str) -> float:
        return comparison.median(cell, server, lambda r: getattr(getattr(r.summary, figure), part))

    parts = ("mean", "p50", "p99")
    return [
        f"{comparison.median(cell, server, tokens_per_s):.0f}",
        "/".join(f"{median('ttft', p):.1f}" for p in parts),
        "/".join(f"{median('tpot', p) * 1e3:.0f}" for p in parts),
        f"{comparison.median(cell, server, lambda r: r.slo_attainment):.0%}",
        f"{comparison.median(cell, server, lambda r: r.longest_pause_s):.2f}",
        f"{comparison.median(cell, server, lambda r: r.preempted):.0f}",
        "" if server == AMPLE else
        f"{comparison.median(cell, server, lambda r: r.same_output):.0%}",
    ]  # fmt: skip


def _sentence(ratios: Ratios) -> str:
    return (
        f"{ratios.cell.title}: eLLM {ratios.of_best:.2f} x the tokens/s of {ratios.best}, the best "
        f"baseline (p99 TPOT {ratios.tpot_p99_of_best:.2f} x, mean TTFT "
        f"{ratios.ttft_mean_of_best:.2f} x), {ratios.of_ample:.2f} x ample memory"
    )
