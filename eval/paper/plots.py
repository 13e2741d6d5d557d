"""The report's plots, as SVG text. Every axis has a name and a unit."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ellm_sgl.eval.paper.jobs import Done
from ellm_sgl.eval.paper.results import Comparison, Results
from ellm_sgl.eval.plotting import new_figure
from ellm_sgl.eval.simulator import MODES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"ellm": "C3", "recompute": "C0", "swap": "C1", "hcache": "C2", "both": "C3"}

PANELS: dict[str, Callable[[Done], float]] = {
    "output tokens/s": lambda d: d.sim.summary.tokens_per_s,
    "mean TTFT, s": lambda d: d.sim.summary.ttft.mean,
    "mean TPOT, ms": lambda d: d.sim.summary.tpot.mean * 1e3,
    "p99 TPOT, ms": lambda d: d.sim.summary.tpot.p99 * 1e3,
    "SLO attainment, %": lambda d: 100 * d.sim.summary.slo_attainment,
}
"""What a panel can show of a simulation, by the name of its axis."""
LATENCIES = ("output tokens/s", "mean TTFT, s", "mean TPOT, ms")


def _figure(panels: int) -> tuple[Figure, Sequence[Any]]:
    figure = new_figure(figsize=(min(4.2 * panels, 14), 3.4))
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _svg(figure: Figure) -> str:
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.hashsalt": "ellm"}):  # the same figure gives the same text
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def lines(variants: dict[str, list[Done]], axis: str, *panels: str) -> str:
    """One panel per name of `PANELS`, one line per variant, along the figure's axis."""
    figure, axes = _figure(len(panels))
    for place, label in zip(axes, panels, strict=True):
        for name, group in variants.items():
            values = [PANELS[label](d) for d in group]
            place.plot([d.job.x for d in group], values, "o-", markersize=3, label=name,
                       color=COLOURS.get(name))  # fmt: skip
        place.set(xlabel=axis, ylabel=label)
        place.set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    return _svg(figure)


def bars(names: Sequence[str], values: Mapping[str, Sequence[float]]) -> str:
    """One panel per axis, one horizontal bar per name."""
    figure, axes = _figure(len(values))
    for index, (place, label) in enumerate(zip(axes, values, strict=True)):
        colours = [COLOURS.get(name.split(",")[0], "C7") for name in names]
        place.barh(range(len(names)), values[label], color=colours)
        place.set(xlabel=label, yticks=range(len(names)), ylabel="server" if index == 0 else None)
        place.set_yticklabels(names if index == 0 else [], fontsize=8)
        place.invert_yaxis()
    return _svg(figure)


def runs(names: Sequence[str], done: Sequence[Done], *panels: str) -> str:
    """`bars` of simulations, with panels of `PANELS`."""
    return bars(names, {label: [PANELS[label](d) for d in done] for label in panels})


def comparison(compared: Comparison) -> str:
    """Figs. 10 and 12: throughput, latencies and SLO attainment of all modes."""
    done = sorted(compared.runs, key=lambda d: (d.job.variant != "ellm", d.job.variant, -d.job.x))
    names = [f"{d.job.variant}, {d.job.x:g}" for d in done]
    return runs(names, done, *LATENCIES, "SLO attainment, %")


def running(compared: Comparison) -> str:
    """Fig. 11: running requests over time."""
    figure, (place, share) = _figure(2)
    for mode in MODES:
        series = compared.best(mode).sim.series
        times = [s.at_s for s in series]
        place.plot(times, [s.running for s in series], linewidth=0.9, label=mode,
                   color=COLOURS[mode])  # fmt: skip
        if mode == "ellm":
            share.plot(times, [100 * s.uncached_share for s in series], linewidth=0.9, color="C3")
    place.set(xlabel="simulated time, s", ylabel="requests that decode")
    place.legend(fontsize=8)
    share.set(xlabel="simulated time, s", ylabel="uncached share r of eLLM, %")
    return _svg(figure)


def goodputs(results: Results) -> str:
    """Fig. 15: goodput of each mode."""
    found = results.goodputs
    return bars(list(found), {"goodput, requests/s": list(found.values())})


def decisions(results: Results) -> str:
    """Fig. 16: times of decisions, measured here."""
    figure, (place,) = _figure(1)
    names = list(results.decisions)
    for shift, kind in ((-0.2, "decision"), (0.2, "steady")):
        values = [getattr(results.decisions[n], kind).mean_us / 1e3 for n in names]
        place.bar([i + shift for i in range(len(names))], values, width=0.4, label=kind)
    place.set(xlabel="policy", ylabel="mean time, ms", xticks=range(len(names)))
    place.set_xticklabels(names)
    place.legend(fontsize=8)
    return _svg(figure)
