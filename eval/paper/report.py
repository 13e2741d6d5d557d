"""The report of `ellm-sgl paper`: one HTML file that needs no network."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from ellm_sgl import __version__
from ellm_sgl.eval.paper import plots
from ellm_sgl.eval.paper.bounds import TOKENS
from ellm_sgl.eval.paper.plan import EAGER, MODEL, SLO_SCALE, TTFT_SLO_S, UNIT_RATE
from ellm_sgl.eval.paper.results import Results
from ellm_sgl.eval.paper.table import Row, rows

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-size: 13px } th, td { border: 1px solid #ccc;
padding: .3rem .5rem; text-align: left; vertical-align: top } th { background: #f3f3f3 }
td.n { text-align: right; white-space: nowrap } figure { margin: 1.5rem 0 }
figcaption { color: #444; font-size: 13px } svg { max-width: 100%; height: auto }
"""


def render(results: Results) -> str:
    """The HTML document."""
    body = "\n".join([_introduction(results), _table(rows(results)), *_figures(results), _limits()])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>The eLLM paper's evaluation, simulated</title><style>{STYLE}</style></head>"
        f"<body>\n{body}\n</body></html>\n"
    )


def _introduction(results: Results) -> str:
    bound = "".join(
        f"<li>{b.machine}: {b.requests} requests of {TOKENS} tokens fill memory; step "
        f"{b.step_s * 1e3:.1f} ms, of which {b.fixed_s * 1e3:.1f} ms do not depend on them; "
        f"ceiling of any policy's throughput {b.throughput_ceiling:.2f}x; free per step "
        f"{b.free_swap:.1%} of memory by swapping, {b.free_recompute:.2%} by recomputation.</li>"
        for b in results.bounds
    )
    size = "" if results.scale == 1 else f" Run at {results.scale:g} of the full request counts."
    return f"""<h1>The eLLM paper's evaluation, simulated</h1>
<p>Written by <code>ellm-sgl paper</code> {__version__} on {datetime.now(UTC):%d %B %Y}. Figures of
the paper (EuroSys'26) stand beside what this project's simulator gives for the same load and what
was measured on the machine that wrote this. Nothing was adjusted to come out alike. The simulator
runs the server's own policies, control loop and page table; its device is the
<b>{results.latency_model}</b> latency model.{size}</p>
<h2>What bounds a gain</h2><ul>{bound}</ul>
<p>Where a ratio below is far from 1, this is why: more requests at once share only the reading of
the weights. Each further request's KV has to be read like any other's, and restored first.</p>"""


def _table(found: Sequence[Row]) -> str:
    def line(row: Row) -> str:
        ours = (f(v) for v in (row.simulated, row.measured) for f in (row.cell, row.ratio))
        figures = "".join(f'<td class="n">{text}</td>' for text in (row.cell(row.paper), *ours))
        where, quantity, why = map(html.escape, (row.where, row.quantity, row.why))
        return f"<tr><td>{where}</td><td>{quantity}</td>{figures}<td>{why}</td></tr>"

    return (
        "<h2>Paper, simulated, measured</h2><table><thead><tr><th>where</th><th>what</th>"
        "<th>paper said</th><th>simulated</th><th>/ paper</th><th>measured here</th>"
        "<th>/ paper</th><th>why it differs, or how it was taken</th></tr></thead><tbody>"
        + "".join(map(line, found))
        + "</tbody></table>"
    )


def _figures(results: Results) -> Iterator[str]:
    yield "<h2>Figures</h2>"
    yield _plot(
        plots.lines(results.variants("3"), "target uncached ratio r", *plots.LATENCIES),
        f"Figs. 3-4. {MODEL}, ShareGPT: the same uncached ratio for every request, restored by "
        "recomputation, by swapping, or by the faster mix of both.",
    )
    for compared in results.comparisons():
        yield _plot(
            plots.comparison(compared),
            f"Figs. 10 and 12. {compared.load}, the paper's arrivals. Each server at SGLang's "
            f"default conservativeness, 1, and at {EAGER:g}.",
        )
        yield _plot(
            plots.running(compared),
            f"Fig. 11. {compared.load}: requests that decode together, each server at its better "
            "setting, and how much of them eLLM restores.",
        )
    for machine in dict.fromkeys(d.job.machine for d in results.of("13")):
        group = [d for d in results.of("13") if d.job.machine == machine]
        yield _plot(
            plots.runs([d.job.variant for d in group], group, *plots.LATENCIES),
            f"Fig. 13. {machine}, ShareGPT: eLLM with parts left out.",
        )
    yield _plot(
        plots.lines(
            results.variants("14"), f"arrival rate, multiples of {UNIT_RATE:g} requests/s",
            "output tokens/s", "mean TTFT, s", "SLO attainment, %",
        ),
        f"Fig. 14. {MODEL}, ShareGPT: load sweep, each server at its better setting. SLOs: TTFT "
        f"{TTFT_SLO_S:g} s, TPOT {SLO_SCALE:g} times the step of a full memory (this report's; the "
        "paper's are not available here).",
    )  # fmt: skip
    yield _plot(
        plots.goodputs(results),
        "Fig. 15. The largest rate at which 90 % of the requests meet both SLOs.",
    )
    yield _plot(
        plots.decisions(results),
        "Fig. 16. Time to decide, measured here: 256 requests running and 1,024 waiting; about "
        "other requests each time (decision), or one token later (steady).",
    )
    yield _plot(
        plots.lines(
            results.variants("6.6"),
            "error of the policy's latency model (share)",
            "output tokens/s",
            "p99 TPOT, ms",
        ),
        "§6.6. The policy's model is wrong by up to 20 %, and does not learn.",
    )


def _plot(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _limits() -> str:
    return """<h2>What the simulation leaves out</h2><ul>
<li>Output lengths are unknown to the servers: requests say they may generate 4,096 tokens
(ShareGPT) or 16,384 (L-Eval). Lengths are log-normal with the paper's means; their spread is an
assumption (ShareGPT: sigma 1, L-Eval: 0.5).</li>
<li>There is no prefix cache, and copying to host memory costs nothing. Host memory is not
bounded. Tensor-parallel ranks pay two all-reduces per layer of 20 µs each.</li>
<li>The baselines share SGLang's admission with eLLM; what each keeps of its original is told in
<code>ellm_sgl/eval/simulator/modes.py</code>.</li>
<li>Up to 8 decode steps (4 on llama3-8b) follow one decision: on llama3-8b, where it matters most,
up to 1 % of the tokens per second and 7 % of the TTFT against one step per decision.</li></ul>"""
