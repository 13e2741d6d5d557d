"""What is found: eLLM beside the best baseline, and output tokens per second over time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ellm_sgl.eval.bench.comparison.contenders import ELLM
from ellm_sgl.eval.bench.comparison.load import Cell
from ellm_sgl.eval.bench.result import Paired, Result, Table

AMPLE = "ample"
"""eLLM's own server with all the memory it wants."""
TOKENS, SLO_TOKENS = "tokens_per_s", "slo_tokens_per_s"
"""Figures: of all output tokens, and of those of requests within the TPOT SLO."""
OF_BEST = (
    Paired("in SLO\ntokens/s", SLO_TOKENS),
    Paired("output\ntokens/s", TOKENS),
    Paired("TTFT\nmean", "ttft_mean"),
    Paired("TPOT\np99", "tpot_p99"),
)
OF_AMPLE = Paired("in SLO tokens/s\nof ample", SLO_TOKENS)
LONGEST_WINDOW_S, WINDOWS = 1.0, 20
"""Of the plot: at least so many windows over a cell's longest run."""


def baselines(result: Result) -> list[str]:
    """Those that move whole requests."""
    return sorted(result.settings - {AMPLE, ELLM})


def best_baseline(result: Result, cell: Cell) -> str | None:
    """The one with the highest median of tokens/s within the SLO (where none has any, of all
    tokens/s), of those that served all requests. None where there is none, or eLLM has not: a
    server with less to do is no measure."""

    def served(name: str) -> bool:
        return not any(result.values(cell, name, "failed"))

    if ELLM not in result.settings or not served(ELLM):
        return None

    def speed(name: str) -> list[float]:
        return [result.median(cell, name, figure) for figure in (SLO_TOKENS, TOKENS)]

    return max(filter(served, baselines(result)), key=speed, default=None)


def best_table(
    result: Result, cells: Sequence[Cell], title: Callable[[Cell], str]
) -> Iterator[Table]:
    """eLLM over the best baseline of each cell, which is named, and over ample memory."""
    columns = (*OF_BEST, OF_AMPLE)
    rows = [
        (title(cell), best, *(c.show(result, cell, ELLM, best) for c in OF_BEST),
         OF_AMPLE.show(result, cell, ELLM, AMPLE))
        for cell in cells if (best := best_baseline(result, cell)) is not None
    ]  # fmt: skip
    if rows:
        headings = ("load", "", *(column.heading for column in columns))
        yield Table("eLLM over the best baseline", headings, tuple(rows))


def ratios(result: Result, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The same for the JSON document: medians over rounds of the ratios within each. `of_best` and
    `of_ample` are of tokens/s within the SLO."""
    found = []
    for cell in cells:
        if (best := best_baseline(result, cell)) is None:
            continue
        of_best = result.ratio(cell, ELLM, best, SLO_TOKENS)
        others = (TOKENS, "tpot_p99", "ttft_mean")
        found.append({
            "cell": cell._asdict(),
            "best": best,
            "of_best": of_best.median,
            "of_best_interval": of_best.interval,
            "of_ample": result.ratio(cell, ELLM, AMPLE, SLO_TOKENS).median,
            **{f"{f}_of_best": result.ratio(cell, ELLM, best, f).median for f in others},
        })  # fmt: skip
    return found


def draw(panel: Any, series: Mapping[str, Sequence[float]]) -> None:
    """Output tokens per second over time, on a `matplotlib.axes.Axes`.

    Args:
        series: by server, when each token came, in seconds.
    """
    longest_s = max(max(times, default=0.0) for times in series.values())
    window_s = min(LONGEST_WINDOW_S, longest_s / WINDOWS) or LONGEST_WINDOW_S
    for name, times in series.items():
        edges = np.arange(0.0, max(times, default=0.0) + 2 * window_s, window_s)
        counts, _ = np.histogram(times, edges)
        panel.step(edges[:-1], counts / window_s, where="post", label=name)
    panel.set(ylabel="output tokens/s", ylim=(0, None))
