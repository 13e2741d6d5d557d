"""Output tokens per second over time, one panel per cell."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ellm_sgl.eval.compare.results import Comparison, in_order

LONGEST_WINDOW_S = 1.0
WINDOWS = 20
"""At least so many over a cell's longest run."""


def plot(comparison: Comparison, file: Path) -> None:
    """Write the first round's time series as PNG or SVG, by the name of `file`."""
    from matplotlib.figure import Figure

    cells = comparison.scenario.cells
    figure = Figure(figsize=(9, 3 * len(cells)), layout="constrained")
    panels = figure.subplots(len(cells), 1, squeeze=False)[:, 0]
    for panel, cell in zip(panels, cells, strict=True):
        series = {s: comparison.of(cell, s)[0].tokens_at_s for s in in_order(comparison, cell)}
        longest_s = max(max(times, default=0.0) for times in series.values())
        window_s = min(LONGEST_WINDOW_S, longest_s / WINDOWS) or LONGEST_WINDOW_S
        for server, times in series.items():
            edges = np.arange(0.0, max(times, default=0.0) + 2 * window_s, window_s)
            counts, _ = np.histogram(times, edges)
            panel.step(edges[:-1], counts / window_s, where="post", label=server)
        panel.set(title=cell.title, ylabel="output tokens/s", ylim=(0, None))
    panels[-1].set_xlabel("seconds from the first request")
    panels[0].legend(ncols=4, fontsize=8)
    figure.savefig(file, dpi=110)
