"""The report's plots, as SVG text. Every axis has a name and a unit."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ellm_sgl.eval.paper.elastic.rows import decode, largest, total
from ellm_sgl.eval.paper.figure_7 import EXAMPLES, REQUESTS, SHAPE, TOKENS, example
from ellm_sgl.eval.paper.jobs import Done
from ellm_sgl.eval.paper.plan import ADMISSIONS, BASELINES
from ellm_sgl.eval.paper.results import Comparison, Results
from ellm_sgl.eval.plotting import new_figure
from ellm_sgl.eval.simulator import MODES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"ellm": "C3", "recompute": "C0", "swap": "C1", "hcache": "C2", "both": "C3"}
COLOURS |= {"vllm": "C0", "vllm-cp": "C1", "intra": "C2", "host": "C4", "distserve": "C5"}

PANELS: dict[str, Callable[[Done], float]] = {
    "output tokens/s": lambda d: d.sim.summary.tokens_per_s,
    "tokens/s within the TPOT SLO": lambda d: d.sim.summary.slo_tokens_per_s,
    "tokens/s before the drain tail": lambda d: d.sim.summary.steady_tokens_per_s,
    "mean TTFT, s": lambda d: d.sim.summary.ttft.mean,
    "mean TPOT, ms": lambda d: d.sim.summary.tpot.mean * 1e3,
    "p99 TPOT, ms": lambda d: d.sim.summary.tpot.p99 * 1e3,
    "within the TPOT SLO, %": lambda d: 100 * d.sim.summary.tpot_attainment,
    "within both SLOs, %": lambda d: 100 * d.sim.summary.slo_attainment,
}
"""What a panel can show of a simulation, by the name of its axis."""
LATENCIES = ("output tokens/s", "mean TTFT, s", "mean TPOT, ms")
PARTS = ("tokens/s within the TPOT SLO", *LATENCIES)


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
    names = ["ellm", "ellm, as printed", *(f"{m}, {a}" for a in ADMISSIONS for m in BASELINES)]
    done = [compared.best(name) for name in names]
    return runs(names, done, *PARTS, "within the TPOT SLO, %")


def running(compared: Comparison) -> str:
    """Fig. 11: running requests over time."""
    figure, (place, share) = _figure(2)
    for mode in MODES:
        series = compared.baseline(mode).sim.series
        times = [s.at_s for s in series]
        place.plot(times, [s.running for s in series], linewidth=0.9, label=mode,
                   color=COLOURS[mode])  # fmt: skip
        if mode == "ellm":
            share.plot(times, [100 * s.uncached_share for s in series], linewidth=0.9, color="C3")
    place.set(xlabel="simulated time, s", ylabel="requests that decode")
    place.legend(fontsize=8)
    share.set(xlabel="simulated time, s", ylabel="uncached share r of eLLM, %")
    return _svg(figure)


def examples() -> str:
    """Fig. 7: which layers of which tokens have a unit, and the transient units beside them."""
    figure, axes = _figure(len(EXAMPLES))
    blocks, per_block = SHAPE.blocks_for(TOKENS), SHAPE.block_tokens
    names = [f"request {r}, tokens {b * per_block + 1}-{(b + 1) * per_block}"
             for r in REQUESTS for b in range(blocks)]  # fmt: skip
    for place, (name, (l1, l2)) in zip(axes, EXAMPLES.items(), strict=True):
        found = example(name)
        rows = [row for r in REQUESTS for row in found.table.units[found.table.blocks_of(r)]]
        for y, units in enumerate(rows):
            for group, unit in enumerate(units.tolist()):
                _unit(place, group, y, f"unit {unit}" if unit >= 0 else "", "C2")
        for y, unit in enumerate(found.transient.tolist()):
            _unit(place, SHAPE.num_groups + 0.3, y, f"unit {unit}", "C1")
        place.set(xlim=(0, SHAPE.num_groups + 1.4), ylim=(len(names), 0),
                  yticks=[y + 0.5 for y in range(len(names))],
                  xlabel=f"layers (transient: right); {l1} swapped, {l2} recomputed",
                  title=f"example {name}", ylabel="logical block")  # fmt: skip
        place.set_xticks([g + 0.5 for g in range(SHAPE.num_groups)],
                         [f"{g * 4 + 1}-{g * 4 + 4}" for g in range(SHAPE.num_groups)])  # fmt: skip
        place.set_yticklabels(names if name == "A" else [], fontsize=7)
    return _svg(figure)


def _unit(place: Any, x: float, y: float, text: str, colour: str) -> None:
    """One unit of a block; without text, one that is not there."""
    place.bar(x + 0.5, 0.8, width=0.9, bottom=y + 0.1, edgecolor="black",
              color=colour if text else "white")  # fmt: skip
    place.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=6)


def offline(done: Sequence[Done]) -> str:
    """Fig. 11 of the paper on elastic memory, over vLLM's under the same load."""
    names = [f"{d.job.variant}, {d.job.load.data_set}" for d in done]
    vllm = {d.job.load.data_set: d for d in done if d.job.variant == "vllm"}
    axes = {"total tokens/s": total, "decode tokens/s": decode, "largest batch": largest}
    values = {
        f"{axis} over vLLM's": [of(d) / of(vllm[d.job.load.data_set]) for d in done]
        for axis, of in axes.items()
    }
    return bars(names, values)


def decisions(results: Results) -> str:
    """Fig. 16: times of decisions, measured here."""
    found = results.overheads.decisions
    names = [f"{one.name}: {one.solver}" for one in found]
    return bars(names, {"mean decision, ms": [d.bench.decision.mean_us / 1e3 for d in found],
                        "p99, ms": [d.bench.decision.p99_us / 1e3 for d in found]})  # fmt: skip
